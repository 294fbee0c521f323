"""S9: the four cache classes over one pool, for MLA and GQA models."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, LlamaConfig, Qwen3Config

from kvstrata.cache import PrefixCache
from kvstrata.static_cache import KDeepSeekV3Cache, KGQACache, KVC2Qwen3Cache, KVC2StaticCache

SMALL = {"gpu_memory_size_GB": "8MB", "cpu_memory_size_GB": "8MB"}
GQA = Qwen3Config(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, hidden_size=32)
MLA = DeepseekV3Config(num_hidden_layers=2, kv_lora_rank=512, qk_rope_head_dim=64)


def ints(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture
def make(request: pytest.FixtureRequest) -> Any:
    """A class, its config, arguments -> an object that is closed at the end."""

    def make_it(kind: Any, config: Any, **options: Any) -> Any:
        made = kind(config, dtype=torch.float32, page_size=16, device="cpu", settings={"kvc2": SMALL}, **options)
        request.addfinalizer(made.close)
        return made

    return make_it


def places(cache: Any, batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Different places in the pool for every token, in no order."""
    flat = torch.randperm((cache.pages - 1) * cache.page_size, generator=torch.Generator().manual_seed(3))[: batch * length]
    return (flat // cache.page_size + 1).to(torch.int32).view(batch, length), (flat % cache.page_size).to(torch.int32).view(
        batch, length
    )


def test_the_example_as_written(tmp_path: Path) -> None:
    GQA.save_pretrained(tmp_path)
    MLA.save_pretrained(tmp_path / "mla")
    from transformers import PretrainedConfig

    cfg = PretrainedConfig.from_pretrained(str(tmp_path / "mla"))
    cache = KVC2StaticCache(config=cfg, max_batch_size=8, page_size=256, dtype=torch.bfloat16, device="cpu")
    mini_batch = SimpleNamespace(
        prefill_batch=1, p_q_len=ints([3]), p_position_ids=ints([254, 255, 256]), p_block_tables=ints([[5, 2]]), decode_batch=0
    )
    combined_tensor = torch.randn(1, 3, 1, 576, dtype=torch.bfloat16)

    page_idx, page_offset = cache.get_page_table(mini_batch, bsz_tensors=None, is_prefill=True)
    cache.update(combined_tensor, layer_idx=1, cache_kwargs={"page_idx": page_idx, "page_offset": page_offset})
    assert (page_idx.tolist(), page_offset.tolist()) == ([[5, 5, 2]], [[254, 255, 0]])
    for token, (page, offset) in enumerate(((5, 254), (5, 255), (2, 0))):
        assert torch.equal(cache.get_k_cache(1)[page, offset], combined_tensor[0, token])
    assert cache.max_cache_len == cache.pages * 256
    cache.reset()
    cache.close()


def test_latents_are_written_where_the_table_says(make: Any) -> None:
    cache = make(KVC2StaticCache, MLA, max_batch_size=2)
    other = KDeepSeekV3Cache(MLA, cache=cache.cache)  # the same pool
    assert cache.get_k_cache(0).shape == (cache.pages, 16, 1, 576)
    assert cache.get_v_cache(0) is None
    page_idx, page_offset = places(cache, 2, 5)
    combined = torch.randn(2, 5, 1, 576)
    pool, told = cache.update(combined, 0, {"page_idx": page_idx, "page_offset": page_offset})
    assert told is page_idx
    key, value = torch.randn(10, 1, 512), torch.randn(10, 1, 64)
    where = places(cache, 1, 20)
    rest = [one.view(-1)[10:] for one in where]
    assert other.update(key, value, 0, *rest).data_ptr() == pool.data_ptr()
    for token in range(10):
        at = int(page_idx.view(-1)[token]), int(page_offset.view(-1)[token])
        assert torch.equal(pool[at], combined.view(10, 1, 576)[token])
        assert torch.equal(pool[int(rest[0][token]), int(rest[1][token])], torch.cat((key, value), -1)[token])


