"""raw_insert and raw_read: KV states straight into the cold tiers and back, past the device."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pages import PAGE, prompt
from support import GatedDevice, crowd, serve, settle, wrong

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
    ):
        with pytest.raises(ValueError, match=sentence):
            view.raw_insert(tokens, bad_k, bad_v)
    assert view.cache.stats()["cpu"]["pages"] == 0
    view.cache.close()
    with pytest.raises(RuntimeError, match="this cache is closed"):
        view.raw_insert(tokens, k, v)
    with pytest.raises(RuntimeError, match="this cache is closed"):
        view.raw_read(tokens, k, v)
