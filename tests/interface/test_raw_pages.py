"""raw_insert and raw_read: KV states straight into the cold tiers and back, past the device."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pages import PAGE, fingerprint, prompt
from support import GatedDevice, crowd, find_on_disk, flip, no_writes_beyond, serve, settle, until, wrong

from kvstrata.gpu import plane_views
from kvstrata.layout import PageLayout
from kvstrata.static_cache import KDeepSeekV3Cache, KVC2StaticCache

CONFIG = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 16}
MLA = {"num_hidden_layers": 2, "kv_lora_rank": 24, "qk_rope_head_dim": 8}


def states(tokens: int, seed: int = 0, width: tuple[int, int] = (2, 8)) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """K and V of two layers."""
    dice = torch.Generator().manual_seed(seed)
    made = [torch.randn(tokens, *width, generator=dice) for _ in range(4)]
    return made[:2], made[2:]


def blank(tokens: int, width: tuple[int, int] = (2, 8)) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return [torch.full((tokens, *width), -1.0) for _ in range(2)], [torch.full((tokens, *width), -1.0) for _ in range(2)]


def same(found: Any, put: Any, tokens: int) -> bool:
    """The first tokens are what was put, bit for bit, and what follows was left alone."""
    return all(
        torch.equal(mine[:tokens].view(torch.int32), theirs[:tokens].view(torch.int32)) and bool((mine[tokens:] == -1).all())
        for part, other in zip(found, put, strict=True)
        for mine, theirs in zip(part, other, strict=True)
    )


@pytest.fixture
def gated() -> GatedDevice:
    """A device whose copies never begin: what works meanwhile needs none."""
    device = GatedDevice()
    device.ups.clear()
    device.downs.clear()
    return device


def test_what_was_inserted_is_read_and_no_device_copy_is_made(open_cache: Any, tmp_path: Path, gated: GatedDevice) -> None:
    view = KVC2StaticCache(CONFIG, cache=open_cache(gpu=4, cpu=12, disk=tmp_path / "disk", device=gated))
    tokens = prompt(7.5)
    put = states(len(tokens))
    assert view.raw_insert(tokens, *put) == 7 * PAGE
    found = blank(len(tokens))
    assert view.raw_read(tokens, *found) == 7 * PAGE
    assert same(found, put, 7 * PAGE)
    assert not gated.started
    assert view.cache.stats()["gpu"]["stored"] == 0
    settle(view.cache)
    assert view.cache.stats()["disk"]["pages"] == 7
    branch = tokens.copy()
    branch[3 * PAGE] += 1
    assert view.raw_read(branch, *blank(len(tokens))) == 3 * PAGE
    assert view.raw_read(tokens, *blank(len(tokens)), tenant="other") == 0


def test_an_inserted_prefix_is_a_hit(open_cache: Any) -> None:
    view = KVC2StaticCache(CONFIG, cache=open_cache(gpu=8, cpu=8))
    tokens = prompt(4)
    put = states(len(tokens))
    assert view.raw_insert(tokens, *put) == 4 * PAGE
    lease = view.lease(tokens)
    assert lease.wait() == 3 * PAGE
    assert lease.sources["cpu"] == 3 * PAGE
    for layer in range(2):
        for page, row in enumerate(lease.rows[:3]):
            part = slice(page * PAGE, (page + 1) * PAGE)
            assert torch.equal(view.get_k_cache(layer)[int(row)], put[0][layer][part])
            assert torch.equal(view.get_v_cache(layer)[int(row)], put[1][layer][part])
    view.reset()


def test_what_was_served_is_read(open_cache: Any, tmp_path: Path) -> None:
    """From memory, from disk, and in the form of pages."""
    cache = open_cache(gpu=6, cpu=12, disk=tmp_path / "disk")
    view = KVC2StaticCache(CONFIG, cache=cache)
    tokens = prompt(4)
    serve(cache, tokens)
    settle(cache)
    with cache.lease(tokens, leave=0, must=True) as lease:
        lease.wait()
        assert not wrong(cache, lease.rows, tokens, 4)
        wanted = [
            [plane[torch.from_numpy(lease.rows).long()].clone() for plane in planes] for planes in (view.k_cache, view.v_cache)
        ]
    for round_of_others in range(2):
        assert (cache.explain(tokens, leave=0)["pages"][0].get("cpu") == "there") == (round_of_others == 0)
        found = [[torch.full((5, PAGE, 2, 8), -1.0) for _ in range(2)] for _ in range(2)]
        assert view.raw_read(tokens, *found) == 4 * PAGE
        assert same(found, wanted, 4)
        crowd(cache, 4)


def test_more_than_the_cpu_tier_holds(open_cache: Any, tmp_path: Path) -> None:
    options = {"gpu": 2, "cpu": 8, "disk": tmp_path / "disk"}
    view = KVC2StaticCache(CONFIG, cache=open_cache(**options))
    tokens = prompt(50)
    put = states(len(tokens))
    assert view.raw_insert(tokens, *put) == 50 * PAGE
    assert view.cache.close()
    view = KVC2StaticCache(CONFIG, cache=open_cache(**options))  # after a restart
    found = blank(len(tokens))
    assert view.raw_read(tokens, *found) == 50 * PAGE
    assert same(found, put, 50 * PAGE)


def test_without_a_disk_the_beginning_is_kept(open_cache: Any) -> None:
    view = KVC2StaticCache(CONFIG, cache=open_cache(gpu=2, cpu=8))
    tokens = prompt(20)
    assert view.raw_insert(tokens, *states(len(tokens))) == 8 * PAGE


def test_without_a_cold_tier_nothing_is_kept(open_cache: Any) -> None:
    view = KVC2StaticCache(CONFIG, cache=open_cache(gpu=4))
    tokens = prompt(2)
    assert view.raw_insert(tokens, *states(len(tokens))) == 0
    assert view.raw_read(tokens, *blank(len(tokens))) == 0


def test_the_first_writer_wins(open_cache: Any) -> None:
    view = KVC2StaticCache(CONFIG, cache=open_cache(gpu=2, cpu=8))
    tokens = prompt(3)
    first, second = states(len(tokens), 1), states(len(tokens), 2)
    assert view.raw_insert(tokens[: 2 * PAGE], *([part[: 2 * PAGE] for part in half] for half in first)) == 2 * PAGE
    assert view.raw_insert(tokens, *second) == 3 * PAGE
    found = blank(len(tokens))
    assert view.raw_read(tokens, *found) == 3 * PAGE
    mixed = [
        [torch.cat((mine[: 2 * PAGE], theirs[2 * PAGE :])) for mine, theirs in zip(*halves, strict=True)]
        for halves in zip(first, second, strict=True)
    ]
    assert same(found, mixed, 3 * PAGE)


@pytest.mark.parametrize("pages", [False, True])
def test_latents(open_cache: Any, pages: bool) -> None:
    layout = PageLayout.from_config(MLA, page_size=PAGE, dtype="float32")
    view = KDeepSeekV3Cache(MLA, cache=open_cache(gpu=2, cpu=8, layout=layout))
    tokens = prompt(3)
    put = torch.randn(2, len(tokens), 1, 32)
    found = torch.full_like(put, -1)
    shape = (2, 3, PAGE, 1, 32) if pages else put.shape
    assert view.raw_insert(tokens, put.view(shape)) == 3 * PAGE
    assert view.raw_read(tokens, found.view(shape)) == 3 * PAGE
    assert torch.equal(found, put)
    with pytest.raises(ValueError, match="v must be None"):
        view.raw_read(tokens, found, found)


def test_into_a_part_of_a_larger_tensor(open_cache: Any) -> None:
    """Heads before positions, as transformers keeps them: a transposed view is written in place."""
    view = KVC2StaticCache(CONFIG, cache=open_cache(gpu=2, cpu=8))
    tokens = prompt(2)
    put = states(len(tokens))
    view.raw_insert(tokens, *put)
    theirs = torch.full((2, 2, 2, len(tokens), 8), -1.0)  # k or v, layer, head, position
    k, v = ([layer.transpose(0, 1) for layer in half] for half in theirs)
    assert view.raw_read(tokens, k, v) == 2 * PAGE
    for half, wanted in zip(theirs, put, strict=True):
        for layer, one in zip(half, wanted, strict=True):
            assert torch.equal(layer.transpose(0, 1), one)


def test_states_that_ask_for_gradients(open_cache: Any) -> None:
    """As a model's forward leaves them: nothing is recorded of the copies, and they are written in place."""
    view = KVC2StaticCache(CONFIG, cache=open_cache(gpu=2, cpu=8))
    tokens = prompt(2)
    put, found = states(len(tokens)), blank(len(tokens))
    for half in (*put, *found):
        for layer in half:
            layer.requires_grad_()
    assert view.raw_insert(tokens, *put) == view.raw_read(tokens, *found) == 2 * PAGE
    assert same(found, put, 2 * PAGE)
    assert all(layer.grad_fn is None for half in found for layer in half)


