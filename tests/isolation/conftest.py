"""The live API, for every test here that asks for it."""

from tests.live_api import api

__all__ = ["api"]
