"""What is asked of a job, checked before anything is queued: the method, and settings that do not go together."""

from api.openai.job_schemas import ALGORITHM_OF, JobCreate
from core.contracts import (
    AlgorithmSettings,
    Hyperparameters,
    ReinforcementSettings,
    SupervisedHyperparameters,
    SupervisedSettings,
)
from core.errors import InvalidInput
from core.settings import get_settings
from engine.graders import validate_grader

METHODS = ("reinforcement", "supervised", "dpo")
_USED_BY = {"sft": {"loss_aggregation"}, "dpo": {"beta", "share_backbone"}}
"""Settings of the objective that algorithms without rollouts read."""


def method_settings(body: JobCreate) -> tuple[ReinforcementSettings | None, SupervisedSettings | None]:
    """The method's settings as a job stores them: one of the two.

    Raises:
        InvalidInput: a method that contradicts the algorithm, a grader that could not grade, a field that is not supported.
    """
    method = body.method
    if method is None:
        raise InvalidInput("method: required; send {'type': 'reinforcement', 'reinforcement': {'grader': …}}.", param="method")
    for other in METHODS:
        if other != method.type and getattr(method, other) is not None:
            raise InvalidInput(f"method.{other}: does not go with type {method.type!r}; leave it out.", param=f"method.{other}")
    if body.hyperparameters is not None:
        message = f"hyperparameters: OpenAI's old place of them; move them to method.{method.type}.hyperparameters."
        raise InvalidInput(message, param="hyperparameters")
    if body.integrations:
        raise InvalidInput("integrations: none is supported; leave it out.", param="integrations")
    wanted = ALGORITHM_OF.get(method.type)
    if (wanted is None and not body.algorithm.samples) or (wanted is not None and body.algorithm.name != wanted):
        fitting = f"name {wanted!r}, or leave it out" if wanted else "one that samples; for sft and dpo the method is supervised or dpo"
        message = f"algorithm.name: {body.algorithm.name!r} does not go with method {method.type!r}; give {fitting}."
        raise InvalidInput(message, param="algorithm.name")
    if method.type == "reinforcement":
        settings = method.reinforcement
        if settings is None:
            raise InvalidInput("method.reinforcement: required with this type; give at least its grader.", param="method.reinforcement")
        validate_grader(settings.grader, None, param="method.reinforcement.grader")
        return ReinforcementSettings(grader=settings.grader, hyperparameters=settings.hyperparameters or Hyperparameters()), None
    given = method.dpo if method.type == "dpo" else method.supervised
    asked = SupervisedHyperparameters() if given is None or given.hyperparameters is None else given.hyperparameters
    beta = getattr(asked, "beta", "auto")
    if beta not in ("auto", body.algorithm.beta):
        message = f"method.dpo.hyperparameters.beta: {beta} here and {body.algorithm.beta} in algorithm; give it once."
        raise InvalidInput(message, param="method.dpo.hyperparameters.beta")
    shared = {name: getattr(asked, name) for name in SupervisedHyperparameters.model_fields}
    return None, SupervisedSettings(hyperparameters=SupervisedHyperparameters(**shared))


def check_settings(body: JobCreate) -> None:
    """Refuses settings that would be without effect, or that contradict each other.

    Raises:
        InvalidInput: `param` names the field.
    """
    algorithm = body.algorithm
    max_model_len = get_settings().max_model_len
    if algorithm.samples and body.rollout.max_tokens >= max_model_len:
        message = f"rollout.max_tokens: {body.rollout.max_tokens} leaves no room for a prompt: there are {max_model_len} tokens in all."
        raise InvalidInput(message, param="rollout.max_tokens")
    if not algorithm.samples:
        _check_supervised(body)
    if body.lora is not None and body.lora.kind == "full":
        message = "lora.kind: a job ends in an adapter that can be served, and dense changes of kind full are none; use lora."
        raise InvalidInput(message, param="lora.kind")
    if body.validation_file is None:
        for name in ("early_stop_patience", "publish"):
            if getattr(body.evaluation, name) not in (None, "last"):
                message = f"evaluation.{name}: is decided on held-out rows; give a validation_file, or leave it out."
                raise InvalidInput(message, param=f"evaluation.{name}")
    if body.start_learning_rate > 0 and body.start_mode != "stack":
        message = "start_learning_rate: is that of an adapter under a stacked one; set start_mode to stack, or leave it out."
        raise InvalidInput(message, param="start_learning_rate")


def _check_supervised(body: JobCreate) -> None:
    name = body.algorithm.name
    default = AlgorithmSettings(name=name)
    for field in AlgorithmSettings.model_fields:
        if field not in _USED_BY[name] and getattr(body.algorithm, field) != getattr(default, field):
            raise InvalidInput(f"algorithm.{field}: has no meaning for {name}; leave it out.", param=f"algorithm.{field}")
    if body.warm_up.steps:
        message = f"warm_up.steps: a job of {name} is supervised throughout; leave warm_up out."
        raise InvalidInput(message, param="warm_up.steps")
    if body.curriculum.mode == "pass_rate":
        message = f"curriculum.mode: pass_rate needs rewards, and {name} grades nothing; use difficulty or none."
        raise InvalidInput(message, param="curriculum.mode")
