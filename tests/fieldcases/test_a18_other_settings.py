"""A18: one directory, reopened with other settings and as other models, one after the other: each finds nothing of the others and,
back again, all its own."""

from dataclasses import replace

import pytest
from identity_kit import CONFIG as LLAMA
from identity_kit import identity
from support import PAGE, begin, finish, prompt, settle, tiny_identity

from kvstrata.layout import PageLayout, PlaneSpec

CONFIG = {"model_type": "test", "rope_theta": 10000.0, "num_hidden_layers": 2, "rope_scaling": None}
PAGES = 6
TOKENS = prompt(PAGES * 4 + 0.5, seed=31)  # pages enough for the larger page size too


def planes(*specs, tag="test-rows", page_size=PAGE, dtype="float16") -> PageLayout:
    """`specs`: (name, dtype, shape) of both layers."""
    made = [PlaneSpec(layer, name, kind, shape) for layer in range(2) for name, kind, shape in specs]
    return PageLayout.from_planes(made, page_size=page_size, dtype=dtype, tag=tag)


def half(shape=(2, 8)):
    return [("k", "float16", shape), ("v", "float16", shape)]


LAYOUT = planes(*half())
ROW = LAYOUT.row_bytes
MODELS = {
    "first": (LAYOUT, {}),
    "another dtype of equal size": (planes(("k", "bfloat16", (2, 8)), ("v", "bfloat16", (2, 8)), dtype="bfloat16"), {}),
    "an 8-bit dtype, twice as wide": (
        planes(("k", "float8_e4m3fn", (2, 16)), ("v", "float8_e4m3fn", (2, 16)), dtype="float8_e4m3fn"),
        {},
    ),
    "twice the page size": (planes(*half(), page_size=2 * PAGE), {}),
    "half as wide, twice the page size: rows of equal size": (planes(*half((2, 4)), page_size=2 * PAGE), {}),
    "rank 0 of 2": (LAYOUT, {"part": "rank 0 of 2"}),
    "rank 1 of 2": (LAYOUT, {"part": "rank 1 of 2"}),
    "rank 0 of 4": (LAYOUT, {"part": "rank 0 of 4"}),
    "stage 0 of 2": (LAYOUT, {"part": "stage 0 of 2"}),
    "other weights": (LAYOUT, {"weights": b"\1" * 32}),
    "another RoPE base": (LAYOUT, {"config": CONFIG | {"rope_theta": 20000.0}}),
    "a RoPE factor": (LAYOUT, {"config": CONFIG | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}}),
    "heads and width in each other's place": (planes(*half((8, 2))), {}),
    "planes in another order": (planes(*reversed(half())), {}),
    "another layout tag": (planes(*half(), tag="other-rows"), {}),
}


@pytest.fixture
def serve_as(open_cache, tmp_path):
    """serve_as(model): its hit in tokens, all of it from disk and compared in every byte; then everything is saved for it."""

    def serve(name: str) -> int:
        layout, options = MODELS[name]
        identity = tiny_identity(layout, **{"config": CONFIG, **options})
        cache = open_cache(gpu=40, cpu=60, disk=tmp_path / "disk", disk_bytes=64 << 20, layout=layout, identity=identity)
        served = finish(cache, begin(cache, TOKENS), TOKENS)
        settle(cache)
        assert served.hit == served.disk
        stats = cache.stats()
        assert [stats[what] for what in ("corrupt", "stale", "key_conflicts", "unreadable")] == [0] * 4
        cache.close()
        return served.hit

    return serve


def test_every_model_finds_its_own_and_nothing_else(serve_as):
    whole = {name: len(TOKENS) // layout.page_size * layout.page_size for name, (layout, _) in MODELS.items()}
    for name in MODELS:
        assert serve_as(name) == 0, f"{name}: a hit in what others left"
    for name in reversed(MODELS):
        assert serve_as(name) == whole[name], f"{name}: its own pages are gone"


def test_sizes_say_nothing():
    """Most of them have rows of the very same size: no size could keep them apart."""
    assert sum(layout.row_bytes == ROW for layout, _ in MODELS.values()) >= len(MODELS) - 2
    assert len({tiny_identity(layout, **{"config": CONFIG, **options}).namespace() for layout, options in MODELS.values()}) == len(
        MODELS
    )


def test_every_setting_of_the_rows_has_its_own_namespace() -> None:
    one = identity()
    others = [
        identity(dtype="float16"),  # the same number of bytes
        identity(dtype="float8_e4m3fn"),
        identity(page_size=32),
        identity(LLAMA | {"num_key_value_heads": 1}),
        identity(LLAMA | {"num_hidden_layers": 1}),
        replace(one, part="rank 0 of 2"),
        replace(one, part="rank 1 of 2"),
        replace(one, part="rank 0 of 4"),
        replace(one, planes=one.planes[2:]),  # a pipeline stage
    ]
    spaces = [one.namespace(), *(other.namespace() for other in others)]
    assert len(set(spaces)) == len(spaces)
    assert identity().namespace() == one.namespace()
