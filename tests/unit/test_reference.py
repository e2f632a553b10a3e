"""The reference pages say what the code does."""

from cli.reference import DOCS, job_page, settings_page
from core.contracts import AlgorithmSettings, LoraSettings, OptimizerSettings, RolloutSettings
from core.settings import Settings


def test_pages_are_current() -> None:
    assert (DOCS / "job-settings.md").read_text() == job_page(), "run `python -m cli.reference`"
    assert (DOCS / "settings.md").read_text() == settings_page(), "run `python -m cli.reference`"


def test_every_field_says_what_it_is() -> None:
    for model in (AlgorithmSettings, LoraSettings, OptimizerSettings, RolloutSettings, Settings):
        for name, field in model.model_fields.items():
            assert field.description, f"{model.__name__}.{name} lacks a description"
