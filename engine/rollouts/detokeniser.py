"""Text of one completion while it grows, and the stop strings in it."""

from collections.abc import Sequence
from typing import Any

REPLACEMENT = "�"
"""What an unfinished UTF-8 sequence decodes to."""


class Detokeniser:
    """Turns tokens into text that never has to be taken back.

    Bytes of an unfinished character wait for the rest; with stop strings, so does what may be the beginning of one.

    Args:
        tokenizer: with `decode`.
        stop: strings at the first of which the text ends, exclusive.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(s for s in stop if s)
        self._hold_back = max((len(s) for s in self._stop), default=1) - 1
        self._tokens: list[int] = []
        self._window = 0
        self._read = 0
        self._settled = ""
        self._given = 0
        self._ended = False

    def push(self, token: int) -> tuple[str, bool]:
        """Adds a token (not one that ended the completion).

        Returns:
            (text that is new and final, whether a stop string ended the completion).
        """
        self._tokens.append(token)
        before = self._decode(self._tokens[self._window : self._read])
        pending = self._decode(self._tokens[self._window :])[len(before) :]
        complete = not pending.endswith(REPLACEMENT)
        if complete:
            searched_from = max(0, len(self._settled) - self._hold_back)
            self._settled += pending
            self._window, self._read = self._read, len(self._tokens)
            return self._give(searched_from)
        return self._give(max(0, len(self._settled) - self._hold_back), pending.rstrip(REPLACEMENT))

    def finish(self) -> str:
        """What was held back, once the completion ended by itself; unfinished characters become U+FFFD."""
        if self._ended:
            return ""
        before = self._decode(self._tokens[self._window : self._read])
        searched_from = max(0, len(self._settled) - self._hold_back)
        self._settled += self._decode(self._tokens[self._window :])[len(before) :]
        self._hold_back = 0
        return self._give(searched_from)[0]

    @property
    def text(self) -> str:
        """All text given so far."""
        return self._settled[: self._given]

    def _give(self, searched_from: int, unsettled: str = "") -> tuple[str, bool]:
        seen = self._settled + unsettled
        found = min((at for s in self._stop if (at := seen.find(s, searched_from)) >= 0), default=-1)
        if found >= 0:
            self._settled, self._ended = seen[:found], True
            end = found
        else:
            end = max(self._given, len(self._settled) - self._hold_back)
        new = self._settled[self._given : end]
        self._given = end
        return new, self._ended

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))
