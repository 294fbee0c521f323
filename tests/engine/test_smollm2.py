"""A real model with a real tokenizer against transformers' generate()."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvstrata.cache import PrefixCache
from kvstrata.engine import Engine, Request, Sampling
from kvstrata.models import load_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Any:
    return load_model(smollm2_path)


def chat(tokenizer: Any, question: str) -> list[int]:
    said = [{"role": "user", "content": question}]
    return list(tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=True)["input_ids"])


def test_answers(smollm2: Any, make_cache: Callable[..., PrefixCache]) -> None:
    model, tokenizer = smollm2
    prompts = [
        chat(tokenizer, f"What is the capital of {country}? {'Answer shortly. ' * 20}") for country in ("France", "Italy", "Japan")
    ]
    model.set_attn_implementation("sdpa")
    expected = [
        model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0, len(prompt) :].tolist() for prompt in prompts
    ]
    engine = Engine(model, tokenizer, make_cache(model, gpu_pages=60, chunk=64))
    for _ in range(2):  # three beside each other, cold and from the cache
        assert [sequence.output for sequence in engine.generate(prompts, max_new_tokens=24)] == expected
    assert "Paris" in engine.generate([chat(tokenizer, "What is the capital of France?")], max_new_tokens=24)[0].text
    sequence = engine.submit(Request(prompts[0], Sampling(max_new_tokens=24)))
    assert "".join(sequence.pieces()) == sequence.text
    assert sequence.stats.reused_tokens["gpu"] == (len(prompts[0]) - 1) // 64 * 64


def test_stop_strings_across_tokens(smollm2: Any, make_cache: Callable[..., PrefixCache]) -> None:
    model, tokenizer = smollm2
    engine = Engine(model, tokenizer, make_cache(model))
    prompt = chat(tokenizer, "Count from one to twenty in words.")
    (free,) = engine.generate([prompt], max_new_tokens=32)
    stop = free.text[20:27]
    sequence = engine.submit(Request(prompt, Sampling(max_new_tokens=32, stop=stop)))
    assert "".join(sequence.pieces()) == sequence.text == free.text[: free.text.index(stop)]
    assert sequence.reason == "stop"
    assert stop in tokenizer.decode(sequence.output)
    assert stop not in tokenizer.decode(sequence.output[:-1])
