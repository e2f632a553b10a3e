"""The base of every contract: frozen, and closed to unknown fields so that a typing error is an error."""

from pydantic import BaseModel, ConfigDict


class Contract(BaseModel):
    """A value that crosses a boundary (request, database, message)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
