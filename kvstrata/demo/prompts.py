"""The demo's prompts: a real text with a question after it, cut so that the shared part ends just after a page boundary.

The text is chapters I to V of "Alice's Adventures in Wonderland" (Lewis Carroll, 1865; public domain).
"""

import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import combinations
from typing import Any

SHARED_TOKENS = 2048  # the shared part is at least this long
TAIL_TOKENS = 32  # and ends at most this many tokens after a page boundary
QUESTIONS = (
    "What words were printed on the label of the little bottle?",
    "What is the name of the cat that Alice talks about?",
    "What did Alice see when she looked through the little door?",
    "What did the White Rabbit take out of its waistcoat-pocket?",
    "What was written on the jar that Alice took down from the shelf?",
)
# Where a passage may end, the best place first: after a sentence, after a clause, after a word.
ENDS = tuple(re.compile(pattern) for pattern in (r"(?<=[.!?])(?=\s)|(?<=[.!?][')])(?=\s)", r"(?<=[,;:])(?=\s)", r"(?<=\w)(?=\s)"))


class TextTooShort(Exception):
    """The demo's text has fewer tokens than the page and chunk sizes ask for. The text is one sentence."""


@dataclass(frozen=True)
class Prompts:
    """Token ids, and what is known about them."""

    questions: tuple[str, str]
    tokens: tuple[tuple[int, ...], tuple[int, ...]]  # one prompt per question
    shared: int  # tokens that both prompts begin with
    boundary: int  # `shared` rounded down to a multiple of page and chunk size: what a hit can cover
    others: tuple[int, ...]  # the text after the passage: what other prompts are made of

    def other(self, start: int, length: int) -> list[int]:
        """Another prompt: `length` tokens of the text, from `start` on. Raises TextTooShort."""
        if start + length > len(self.others):
            raise TextTooShort(
                f"The demo's text ends {start + length - len(self.others)} tokens too early for these page and "
                "chunk sizes: choose smaller ones."
            )
        return list(self.others[start : start + length])


def make_prompts(tokenizer: Any, page_size: int, chunk: int) -> Prompts:
    """Prompts for any tokenizer. chunk: the prefill grid, a multiple of page_size tokens. Raises TextTooShort."""
    boundary = -(-SHARED_TOKENS // chunk) * chunk
    # Shorter than a page, so that every full page of the shared part lies before the boundary.
    latest = boundary + min(TAIL_TOKENS, page_size - 1)
    pair = _questions(tokenizer)
    text = alice()

    @cache
    def prompts(end: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (_encode(tokenizer, text[:end], pair[0]), _encode(tokenizer, text[:end], pair[1]))

    def shared(end: int) -> int:
        return _common(*prompts(end))

    for pattern in ENDS:
        ends = [match.end() for match in pattern.finditer(text)]
        at = _first(ends, lambda end: shared(end) >= boundary)
        # One more token than a place before may still have fewer shared ones (tokens merge), so look at every place in reach.
        for end in ends[at : at + TAIL_TOKENS]:
            if boundary <= shared(end) <= latest:
                others = tokenizer(text[end:].lstrip(), add_special_tokens=False)["input_ids"]
                return Prompts(pair, prompts(end), shared(end), boundary, tuple(others))
    raise TextTooShort(
        f"The demo's text cannot be cut within {latest - boundary} tokens after token {boundary} for this tokenizer "
        f"(page size {page_size}, chunk {chunk}): choose smaller ones."
    )


def alice() -> str:
    """The whole text: paragraphs, divided by empty lines."""
    return files("kvstrata.demo").joinpath("alice.txt").read_text("utf-8")


def _questions(tokenizer: Any) -> tuple[str, str]:
    """Two questions with equally many tokens, so that one number says how long the prompts are; else the first two."""

    def length(question: str) -> int:
        return len(tokenizer(question, add_special_tokens=False)["input_ids"])

    pairs = [pair for pair in combinations(QUESTIONS, 2) if length(pair[0]) == length(pair[1])]
    return pairs[0] if pairs else (QUESTIONS[0], QUESTIONS[1])


def _encode(tokenizer: Any, passage: str, question: str) -> tuple[int, ...]:
    content = f"{passage}\n\n{question}"
    if tokenizer.chat_template:
        message = [{"role": "user", "content": content}]
        content = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        return tuple(tokenizer(content, add_special_tokens=False)["input_ids"])
    return tuple(tokenizer(f"{content}\n\nAnswer:")["input_ids"])


def _common(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """How many tokens both begin with."""
    for at, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return at
    return min(len(first), len(second))


def _first(ends: list[int], reached: Any) -> int:
    """Index of the first place for which `reached` holds, by bisection (it holds for every later one too, nearly)."""
    low, high = 0, len(ends)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if reached(ends[middle]) else (middle + 1, high)
    return low
