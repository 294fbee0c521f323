"""The demo's prompts: cut for any tokenizer so that hits end at the boundary and little is left to compute."""

import re
from collections import defaultdict
from itertools import count
from typing import Any

import pytest

from kvstrata.demo.prompts import QUESTIONS, SHARED_TOKENS, TAIL_TOKENS, TextTooShort, alice, make_prompts


class Words:
    """A tokenizer of the shape the demo uses; `pieces` decides how coarse it is."""

    def __init__(self, pieces: str, chat: bool) -> None:
        self.pieces = re.compile(pieces)
        self.chat_template = "yes" if chat else None
        self.ids: defaultdict[str, int] = defaultdict(count().__next__)

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [self.ids[piece] for piece in self.pieces.findall(text)]}

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return f"<system> be kind <user> {messages[0]['content']} <assistant>"


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("pieces", [r"\s?\w+|\s*[^\w\s]|\s", r"\s*\S{1,4}", r"."], ids=["words", "fours", "letters"])
@pytest.mark.parametrize(
    ("page_size", "chunk"), [(16, 16), (16, 256), (32, 512), (64, 256), (256, 256), (512, 512), (1024, 1024), (256, 4096)]
)
def test_cut_just_after_a_boundary(page_size: int, chunk: int, pieces: str, chat: bool) -> None:
    prompts = make_prompts(Words(pieces, chat), page_size, chunk)
    assert prompts.boundary >= SHARED_TOKENS
    assert prompts.boundary % chunk == prompts.boundary % page_size == 0
    assert prompts.boundary <= prompts.shared <= prompts.boundary + TAIL_TOKENS
    assert prompts.shared // page_size * page_size == prompts.boundary  # every full page of the shared part can be hit
    first, second = prompts.tokens
    assert first[: prompts.shared] == second[: prompts.shared]
    assert first[prompts.shared] != second[prompts.shared]
    other = prompts.other(0, 100)
    assert other[0] != first[0]  # or small pages of other prompts would be those of ours


def test_a_grid_longer_than_the_text_is_said() -> None:
    with pytest.raises(TextTooShort, match="chunk 65536"):
        make_prompts(Words(r"\s*\S+", False), 256, 65536)
    prompts = make_prompts(Words(r"\s*\S+", False), 256, 256)
    with pytest.raises(TextTooShort, match="smaller"):
        prompts.other(0, 1 << 20)


def test_the_text_is_whole() -> None:
    text = alice()
    assert text.startswith("CHAPTER I\n\nDown the Rabbit-Hole\n\nAlice was beginning to get very tired")
    assert [line for line in text.splitlines() if line.startswith("CHAPTER")] == [
        f"CHAPTER {n}" for n in ("I", "II", "III", "IV", "V")
    ]
    assert len(set(QUESTIONS)) == len(QUESTIONS)
