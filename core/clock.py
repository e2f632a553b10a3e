"""One clock. Unix seconds, since the OpenAI wire speaks them and every database compares them alike."""

import time


def now_s() -> float:
    """Seconds since the epoch, UTC."""
    return time.time()