def test_a_disk_that_takes_nothing(open_cache: Any, tmp_path: Path) -> None:
    """The beginning is held, as where there is no disk, and what is held is written as soon as it can be."""
    view = KVC2StaticCache(CONFIG, cache=open_cache(gpu=2, cpu=8, disk=tmp_path / "disk", retry_after=0.05))
    tokens = prompt(20)
    put = states(len(tokens))
    with no_writes_beyond(0):
        assert view.raw_insert(tokens, *put) == 8 * PAGE
        assert view.raw_read(tokens, *blank(len(tokens))) == 8 * PAGE
    until(lambda: view.raw_insert(tokens, *put) == 20 * PAGE, "the rest has room once the disk works")
    settle(view.cache)
    assert view.cache.stats()["disk"]["pages"] == 20
    found = blank(len(tokens))
    assert view.raw_read(tokens, *found) == 20 * PAGE
    assert same(found, put, 20 * PAGE)


def test_a_page_that_is_damaged_on_disk_ends_what_is_read(open_cache: Any, tmp_path: Path) -> None:
    options = {"gpu": 2, "cpu": 8, "disk": tmp_path / "disk"}
    view = KVC2StaticCache(CONFIG, cache=open_cache(**options))
    tokens = prompt(12)
    put = states(len(tokens))
    assert view.raw_insert(tokens, *put) == 12 * PAGE
    assert view.cache.close()
    ((path, offset),) = find_on_disk(tmp_path / "disk", put[1][1][5 * PAGE : 6 * PAGE].numpy())
    flip(path, offset + 9)
    view = KVC2StaticCache(CONFIG, cache=open_cache(**options))
    for tokens_held in (5 * PAGE, 12 * PAGE):
        found = blank(len(tokens))
        assert view.raw_read(tokens, *found) == tokens_held
        assert same(found, put, tokens_held)
        assert view.raw_insert(tokens, *put) == 12 * PAGE  # what was dropped is put again


