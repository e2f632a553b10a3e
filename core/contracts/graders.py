"""Graders as the OpenAI wire spells them. A grader turns (sample, item) into a reward; templates are `{{item.x}}` and `{{sample.x}}`."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from core.contracts.base import Contract

TextMetric = Literal["fuzzy_match", "bleu", "gleu", "meteor", "cosine", "rouge_1", "rouge_2", "rouge_3", "rouge_4", "rouge_5", "rouge_l"]


class StringCheckGrader(Contract):
    """1 if the comparison holds, else 0."""

    type: Literal["string_check"]
    name: str = Field(min_length=1, max_length=64, description="Name of the part in metrics and in a multi grader's formula.")
    input: str = Field(description="Template; usually {{sample.output_text}} or {{sample.output_json.field}}.")
    reference: str = Field(description="Template; what the input is compared with.")
    operation: Literal["eq", "ne", "like", "ilike"] = Field(
        description="eq, ne: equal or not; like: input contains reference; ilike: the same, case ignored."
    )


class TextSimilarityGrader(Contract):
    """A similarity from 0 to 1."""

    type: Literal["text_similarity"]
    name: str = Field(min_length=1, max_length=64, description="Name of the part in metrics and in a multi grader's formula.")
    input: str = Field(description="Template; the text that is graded.")
    reference: str = Field(description="Template; the text it should resemble.")
    evaluation_metric: TextMetric = Field(description="Which similarity.")


class MultiGrader(Contract):
    """Several graders and a formula over their names."""

    type: Literal["multi"]
    name: str = Field(default="multi", min_length=1, max_length=64, description="Name of the whole.")
    graders: dict[str, Grader] = Field(min_length=1, max_length=32, description="Parts by the name that the formula uses.")
    calculate_output: str = Field(
        min_length=1,
        max_length=1000,
        description="Arithmetic over the parts' names with + - * / ** % ( ), comparisons, min, max, abs, floor, ceil, exp, sqrt, log.",
    )

    @model_validator(mode="after")
    def _names(self) -> Self:
        for name in self.graders:
            if not name.isidentifier():
                raise ValueError(f"graders: {name!r} can't be used in a formula; use letters, digits and underscores, no digit first")
        return self


Grader = Annotated[StringCheckGrader | TextSimilarityGrader | MultiGrader, Field(discriminator="type")]
MultiGrader.model_rebuild()
