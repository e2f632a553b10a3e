"""Which rollouts the settings ask for."""

from core.settings import Settings
from engine.rollouts.local import LocalRollouts
from engine.types import Rollouts, Trainer


def make_rollouts(settings: Settings, trainer: Trainer, local: LocalRollouts) -> Rollouts:
    """What samples for training jobs; serving is `local` always.

    Raises:
        InvalidInput: rollouts is vllm and vllm_url says not where.
    """
    if settings.rollouts == "local":
        return local
    from engine.rollouts.vllm import VllmRollouts

    return VllmRollouts(settings, trainer)
