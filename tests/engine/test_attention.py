"""Attention on pages against plain attention over the same states, laid out contiguously."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvstrata.engine import attention
from kvstrata.engine.attention import DecodePages, PrefillPages, Unsupported, page_attention, shared_readings
from kvstrata.engine.gather import DevicePages
from kvstrata.gpu import PagePool
from kvstrata.layout import PageLayout, PlaneSpec

HEADS, KV_HEADS, DIM, BLOCK = 6, 2, 8, 64


def make_pool(page_size: int, dtype: str = "float32") -> PagePool:
    """A pool in which whatever nobody wrote is NaN."""
    specs = [PlaneSpec(layer, name, dtype, (KV_HEADS, DIM)) for layer in range(2) for name in ("k", "v")]
    pool = PagePool(PageLayout.from_planes(specs, page_size=page_size, dtype=dtype, tag="test"), 2048 // page_size + 1)
    pool.data.fill_(0xFF)
    return pool


def states(batch: int, heads: int, tokens: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(batch, tokens, heads, DIM).to(dtype).transpose(1, 2)


def table(pool: PagePool, tokens: int, seed: int = 0) -> np.ndarray:
    pages = -(-tokens // pool.page_size)
    return (np.random.default_rng(seed).permutation(pool.pages - 1)[:pages] + 1).astype(np.int32)


def fill(pool: PagePool, rows: np.ndarray, keys: Tensor, values: Tensor) -> None:
    """Put `[1, kv_heads, tokens, dim]` into the pages of layer 1."""
    for position in range(keys.shape[2]):
        row, offset = rows[position // pool.page_size], position % pool.page_size
        pool.layers[1].k[row, offset], pool.layers[1].v[row, offset] = keys[0, :, position], values[0, :, position]


def plain(query: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
    mask = torch.arange(keys.shape[2])[None] <= torch.arange(start, start + query.shape[2])[:, None]
    return scaled_dot_product_attention(query, keys, values, mask, scale=0.3, enable_gqa=True).transpose(1, 2)


@pytest.fixture(params=["aten", "composed"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "flash", attention._aten_flash if request.param == "aten" else attention._composed_flash)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("kind", ["pages", "gather"])
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize(("start", "stop"), [(0, 1), (0, 64), (64, 71), (192, 256)])
def test_prefill(kind: str, page_size: int, start: int, stop: int) -> None:
    torch.manual_seed(stop)
    pool = make_pool(page_size)
    rows = table(pool, stop)
    keys, values, query = states(1, KV_HEADS, stop), states(1, KV_HEADS, stop), states(1, HEADS, stop - start)
    fill(pool, rows, keys[:, :, :start], values[:, :, :start])
    if kind == "pages":
        pages: Any = PrefillPages(pool.layers, rows, start, stop, page_size, BLOCK)
    else:
        pages = DevicePages(pool.layers, [rows], [start], [stop], page_size)
    out = pages.attend(1, query, keys[:, :, start:], values[:, :, start:], 0.3)
    assert torch.allclose(out, plain(query, keys, values, start), atol=1e-6)
    written = pool.layers[1].k[torch.from_numpy(rows).long()].flatten(0, 1)[:stop]
    assert torch.equal(written, keys[0].transpose(0, 1))  # and what was there stays


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("kind", ["pages", "gather"])
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("lengths", [[0], [63, 64], [200, 130, 215, 131, 3]])
def test_decode(kind: str, page_size: int, lengths: list[int]) -> None:
    """Requests that share their first 128 tokens where they are long enough; each must see exactly its own."""
    torch.manual_seed(3)
    pool = make_pool(page_size)
    batch, common, shared = len(lengths), table(pool, 128), (states(1, KV_HEADS, 128), states(1, KV_HEADS, 128))
    fill(pool, common, *shared)
    free = [row for row in range(1, pool.pages) if row not in common]
    keys, values, query = states(batch, KV_HEADS, 1), states(batch, KV_HEADS, 1), states(batch, HEADS, 1)
    tables, expected = [], []
    for b, length in enumerate(lengths):
        own = torch.randn(2, 1, KV_HEADS, length + 1, DIM)
        rows = np.array([free.pop() for _ in range(-(-(length + 1) // page_size))], np.int32)
        if length >= 128:
            rows[: 128 // page_size] = common
            own[0, :, :, :128], own[1, :, :, :128] = shared
        own[0, :, :, -1], own[1, :, :, -1] = keys[b, :, 0], values[b, :, 0]
        fill(pool, rows, own[0][:, :, :length], own[1][:, :, :length])
        tables.append(rows)
        expected.append(plain(query[b : b + 1], own[0], own[1], length))
    if kind == "pages":
        pages: Any = DecodePages(pool.layers, tables, lengths, page_size, BLOCK)
    else:
        pages = DevicePages(pool.layers, tables, lengths, [n + 1 for n in lengths], page_size)
    out = pages.attend(1, query, keys, values, 0.3)
    assert torch.allclose(out, torch.cat(expected), atol=1e-6)


def test_shared_blocks_are_read_once() -> None:
    rows = np.arange(1, 9, dtype=np.int32)
    tables = [np.append(rows, np.int32(20 + b)) for b in range(4)]
    readings = shared_readings(tables, [8 * 256 + 10] * 4, 256, 256)
    assert [(r.members, r.indices, r.blocks.tokens) for r in readings if r.blocks.tokens == 256] == [
        (slice(0, 4), slice(0, 8), 256)
    ]
    assert sum(r.blocks.tokens == 10 for r in readings) == 4
    # Rows that are no neighbours, in memory or in the text, are separate calls of the kernel, but still once for all.
    scattered = [np.append(rows[[3, 4, 0, 7]], np.int32(20 + b)) for b in range(2)]
    scattered[1][1] = 30
    assert [r.indices for r in shared_readings(scattered, [4 * 256] * 2, 256, 256) if r.members == slice(0, 2)] == [
        slice(0, 1),
        slice(2, 3),
        slice(3, 4),
    ]


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_do_not_depend_on_where_pages_lie(page_size: int, dtype: str) -> None:
    """Neighbouring rows are read in one call of the kernel, scattered ones in several; a restored prefix may lie anywhere."""
    torch.manual_seed(5)
    kind: torch.dtype = getattr(torch, dtype)
    keys, values = states(1, KV_HEADS, 300, kind), states(1, KV_HEADS, 300, kind)
    new, query = states(2, KV_HEADS, 1, kind), states(1, HEADS, 44, kind)
    outs = []
    for seed in range(3):
        pool = make_pool(page_size, dtype)
        rows = table(pool, 301, seed) if seed else np.arange(1, -(-301 // page_size) + 1, dtype=np.int32)
        fill(pool, rows, keys, values)
        prefill = PrefillPages(pool.layers, rows, 256, 300, page_size, BLOCK)
        decode = DecodePages(pool.layers, [rows], [300], page_size, BLOCK)
        first = prefill.attend(1, query, keys[:, :, 256:], values[:, :, 256:], 0.3)
        outs.append((first, decode.attend(1, query[:, :, :1], new[:1], new[1:], 0.3)))
    for first, second in outs[1:]:
        assert torch.equal(first, outs[0][0])
        assert torch.equal(second, outs[0][1])


def test_prefill_off_the_grid_is_refused() -> None:
    pool = make_pool(16)
    with pytest.raises(ValueError, match="token 16, which is no multiple of 64"):
        PrefillPages(pool.layers, table(pool, 64), 16, 20, 16, 64)


def test_a_paged_kernel_gets_tables_that_cover_every_token() -> None:
    """The arguments of flash_attn_with_kvcache, checked by a stand-in that gathers."""

    def stand_in(
        q: Tensor, k: Tensor, v: Tensor, *, cache_seqlens: Tensor, block_table: Tensor, softmax_scale: float, causal: bool
    ) -> Tensor:
        assert causal
        assert block_table.dtype == cache_seqlens.dtype == torch.int32
        outs = []
        for b, end in enumerate(cache_seqlens.tolist()):
            keys, values = (plane[block_table[b].long()].flatten(0, 1)[None, :end].transpose(1, 2) for plane in (k, v))
            outs.append(plain(q[b : b + 1].transpose(1, 2), keys, values, end - q.shape[1]))
        return torch.cat(outs)

    torch.manual_seed(2)
    pool = make_pool(16)
    lengths = [40, 33]
    rows = table(pool, 96)
    tables = [rows[:3], rows[3:]]
    keys, values, query = states(2, KV_HEADS, 1), states(2, KV_HEADS, 1), states(2, HEADS, 1)
    for b, length in enumerate(lengths):
        fill(pool, tables[b], states(1, KV_HEADS, length), states(1, KV_HEADS, length))
    ends, outs = [length + 1 for length in lengths], []
    for kernel in (stand_in, None):
        pages = DevicePages(pool.layers, tables, lengths, ends, 16, kernel)
        outs.append(pages.attend(1, query, keys, values, 0.3))
    assert torch.allclose(*outs, atol=1e-6)


@pytest.mark.parametrize("extra", [{"sliding_window": 128}, {"softcap": 30.0}, {"s_aux": torch.zeros(6)}])
def test_what_pages_cannot_do_is_refused(extra: dict[str, Any]) -> None:
    query = states(1, HEADS, 1)
    with pytest.raises(Unsupported, match="do not support yet"):
        page_attention(torch.nn.Identity(), query, query, query, None, kv_pages=object(), **extra)  # type: ignore[arg-type]
    with pytest.raises(Unsupported, match=r"call the model through kvstrata\.engine"):
        page_attention(torch.nn.Identity(), query, query, query, None)
