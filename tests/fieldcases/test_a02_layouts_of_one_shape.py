"""A2: layouts whose shapes and strides are the same are told apart by their tags, and none is guessed."""

from pathlib import Path
from typing import Any

import pytest
from identity_kit import CONFIG, WEIGHTS
from support import PAGE, prompt, serve, settle

from kvstrata.identity import Identity
from kvstrata.layout import PageLayout, PlaneSpec

# [pages, tokens, K and V, heads * dim] or [pages, tokens, heads, K and V * dim]: with two heads, the shape cannot tell.
SPECS = [PlaneSpec(layer, "kv", "float16", (2, 128)) for layer in range(2)]
TAGS = ("kv-first", "heads-first")


def layout(tag: str) -> PageLayout:
    return PageLayout.from_planes(SPECS, page_size=PAGE, dtype="float16", tag=tag)


def test_a_layout_of_an_engine_needs_a_tag() -> None:
    with pytest.raises(ValueError, match="tag"):
        layout("")
    first = layout("kv-first")
    second = layout("heads-first")
    assert first.planes == second.planes
    assert first != second
    assert first.row_stride == second.row_stride
    assert len({Identity.of(CONFIG, one, WEIGHTS).namespace() for one in (first, second)}) == 2


def test_each_finds_its_own_bytes_and_nothing_of_the_other(open_cache: Any, tmp_path: Path) -> None:
    tokens = prompt(5, seed=2)
    for tag, hit in zip(TAGS * 2, (0, 0, 4 * PAGE, 4 * PAGE), strict=True):
        cache = open_cache(gpu=8, cpu=8, disk=tmp_path / "disk", layout=layout(tag))
        served = serve(cache, tokens)  # which proves every byte of a hit
        assert served.hit == served.disk == hit
        settle(cache)
        stats = cache.stats()
        assert [stats[what] for what in ("corrupt", "stale", "key_conflicts")] == [0] * 3
        cache.close()


def test_both_at_once_on_one_directory(open_cache: Any, tmp_path: Path) -> None:
    tokens = prompt(5, seed=3)
    first, second = (open_cache(gpu=8, cpu=8, disk=tmp_path / "disk", disk_bytes=16 << 20, layout=layout(tag)) for tag in TAGS)
    for hit in (0, 4 * PAGE):
        for cache in (first, second):
            assert serve(cache, tokens).hit == hit
            settle(cache)
