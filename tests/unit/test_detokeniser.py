"""Text of a growing completion: characters over several tokens, stop strings over token borders, nothing taken back."""

import random
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from engine.rollouts.detokeniser import Detokeniser


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model)


def stream(tokenizer: Any, tokens: list[int], stop: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    """All pieces, what is held back at the end included, and whether a stop string ended it."""
    detokeniser = Detokeniser(tokenizer, stop)
    pieces: list[str] = []
    for token in tokens:
        text, stopped = detokeniser.push(token)
        pieces.append(text)
        if stopped:
            break
    else:
        stopped = False
        pieces.append(detokeniser.finish())
    assert "".join(pieces) == detokeniser.text
    return pieces, stopped


@pytest.mark.parametrize("text", ["plain", "zwölf Äpfel", "日本語テキスト", "a 🦊 b 👩‍👩‍👧 c", ""])
def test_whole_characters_only(tokenizer: Any, text: str) -> None:
    pieces, stopped = stream(tokenizer, tokenizer(text)["input_ids"])
    assert "".join(pieces) == text
    assert not stopped
    assert all("�" not in piece for piece in pieces)


def test_any_tokens_give_what_decode_gives(tokenizer: Any) -> None:
    chance = random.Random(0)
    for _ in range(200):
        tokens = [chance.randrange(259) for _ in range(chance.randrange(1, 40))]
        assert "".join(stream(tokenizer, tokens)[0]) == tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("text", "stop", "expected", "stopped"),
    [
        ("one. two. three", (". ",), "one", True),
        ("a</s", ("</s>",), "a</s", False),
        ("a<<</s>b", ("</s>",), "a<<", True),
        ("xyz", ("z", "yz"), "x", True),
        ("日本語です", ("語",), "日本", True),
        ("stop", ("stop",), "", True),
        ("nothing", ("",), "nothing", False),
        ("aab", ("ab", "aab"), "", True),
    ],
)
def test_stop_strings(tokenizer: Any, text: str, stop: tuple[str, ...], expected: str, stopped: bool) -> None:
    pieces, ended = stream(tokenizer, tokenizer(text)["input_ids"], stop)
    assert ("".join(pieces), ended) == (expected, stopped)


def test_a_stop_string_is_seen_at_its_last_token(tokenizer: Any) -> None:
    tokens = tokenizer("ab|cd")["input_ids"]
    detokeniser = Detokeniser(tokenizer, ("|c",))
    assert [detokeniser.push(token)[1] for token in tokens[:4]] == [False, False, False, True]
