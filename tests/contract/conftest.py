"""The live API, for every test here that asks for it."""

from tests.live_api import api, api_on_each

__all__ = ["api", "api_on_each"]
