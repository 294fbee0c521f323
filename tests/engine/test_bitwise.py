"""Reuse equals recomputation bit for bit, from every tier: a request that runs alone, in chunks on the grid."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_kit import BYTES, tiny_model, words
from every_tier import CHUNK, PROMPT, check_every_tier, logits

from kvstrata.cache import PrefixCache
from kvstrata.engine import Engine
from kvstrata.models import load_model

KINDS = [("qwen3", torch.float32), ("qwen3", torch.bfloat16), ("llama", torch.float32), ("deepseek", torch.float32)]


@pytest.mark.parametrize("page_size", [16, 64, 256])
@pytest.mark.parametrize(("name", "dtype"), KINDS)
def test_every_tier(name: str, dtype: torch.dtype, page_size: int, make_cache: Callable[..., PrefixCache], tmp_path: Path) -> None:
    check_every_tier(tiny_model(name, dtype), BYTES, make_cache, page_size, words(PROMPT), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [16, 64, 256])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_tier_of_smollm2(
    smollm2_path: Path, dtype: str, page_size: int, make_cache: Callable[..., PrefixCache], tmp_path: Path
) -> None:
    model, tokenizer = load_model(smollm2_path, dtype=dtype)
    check_every_tier(model, tokenizer, make_cache, page_size, words(PROMPT), tmp_path)


def test_a_changed_key_shows(make_cache: Callable[..., PrefixCache]) -> None:
    """That the comparison above would notice."""
    model = tiny_model("qwen3")
    engine = Engine(model, BYTES, make_cache(model, page_size=64, chunk=CHUNK))
    cold, _ = logits(engine, words(PROMPT))
    engine.cache.pool.layers[1].k.mul_(1.001)
    assert not torch.equal(logits(engine, words(PROMPT))[0], cold)
