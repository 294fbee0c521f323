"""S2: the CPU layer is a warm buffer of `cpu_memory_size_GB` between GPU and disk: a hard limit; what leaves the GPU is hit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pages import PAGE, prompt
from support import crowd, serve, settle, until

from kvstrata.cache import PrefixCache
from kvstrata.gpu import Slab

# A page of 16 tokens has 4,096 bytes.
MODEL = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 16, "torch_dtype": "float32"}


@pytest.mark.parametrize("size", ["0.001", "100KiB", 0.000123])
def test_it_takes_what_it_was_given_and_no_more(size: Any) -> None:
    given = {"0.001": 1_000_000, "100KiB": 102_400, 0.000123: 123_000}[size]
    settings = {"attn": {"page_size": 16}, "kvc2": {"cpu_memory_size_GB": size, "gpu_memory_size_GB": "40KiB"}}
    with PrefixCache.open(MODEL, settings, dtype="float32", say=None) as cache:
        place = cache.slab
        assert place.stride == 4096
        assert place.rows == given // 4096


def test_under_pressure_the_limit_holds_and_the_rest_goes_to_disk(open_cache: Any, tmp_path: Path) -> None:
    cache = open_cache(gpu=16, cpu=10, disk=tmp_path / "disk")
    most = 0
    for seed in range(40):
        serve(cache, prompt(5, seed))
        if seed % 4 == 3:
            settle(cache)
        stats = cache.stats()["cpu"]
        assert stats["pages"] + stats["free"] <= stats["capacity"] == 10
        most = max(most, stats["pages"])
    assert most == 10  # and is used
    stats = cache.stats()
    assert stats["cpu"]["evicted"] > 0
    assert stats["disk"]["pages"] > 50


def test_what_leaves_the_gpu_is_hit_in_ram(open_cache: Any, tmp_path: Path) -> None:
    cache = open_cache(gpu=6, cpu=20, disk=tmp_path / "disk")
    tokens = prompt(5)
    serve(cache, tokens)
    settle(cache)
    crowd(cache, 1)
    reads = cache.stats()["disk"]["read_requests"]
    served = serve(cache, tokens)  # every byte is compared there
    assert served == (4 * PAGE, 0, 4 * PAGE, 0)
    assert cache.stats()["disk"]["read_requests"] == reads
    assert serve(cache, tokens) == (4 * PAGE, 4 * PAGE, 0, 0)


def test_it_works_without_a_disk(open_cache: Any) -> None:
    cache = open_cache(gpu=6, cpu=20)
    tokens = prompt(5)
    serve(cache, tokens)
    settle(cache)
    crowd(cache, 1)
    assert serve(cache, tokens).cpu == 4 * PAGE
    crowd(cache, 6)
    assert serve(cache, tokens).hit == 0  # no tier below: what does not fit is gone


@pytest.mark.cuda
def test_it_is_pinned_beside_a_gpu(open_cache: Any) -> None:
    cache = open_cache(gpu=6, cpu=20, device="cuda")
    address, rows, stride, _ = cache.slab
    memory = torch.from_numpy(Slab(address, rows, stride).bytes())
    until(memory.is_pinned, "the CPU tier is pinned")
