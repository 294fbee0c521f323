"""S8: `gpu_only: true` keeps the GPU layer alone, in which prefixes are still reused; `false` enables all three."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_kit import BYTES, tiny_model, words
from every_tier import push_out

from kvstrata.cache import PrefixCache
from kvstrata.engine import Engine, Request, Sampling

CHUNK = 32


@pytest.fixture
def opened(tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    """opened(gpu_only): (a model's cache from a config.yaml, an engine on it, the lines it said)."""
    torch.set_num_threads(1)

    def open_it(gpu_only: bool) -> tuple[PrefixCache, Engine, list[str]]:
        model, lines = tiny_model("llama"), []
        row = 16 * 3 * 2 * 16 * 4  # bytes of a page
        (tmp_path / "config.yaml").write_text(
            f"attn: {{page_size: 16, chunk_size: {CHUNK}}}\n"
            f"kvc2: {{gpu_only: {str(gpu_only).lower()}, gpu_memory_size_GB: {12 * row / 1e9}, cpu_memory_size_GB: 0.001,\n"
            f"  disk_path: {tmp_path / 'disk'}, disk_size_GB: 0.05}}\n"
        )
        cache = PrefixCache.open(model, str(tmp_path / "config.yaml"), say=lines.append)
        request.addfinalizer(cache.close)
        return cache, Engine(model, BYTES, cache), lines

    return open_it


def serve(engine: Engine, prompt: list[int]) -> tuple[list[int], dict[str, int]]:
    sequence = engine.submit(Request(prompt, Sampling(max_new_tokens=4, ignore_eos=True))).result()
    assert sequence.reason == "length", sequence.error
    return sequence.output, {tier: tokens for tier, tokens in sequence.stats.reused_tokens.items() if tokens}


def test_true_keeps_the_gpu_layer_only(opened: Any, tmp_path: Path) -> None:
    cache, engine, lines = opened(True)
    assert "warning: kvc2.cpu_memory_size_GB, kvc2.disk_path, kvc2.disk_size_GB: not used, since kvc2.gpu_only is true" in lines
    assert cache.slab.rows == 0
    prompt = words(3 * CHUNK)
    first, reused = serve(engine, prompt)
    assert reused == {}
    assert serve(engine, prompt) == (first, {"gpu": 2 * CHUNK})
    assert cache.flush(30)  # nothing is saved anywhere, and nothing waits to be (R11)
    stats = cache.stats()
    assert (stats["downs"], stats["disk_writes"], stats["cpu"]["pages"]) == (0, 0, 0)
    push_out(cache, len(prompt), 1)
    assert serve(engine, prompt) == (first, {})  # no layer below had it
    assert cache.close()
    assert not (tmp_path / "disk").exists()
    _, engine, _ = opened(True)
    assert serve(engine, prompt) == (first, {})


def test_false_enables_all_three(opened: Any, tmp_path: Path) -> None:
    cache, engine, lines = opened(False)
    assert not [line for line in lines if line.startswith("warning")]
    prompt = words(3 * CHUNK)
    first, reused = serve(engine, prompt)
    assert reused == {}
    assert serve(engine, prompt) == (first, {"gpu": 2 * CHUNK})
    cache.flush(30)
    push_out(cache, len(prompt), 1)
    assert serve(engine, prompt) == (first, {"cpu": 2 * CHUNK})
    assert cache.close()
    _, engine, _ = opened(False)
    assert serve(engine, prompt) == (first, {"disk": 2 * CHUNK})
