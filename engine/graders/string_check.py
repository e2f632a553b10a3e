"""Exact and substring comparison."""

from typing import Literal


def string_check(text: str, reference: str, operation: Literal["eq", "ne", "like", "ilike"]) -> float:
    """1.0 if the comparison holds, else 0.0. `like`: text contains reference; `ilike`: the same, case folded (Unicode)."""
    match operation:
        case "eq":
            holds = text == reference
        case "ne":
            holds = text != reference
        case "like":
            holds = reference in text
        case "ilike":
            holds = reference.casefold() in text.casefold()
    return float(holds)
