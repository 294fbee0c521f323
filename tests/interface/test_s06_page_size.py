"""S6: a page has 256 tokens unless YAML or Python says otherwise, any power of two from 16 to 1024; chunks are the larger one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_kit import BYTES, tiny_model, words
from every_tier import logits
from pages import prompt
from support import crowd, serve, settle
from transformers import Qwen3Config

from kvstrata.cache import Limits, PrefixCache
from kvstrata.config import ConfigError, Settings
from kvstrata.engine import Engine
from kvstrata.layout import PageLayout
from kvstrata.static_cache import KVC2Qwen3Cache, KVC2StaticCache

GQA = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 16}
TESTED = (16, 64, 256, 1024)
REFUSED = (0, 1, 8, 17, 100, 2048, -16)


def settings(tmp_path: Path, text: str) -> Settings:
    (tmp_path / "config.yaml").write_text(text)
    return Settings.load(tmp_path / "config.yaml", environ={})


def test_defaults(tmp_path: Path) -> None:
    found = settings(tmp_path, "kvc2: {gpu_only: true}\n")
    assert (found.attn.page_size, found.attn.chunk_size, found.chunk) == (256, 256, 256)
    cache = KVC2StaticCache(Qwen3Config(**GQA, head_dim=8), 1, device="cpu", settings={"kvc2.gpu_only": True})
    assert (cache.page_size, cache.cache.chunk) == (256, 256)
    cache.close()


@pytest.mark.parametrize("page_size", [16 << power for power in range(7)])
def test_every_power_of_two(tmp_path: Path, page_size: int) -> None:
    given = settings(tmp_path, f"attn: {{page_size: {page_size}}}\nkvc2: {{gpu_only: true}}\n")
    assert (given.attn.page_size, given.chunk) == (page_size, max(256, page_size))
    with PrefixCache.open(GQA, given, dtype="float32", say=None) as cache:
        assert cache.page_size == cache.pool.layers[0].k.shape[1] == page_size
    view = KVC2Qwen3Cache(GQA, 1, page_size, torch.float32, "cpu", settings={"kvc2.gpu_only": True})
    assert view.page_size == view.get_k_cache(0).shape[1] == page_size
    view.close()


@pytest.mark.parametrize("page_size", REFUSED)
def test_others_are_refused(tmp_path: Path, page_size: int) -> None:
    with pytest.raises(ConfigError, match=f"attn.page_size is {page_size} .*, but must be a power of two from 16 to 1024"):
        settings(tmp_path, f"attn: {{page_size: {page_size}}}\n")
    with pytest.raises(ConfigError, match=f"attn.page_size is {page_size}, but must be a power of two from 16 to 1024"):
        KVC2StaticCache(GQA, 1, page_size, torch.float32, "cpu")
    with pytest.raises(ValueError, match=f"page_size {page_size} must be a power of two from 16 to 1024"):
        PageLayout.from_config(GQA, page_size=page_size)
    assert PageLayout.from_config(GQA, page_size=1, simulator=True).page_size == 1


@pytest.mark.parametrize("page_size", TESTED)
def test_through_every_tier(open_cache: Any, tmp_path: Path, page_size: int) -> None:
    """Bytes that belong to one page and no other come back from each."""
    layout = PageLayout.from_config(GQA, page_size=page_size, dtype="float32")
    cache = open_cache(8, 24, tmp_path / "disk", 64 << 20, layout=layout)
    tokens = prompt(5, 0, page_size)
    assert serve(cache, tokens).hit == 0
    settle(cache)
    for others, tier in ((0, "gpu"), (1, "cpu"), (4, "disk")):
        crowd(cache, others)
        served = serve(cache, tokens)
        assert served.hit == getattr(served, tier) == 4 * page_size


@pytest.mark.parametrize("page_size", TESTED)
@pytest.mark.parametrize("chunk_size", [64, 256])
def test_a_model_prefills_in_chunks_of_the_larger(page_size: int, chunk_size: int, make_cache: Callable[..., PrefixCache]) -> None:
    torch.set_num_threads(1)
    model = tiny_model("llama")
    chunk = max(chunk_size, page_size)
    cache = make_cache(model, page_size=page_size, chunk=chunk_size, gpu_pages=-(-3 * chunk // page_size) + 2)
    assert cache.chunk == chunk
    lengths: list[int] = []
    model.get_input_embeddings().register_forward_hook(lambda module, given, output: lengths.append(given[0].numel()))
    wanted, _ = logits(Engine(model, BYTES, cache, reuse=False), words(2 * chunk + 9), new=2)
    engine = Engine(model, BYTES, cache)
    lengths.clear()
    for expected in ([chunk, chunk, 9, 1], [9, 1]):
        scores, _ = logits(engine, words(2 * chunk + 9), new=2)
        assert torch.equal(scores, wanted)
        assert lengths == expected
        lengths.clear()


@pytest.mark.parametrize(
    ("page_size", "chunk_size", "chunk"), [(16, 256, 256), (256, 16, 256), (256, 256, 256), (1024, 256, 1024), (16, 48, 48)]
)
def test_chunk_is_the_larger_of_both(page_size: int, chunk_size: int, chunk: int) -> None:
    assert Settings.load({"attn": {"page_size": page_size, "chunk_size": chunk_size}}, environ={}).chunk == chunk


@pytest.mark.parametrize(("page_size", "chunk_size"), [(512, 768), (256, 100), (16, 255)])
def test_page_and_chunk_that_do_not_fit(page_size: int, chunk_size: int) -> None:
    with pytest.raises(ConfigError, match="one must divide the other") as caught:
        Settings.load({"attn": {"page_size": page_size, "chunk_size": chunk_size}}, environ={})
    assert f"attn.chunk_size {chunk_size} and attn.page_size {page_size}" in str(caught.value)
    layout = PageLayout.from_config(GQA, page_size=page_size)
    with pytest.raises(ValueError, match=f"chunk_size {chunk_size} and page_size {page_size}: one must divide the other"):
        PrefixCache(layout, Limits(4), chunk=chunk_size)