@pytest.mark.parametrize("disk", [False, True])
def test_several_at_once(open_cache: Any, tmp_path: Path, disk: bool) -> None:
    """Inserts, reads, requests and purges of the same prompts, in a tier that holds few of them: nobody sees other bytes."""
    cache = open_cache(gpu=6, cpu=8, disk=tmp_path / "disk" if disk else "", disk_bytes=1 << 19)
    view = KVC2StaticCache(CONFIG, cache=cache)
    prompts = [np.concatenate((prompt(2), prompt(pages, seed))) for seed, pages in ((1, 2), (2, 4), (3, 9))]
    computed = [of_prompt(cache, tokens) for tokens in prompts]

    def insert(turn: int) -> None:
        assert view.raw_insert(prompts[turn % 3], *computed[turn % 3]) <= len(prompts[turn % 3])

    def read(turn: int) -> None:
        found = blank(len(prompts[turn % 3]))
        assert same(found, computed[turn % 3], view.raw_read(prompts[turn % 3], *found))

    def request(turn: int) -> None:
        serve(cache, prompts[turn % 2])

    def purge(turn: int) -> None:
        if turn % 10 == 0:
            cache.purge(everything=True, timeout=0.05)
        cache.check_integrity()

    with ThreadPoolExecutor(6) as threads:
        jobs = [
            threads.submit(lambda job=job: [job(turn) for turn in range(40)])
            for job in (insert, insert, read, read, request, purge)
        ]
        for job in jobs:
            job.result()


def of_prompt(cache: Any, tokens: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The states that requests compute in these tests: their fingerprints."""
    pages = [fingerprint(cache.layout, cache.namespace(), tokens[:end]) for end in range(PAGE, len(tokens) + 1, PAGE)]
    rows = torch.from_numpy(np.stack(pages))
    views = [plane_views(rows, cache.layout, layer) for layer in cache.layout.layers]
    return [planes["k"].flatten(0, 1) for planes in views], [planes["v"].flatten(0, 1) for planes in views]


def test_states_that_do_not_fit(open_cache: Any) -> None:
    view = KVC2StaticCache(CONFIG, cache=open_cache(gpu=2, cpu=8))
    tokens = prompt(2)
    k, v = states(len(tokens))
    for bad_k, bad_v, sentence in (
        (k[:1], v, "k has 1 layers, but the model has 2"),
        (k, None, "v has 0 layers, but the model has 2"),
        ([k[0].bfloat16(), k[1]], v, "k of layer 0 is torch.bfloat16, but the pages are torch.float32"),
        (
            k,
            [v[0], v[1][1:]],
            r"v of layer 1 has the shape \[31, 2, 8\], but must be \[32, 2, 8\] or \[2, 16, 2, 8\] for",
        ),
        (k, [v[0], v[1].transpose(1, 2)], r"v of layer 1 has the shape \[32, 8, 2\]"),
        ([one.view(4, 8, 2, 8) for one in k], v, "k of layer 0 has pages of 8 tokens, but the cache has 16"),
        (5, v, "k is int, but must be a tensor per layer"),
        ([None, k[1]], v, "k of layer 0 is NoneType, but must be a torch tensor with data"),
        ([one.numpy() for one in k], v, "k of layer 0 is ndarray, but must be a torch tensor with data"),
        (k, [v[0], v[1].to("meta")], "v of layer 1 is on the device meta, but must be a torch tensor with data"),
        (k, [v[0].to_sparse(), v[1]], "v of layer 0 is torch.sparse_coo, but must be a torch tensor with data"),
    ):
        for call in (view.raw_insert, view.raw_read):
            with pytest.raises(ValueError, match=sentence):
                call(tokens, bad_k, bad_v)
    assert view.cache.stats()["cpu"]["pages"] == 0
    view.cache.close()
    with pytest.raises(RuntimeError, match="this cache is closed"):
        view.raw_insert(tokens, k, v)
    with pytest.raises(RuntimeError, match="this cache is closed"):
        view.raw_read(tokens, k, v)
