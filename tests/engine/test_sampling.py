"""Sampling with transformers' processors and criteria, per request, against transformers' generate()."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_kit import BYTES, Spell, tiny_model, words
from transformers import LogitsProcessor, StoppingCriteria

from kvstrata.cache import PrefixCache
from kvstrata.engine import Engine, Request, Sampling

PROMPT = words(40)


@pytest.fixture
def engine(make_cache: Callable[..., PrefixCache]) -> Engine:
    model = tiny_model()
    return Engine(model, BYTES, make_cache(model, gpu_pages=120))


def generated(engine: Engine, seed: int, **options: Any) -> list[int]:
    engine.model.set_attn_implementation("eager")
    torch.manual_seed(seed)
    out = engine.model.generate(torch.tensor([PROMPT]), max_new_tokens=16, **options)
    engine.model.set_attn_implementation("kvstrata")
    return list(out[0, len(PROMPT) :].tolist())


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7, "top_k": 0},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 2.0, "top_k": 0, "top_p": 0.4},
        {"temperature": 2.0, "top_k": 0, "min_p": 0.4},
        {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.5},
    ],
)
def test_same_draws_as_generate(engine: Engine, options: dict[str, Any]) -> None:
    expected = generated(engine, 11, do_sample=True, **options)
    for _ in range(2):  # cold, then from the cache
        (sequence,) = engine.generate([PROMPT], max_new_tokens=16, seed=11, **options)
        assert sequence.output == expected


def test_greedy_with_repetition_penalty(engine: Engine) -> None:
    expected = generated(engine, 0, do_sample=False, repetition_penalty=1.8)
    (sequence,) = engine.generate([PROMPT], max_new_tokens=16, repetition_penalty=1.8)
    assert sequence.output == expected


def test_requests_in_a_batch_keep_their_own_options_and_seeds(engine: Engine) -> None:
    options = [
        Sampling(max_new_tokens=10),
        Sampling(max_new_tokens=12, temperature=1.0, seed=1),
        Sampling(max_new_tokens=12, temperature=1.0, seed=2),
        Sampling(max_new_tokens=12, temperature=1.0, seed=1),
    ]
    alone = [engine.submit(Request(PROMPT, sampling)).result().output for sampling in options]
    together = [engine.submit(Request(PROMPT, sampling)) for sampling in options]
    assert [sequence.result().output for sequence in together] == alone
    assert alone[1] == alone[3] != alone[2]


def test_eos_ends_unless_ignored(make_cache: Callable[..., PrefixCache]) -> None:
    model = tiny_model()
    probe = Engine(model, BYTES, make_cache(model)).generate([PROMPT], max_new_tokens=9)[0].output
    model.generation_config.eos_token_id = [255, probe[5]]
    engine = Engine(model, BYTES, make_cache(model))
    end = probe.index(probe[5])
    (sequence,) = engine.generate([PROMPT], max_new_tokens=9)
    assert (sequence.output, sequence.reason) == (probe[: end + 1], "eos")
    (sequence,) = engine.generate([PROMPT], max_new_tokens=9, ignore_eos=True)
    assert (sequence.output, sequence.reason) == (probe, "length")


@pytest.mark.parametrize(("stop", "text"), [(["one."], "No, not "), (["zzz", "not"], "No, "), ("?", "No, not one. Or")])
def test_stop_string_ends_and_is_cut_from_text_and_stream(engine: Engine, stop: str | list[str], text: str) -> None:
    spell = Spell("No, not one. Or? Who knows", len(PROMPT))
    sequence = engine.submit(Request(PROMPT, Sampling(stop=stop, processors=[spell])))
    pieces = list(sequence.pieces())
    assert (sequence.reason, sequence.text, "".join(pieces)) == ("stop", text, text)
    assert len(pieces) > 1
    written = BYTES.decode(sequence.output)
    assert any(written == text + end for end in ([stop] if isinstance(stop, str) else stop))  # not a token more


def test_a_stop_string_in_the_prompt_does_not_count(engine: Engine) -> None:
    prompt = BYTES("The end")["input_ids"]
    sampling = Sampling(max_new_tokens=9, stop=["end", "d.", "ing"], processors=[Spell(". Nothing", len(prompt))])
    sequence = engine.submit(Request(prompt, sampling)).result()
    assert (sequence.reason, sequence.text) == ("stop", ". Noth")


def test_any_processor_and_criterion_of_transformers(engine: Engine) -> None:
    class Only(LogitsProcessor):
        def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            assert ids.shape[0] == scores.shape[0] == 1
            return torch.full_like(scores, float("-inf")).index_fill(1, ids.new_tensor([ids.shape[1] % 7]), 0.0)

    class AfterFour(StoppingCriteria):
        def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            return ids.new_tensor([ids.shape[1] == 4]).bool()

    (sequence,) = engine.generate([PROMPT], processors=[Only()], criteria=[AfterFour()])
    assert (sequence.output, sequence.reason) == ([5, 6, 0, 1], "stop")


def test_text_streams_in_whole_characters(engine: Engine) -> None:
    text = "aé漢𝄞z"
    sequence = engine.submit(Request([1], Sampling(max_new_tokens=len(text.encode()), processors=[Spell(text, 1)])))
    assert list(sequence.pieces()) == list(text)


def test_processors_that_can_be_called_once_are_refused(engine: Engine) -> None:
    for name in ("processors", "criteria"):
        (sequence,) = engine.generate([words(10)], max_new_tokens=2, **{name: iter([])})
        assert str(sequence.error).startswith(f"{name} must be a list of transformers' objects, not <list_iterator")
