"""Folding the stock client's retries: it repeats a POST after a lost answer, sends no idempotency key, and says so in a header."""

from typing import Annotated

from fastapi import Depends, Header

WINDOW_S = 600.0
"""A retry later than this is a new request; the stock client gives up within a minute."""


def _is_retry(x_stainless_retry_count: Annotated[int, Header(ge=0, include_in_schema=False)] = 0) -> bool:
    return x_stainless_retry_count > 0


IsRetry = Annotated[bool, Depends(_is_retry)]
"""Whether the client says that it sent this request before."""
