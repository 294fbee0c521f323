"""S5: one page table over all tiers: logical position -> page, in whichever tier."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pages import PAGE, prompt, tiny_layout
from support import GatedDevice, crowd, serve, settle, wrong

from kvstrata import pool_view
from kvstrata.cache import PagesLost
from kvstrata.layout import PageLayout
from kvstrata.page_table import from_indptr, from_mini_batch
from kvstrata.static_cache import KVC2StaticCache

PAGE_SIZES = (16, 64, 256, 1024)


def ints(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def ragged(dice: random.Random, size: int) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """Positions of the new tokens of some requests, their block tables, and how many rows the pool has."""
    rows = list(range(1, 4000))
    dice.shuffle(rows)
    positions, tables = [], []
    for _ in range(dice.randint(1, 6)):
        first, count = dice.randint(0, 5 * size), dice.choice([0, 1, dice.randint(2, 3 * size)])
        positions.append(list(range(first, first + count)))
        pages = -(-(first + count) // size) if dice.random() < 0.9 else dice.randint(0, 3)  # sometimes too few
        tables.append([rows.pop() for _ in range(pages)])
    return positions, tables, rows


def plain(position: int, table: list[int], size: int) -> tuple[int, int]:
    page = position // size
    return (table[page], position % size) if page < len(table) else (0, 0)


def batch_of(positions: list[list[int]], tables: list[list[int]]) -> SimpleNamespace:
    width = max(map(len, tables), default=0)
    return SimpleNamespace(
        prefill_batch=len(positions),
        p_q_len=ints([len(one) for one in positions]),
        p_position_ids=ints([position for one in positions for position in one]),
        p_block_tables=ints([table + [0] * (width - len(table)) for table in tables]).view(len(tables), width),
        decode_batch=0,
    )


@pytest.mark.parametrize("seed", range(300))
def test_both_forms_equal_a_plain_loop(seed: int) -> None:
    dice = random.Random(seed)
    size = dice.choice(PAGE_SIZES)
    positions, tables, _ = ragged(dice, size)
    total = sum(map(len, positions))
    real = dice.choice([total, dice.randint(0, total)])

    longest = max(map(len, positions))
    page_idx, page_offset = from_mini_batch(batch_of(positions, tables), size, ints([real]), True)
    assert page_idx.shape == page_offset.shape == ((len(positions), longest) if total else (len(positions), 0))
    assert page_idx.dtype == page_offset.dtype == torch.int32
    token = 0
    width = max(map(len, tables))
    for request, (wanted, table) in enumerate(zip(positions, tables, strict=True)):
        padded = table + [0] * (width - len(table))
        for column in range(longest if total else 0):
            expected = (0, 0)
            if column < len(wanted):
                if token < real:
                    expected = plain(wanted[column], padded, size)
                token += 1
            found = int(page_idx[request, column]), int(page_offset[request, column])
            assert found[0] == expected[0]
            assert found[1] == expected[1] or found[0] == 0

    flat = [position for one in positions for position in one]
    q_indptr = np.cumsum([0] + [len(one) for one in positions])
    kv_indptr = np.cumsum([0] + [len(one) for one in tables])
    indices = [row for table in tables for row in table]
    page_idx, page_offset = from_indptr(ints(flat), ints(q_indptr), ints(kv_indptr), ints(indices), ints([real]), size)
    token = 0
    for wanted, table in zip(positions, tables, strict=True):
        for position in wanted:
            assert int(page_offset[token]) == position % size
            assert int(page_idx[token]) == (plain(position, table, size)[0] if token < real else 0)
            token += 1


@pytest.mark.parametrize("seed", range(40))
def test_decode_translates_every_position(seed: int) -> None:
    dice = random.Random(seed)
    size, requests, length = dice.choice(PAGE_SIZES), dice.randint(1, 5), dice.randint(1, 4)
    positions = [[dice.randint(0, 6 * size) for _ in range(length)] for _ in range(requests)]
    tables = [[dice.randint(1, 99) for _ in range(dice.randint(4, 7))] for _ in range(requests)]
    width = max(map(len, tables))
    padded = [table + [0] * (width - len(table)) for table in tables]
    batch = SimpleNamespace(
        decode_batch=requests,
        d_position_ids=ints(positions[0] if requests == 1 else positions),
        d_block_tables=ints(padded),
    )
    page_idx, page_offset = from_mini_batch(batch, size, None, False)
    assert page_idx.shape == page_offset.shape == batch.d_position_ids.shape
    for request, table in enumerate(padded):
        for column, position in enumerate(positions[request]):
            at = column if requests == 1 else (request, column)
            assert (int(page_idx[at]), int(page_offset[at])) == plain(position, table, size)


def test_positions_below_zero_are_in_the_scratch_row() -> None:
    """What engines pad with. They must not find a page of anybody: -1 is no last page."""
    for real in (None, ints([2]), ints([4])):
        prefill = SimpleNamespace(
            prefill_batch=2, p_q_len=ints([2, 2]), p_position_ids=ints([0, 17, -1, -100]), p_block_tables=ints([[7, 8], [9, 10]])
        )
        page_idx, page_offset = from_mini_batch(prefill, 16, real, True)
        assert (page_idx.tolist(), page_offset.tolist()) == ([[7, 8], [0, 0]], [[0, 1], [0, 0]])
        decode = SimpleNamespace(decode_batch=2, d_position_ids=ints([[5], [-1]]), d_block_tables=ints([[7], [9]]))
        page_idx, page_offset = from_mini_batch(decode, 16, real, False)
        assert (page_idx.tolist(), page_offset.tolist()) == ([[7], [0]], [[5], [0]])
        flat = ints([-1, 18, -1, -100])
        page_idx, page_offset = from_indptr(flat, ints([0, 2, 4]), ints([0, 2, 4]), ints([7, 8, 9, 10]), ints([4]), 16)
        assert (page_idx.tolist(), page_offset.tolist()) == ([0, 8, 0, 0], [0, 2, 0, 0])


def test_empty_batches() -> None:
    nothing = SimpleNamespace(
        prefill_batch=0, p_q_len=ints([]), p_position_ids=ints([]), p_block_tables=ints([]).view(0, 0),
        decode_batch=0, d_position_ids=ints([]), d_block_tables=ints([]).view(0, 0),
    )  # fmt: skip
    for is_prefill, shape in ((True, (0, 0)), (False, (0,))):
        for tensor in from_mini_batch(nothing, 16, None, is_prefill):
            assert (tuple(tensor.shape), tensor.dtype) == (shape, torch.int32)


def test_tensors_that_do_not_fit_together() -> None:
    batch = batch_of([[0, 1], [5]], [[3], [4]])
    batch.p_q_len = ints([3])
    with pytest.raises(ValueError, match=r"p_q_len has the shape \(1,\), but must be \[2\]"):
        from_mini_batch(batch, 16, None, True)
    batch = SimpleNamespace(decode_batch=2, d_position_ids=ints([1, 2, 3]), d_block_tables=ints([[1], [2]]))
    with pytest.raises(ValueError, match="d_position_ids has the shape"):
        from_mini_batch(batch, 16, None, False)


# --- over leases


@pytest.fixture
def view(open_cache: Any, tmp_path: Any) -> KVC2StaticCache:
    cache = open_cache(gpu=8, cpu=24, disk=tmp_path / "disk", device=GatedDevice())
    return KVC2StaticCache(_config(), cache=cache)


def _config() -> dict[str, int]:
    return {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 16}


@pytest.mark.parametrize("tier", ["gpu", "cpu", "disk"])
def test_pages_come_from_every_tier(view: KVC2StaticCache, tier: str) -> None:
    cache = view.cache
    tokens = prompt(4)
    serve(cache, tokens)
    settle(cache)
    if tier != "gpu":
        crowd(cache, 1 if tier == "cpu" else 4)
    lease = view.lease(tokens)
    assert lease.sources == {name: 3 * PAGE if name == tier else 0 for name in ("gpu", "cpu", "disk")}
    batch = view.mini_batch(prefill=[(lease, 3 * PAGE, 4 * PAGE)], decode=[(lease, position) for position in (0, 20, 47)])
    page_idx, page_offset = view.get_page_table(batch, is_prefill=False)
    rows = lease.rows
    assert lease.ready
    assert page_idx.flatten().tolist() == [rows[0], rows[1], rows[2]]
    assert page_offset.flatten().tolist() == [0, 4, 15]
    assert not wrong(cache, rows, tokens, 3)
    page_idx, _ = view.get_page_table(batch)
    assert page_idx.tolist() == [[int(rows[3])] * PAGE]
    view.reset()


def test_nothing_waits_before_the_table_is_asked_for(view: KVC2StaticCache) -> None:
    cache = view.cache
    tokens = prompt(3)
    serve(cache, tokens)
    settle(cache)
    crowd(cache, 1)
    device = cache.pool.backend
    device.ups.clear()  # type: ignore[attr-defined]
    lease = view.lease(tokens)
    batch = view.mini_batch(decode=[(lease, 0), (lease, 40)])
    assert not lease.ready
    assert int(batch.d_block_tables.min()) >= view.pages
    device.ups.set()  # type: ignore[attr-defined]
    page_idx, _ = view.get_page_table(batch, is_prefill=False)
    assert page_idx.flatten().tolist() == [lease.rows[0], lease.rows[2]]
    view.reset()


def test_pages_that_do_not_come(view: KVC2StaticCache) -> None:
    cache = view.cache
    tokens = prompt(3)
    serve(cache, tokens)
    settle(cache)
    crowd(cache, 1)
    device = cache.pool.backend
    device.fail_ups = True  # type: ignore[attr-defined]
    device.ups.clear()  # type: ignore[attr-defined]
    lease = view.lease(tokens)
    batch = view.mini_batch(decode=[(lease, 0)])
    device.ups.set()  # type: ignore[attr-defined]
    with pytest.raises(PagesLost, match="of a hit of 32 tokens only 0 came"):
        view.get_page_table(batch, is_prefill=False)
    view.reset()


def test_a_table_of_a_lease_that_was_released_finds_nobody_else(view: KVC2StaticCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_view, "LAST_ID", view.pages + 7)
    cache = view.cache
    both = [prompt(3), prompt(3, seed=5)]
    for tokens in both:
        serve(cache, tokens)
    settle(cache)
    crowd(cache, 1)
    device = cache.pool.backend
    device.ups.clear()  # type: ignore[attr-defined]
    first = view.lease(both[0])
    old = view.mini_batch(decode=[(first, 0), (first, 33)])
    first.release()
    second = view.lease(both[1])
    new = view.mini_batch(decode=[(second, 0), (second, 33)])
    assert not second.ready
    assert set(old.d_block_tables.flatten().tolist()).isdisjoint(new.d_block_tables.flatten().tolist())
    with pytest.raises(ValueError, match="is of no lease of this session"):
        view.get_page_table(old, is_prefill=False)
    second.release()
    third = view.lease(both[0])  # here they begin anew
    assert view.mini_batch(decode=[(third, 0)]).d_block_tables[0, 0] == view.pages
    device.ups.set()  # type: ignore[attr-defined]
    for _ in range(100):
        view.lease(both[0]).release()
    assert len(view._leases) == 2
    view.reset()


def test_ids_of_nobody(view: KVC2StaticCache) -> None:
    batch = SimpleNamespace(decode_batch=1, d_position_ids=ints([3]), d_block_tables=ints([[view.pages]]))
    with pytest.raises(
        ValueError, match=f"page id {view.pages} is of no lease of this session, and the pool has {view.pages} pages"
    ):
        view.get_page_table(batch, is_prefill=False)
    batch.d_block_tables = ints([[view.pages - 1]])  # a caller without leases owns the pool
    assert view.get_page_table(batch, is_prefill=False)[0].tolist() == [view.pages - 1]


def test_these_pages_are_those_of_the_config() -> None:
    assert PageLayout.from_config(_config(), page_size=PAGE, dtype="float32").planes == tiny_layout().planes


def test_no_form_asks_the_device_for_numbers() -> None:
    """On the device "meta" there are none."""
    batch = SimpleNamespace(
        prefill_batch=2,
        p_q_len=ints([3, 2]).to("meta"),
        p_position_ids=ints([0, 1, 2, 16, 17]).to("meta"),
        p_block_tables=ints([[4, 0], [5, 6]]).to("meta"),
        decode_batch=2,
        d_position_ids=ints([[3], [18]]).to("meta"),
        d_block_tables=ints([[4, 0], [5, 6]]).to("meta"),
        max_q_len=3,
    )
    real = ints([4]).to("meta")
    for is_prefill, shape in ((True, (2, 3)), (False, (2, 1))):
        assert [table.shape for table in from_mini_batch(batch, 16, real, is_prefill)] == [shape, shape]
    tables = from_indptr(batch.p_position_ids, *(ints(one).to("meta") for one in ([0, 3, 5], [0, 1, 3], [4, 5, 6], [4])), 16)
    assert [table.shape for table in tables] == [(5,), (5,)]


def test_pages_that_came_are_translated_where_the_ids_are(open_cache: Any) -> None:
    """As long as the session has a lease whose pages were under way once; on the device "meta" nothing can be asked."""
    device = GatedDevice()
    cache = open_cache(gpu=8, cpu=24, device=device)
    view = KVC2StaticCache(_config(), cache=cache)
    tokens = prompt(4)
    serve(cache, tokens)
    settle(cache)
    crowd(cache)
    device.ups.clear()
    lease = view.lease(tokens, leave=0)
    table = view.mini_batch(prefill=[(lease, 0, len(tokens))]).p_block_tables
    assert bool((table >= view.pages).all())
    device.ups.set()
    lease.wait()
    mixed = torch.cat((table, ints([[3, 0]])), 1)
    wanted = torch.cat((torch.from_numpy(lease.rows.copy())[None], ints([[3, 0]])), 1)
    assert torch.equal(view._bring(mixed), wanted)
    assert torch.equal(view._translated(mixed), wanted)
    assert view._bring(mixed.to("meta")).shape == mixed.shape
    view.reset()


@pytest.mark.cuda
def test_no_form_waits_for_the_device(open_cache: Any) -> None:
    cache = open_cache(gpu=8, cpu=24, device="cuda")
    view = KVC2StaticCache(_config(), cache=cache)
    tokens = prompt(4)
    lease = view.lease(tokens, leave=0)
    lease.publish(len(tokens), ready=cache.pool.mark_batch())
    view.reset()
    settle(cache)
    with cache.lease(prompt(8, seed=2), must=True):  # the first one leaves the device
        pass
    lease = view.lease(tokens, leave=0)
    batch = view.mini_batch(prefill=[(lease, 0, len(tokens))])
    lease.wait()
    torch.cuda.set_sync_debug_mode("error")
    try:
        page_idx, _ = view.get_page_table(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert page_idx[0, ::PAGE].tolist() == lease.rows.tolist()
    view.reset()