@pytest.mark.parametrize("heads", [1, 2, 3, 8])
@pytest.mark.parametrize("layout", ["bqhd", "bhqd"])
def test_k_and_v_are_written_where_the_table_says(make: Any, layout: str, heads: int) -> None:
    """With as many positions as heads the shape tells nothing: the layout does."""
    config = LlamaConfig(num_hidden_layers=2, num_attention_heads=24, num_key_value_heads=heads, hidden_size=192)
    cache = make(KVC2StaticCache, config, max_batch_size=2)
    assert isinstance(cache, KVC2Qwen3Cache)
    page_idx, page_offset = places(cache, 2, heads)
    shape = (2, heads, heads, 8)
    key, value = torch.randn(shape), torch.randn(shape)
    pools = cache.update(key, value, 1, {"page_idx": page_idx, "page_offset": page_offset}, layout=layout)
    again = KGQACache(config, cache=cache.cache)
    for pool, states, same in zip(pools, (key, value), (again.get_k_cache(1), again.get_v_cache(1)), strict=True):
        assert pool.data_ptr() == same.data_ptr()
        for request in range(2):
            for token in range(heads):
                found = pool[int(page_idx[request, token]), int(page_offset[request, token])]
                wanted = states[request, token] if layout == "bqhd" else states[request, :, token]
                assert torch.equal(found, wanted)


def test_what_does_not_fit_is_refused(make: Any) -> None:
    cache = make(KVC2Qwen3Cache, GQA)
    page_idx, page_offset = places(cache, 1, 4)
    where = {"page_idx": page_idx, "page_offset": page_offset}
    good = torch.randn(1, 4, 2, 8)
    with pytest.raises(ValueError, match=r"the states are torch.bfloat16, but the pool is torch.float32"):
        cache.update(good.bfloat16(), good.bfloat16(), 0, where)
    with pytest.raises(ValueError, match=r"the shape \[1, 4, 8, 2\], but must be \[1, 4, 2, 8\]"):
        cache.update(good.transpose(2, 3), good, 0, where)
    with pytest.raises(ValueError, match=r"the shape \[1, 3, 2, 8\], but must be \[1, 4, 2, 8\]"):
        cache.update(good[:, :3], good[:, :3], 0, where)
    with pytest.raises(ValueError, match="layout is 'hbqd'"):
        cache.update(good, good, 0, where, layout="hbqd")


@pytest.mark.parametrize(
    ("kind", "config", "sentence"),
    [
        (KVC2Qwen3Cache, MLA, "the model keeps a compressed latent .MLA.; use KVC2StaticCache or KDeepSeekV3Cache"),
        (KGQACache, MLA, "use KVC2StaticCache or KDeepSeekV3Cache"),
        (KDeepSeekV3Cache, GQA, "the model keeps K and V per head .GQA.; use KVC2StaticCache, KVC2Qwen3Cache or KGQACache"),
    ],
)
def test_the_other_family_is_refused(kind: Any, config: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        kind(config, device="cpu")


def test_load_binds_and_never_copies(make: Any) -> None:
    cache = make(KVC2Qwen3Cache, GQA)
    addresses = [tensor.data_ptr() for tensor in (*cache.k_cache, *cache.v_cache)]
    cache.load()
    assert [tensor.data_ptr() for tensor in (*cache.k_cache, *cache.v_cache)] == addresses
    tensors = [[torch.zeros(7, 16, 2, 8) for _ in range(2)] for _ in range(2)]
    cache.load(SimpleNamespace(k_cache=[tensors[0]], v_cache=[tensors[1]]))
    assert [tensor.data_ptr() for tensor in cache.k_cache] == [tensor.data_ptr() for tensor in tensors[0]]
    wrong = [[tensor.bfloat16() for tensor in tensors[0]]]
    with pytest.raises(ValueError, match=r"k_cache of layer 0 is torch\.bfloat16"):
        cache.load(SimpleNamespace(k_cache=wrong, v_cache=[tensors[1]]))
    own = cache.cache.pool.layers
    cache.reset(SimpleNamespace(k_cache=[[one.k for one in own]], v_cache=[[one.v for one in own]]))
    assert [tensor.data_ptr() for tensor in (*cache.k_cache, *cache.v_cache)] == addresses


def test_pages_without_a_name_are_private(tmp_path: Path, caplog: Any) -> None:
    settings = {"kvc2": {**SMALL, "disk_path": str(tmp_path / "disk")}}
    with caplog.at_level("INFO", "kvstrata"):
        cache = KVC2Qwen3Cache(GQA, dtype=torch.float32, page_size=16, device="cpu", settings=settings)
    assert "the pages of this cache are private to it and kept off the disk" in caplog.text
    assert isinstance(cache.cache, PrefixCache)
    assert cache.cache.limits.disk_path == ""
    cache.close()
    model = LlamaConfig(num_hidden_layers=1, num_attention_heads=2, hidden_size=16, intermediate_size=16, vocab_size=50)
    from transformers import AutoModelForCausalLM

    named = KVC2Qwen3Cache(
        model, dtype=torch.float32, page_size=16, settings=settings, model=AutoModelForCausalLM.from_config(model)
    )
    assert named.cache.limits.disk_path == str(tmp_path / "disk")
    named.close()
