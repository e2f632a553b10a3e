"""What validation found in a job's files; stored with the job."""

from pydantic import Field

from core.contracts.base import Contract


class LineFault(Contract):
    """One fault of one line."""

    line: int = Field(ge=1, description="Line number, 1 for the first; lines end at \\n only.")
    code: str = Field(description="Kind of fault, machine-readable.")
    message: str = Field(description="What is wrong and what mends it.")


class TokenStats(Contract):
    """Tokens per prompt, the chat template's own included."""

    min: int
    mean: float
    p95: int
    max: int


class DatasetReport(Contract):
    """What one file holds."""

    num_rows: int = Field(ge=0, description="Rows without a fault.")
    num_faults: int = Field(ge=0, description="Faults in all; only the first ones are listed.")
    faults: tuple[LineFault, ...] = Field(description="Faults in the order of lines, at most 1000.")
    warnings: tuple[str, ...] = Field(description="What is allowed and perhaps not meant.")
    item_fields: tuple[str, ...] = Field(description="Fields beside messages that every row has.")
    prompt_tokens: TokenStats | None = Field(default=None, description="Null where no row could be rendered.")
