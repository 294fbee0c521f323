"""R8: another model, adapter or tenant with the same tokens matches nothing, in any tier."""

from dataclasses import replace

import pytest
from support import begin, crowd, finish, prompt, serve, settle, tiny_identity, tiny_layout
from unguarded import assert_needed

LAYOUT = tiny_layout()
BASE = tiny_identity(LAYOUT, config={"model_type": "test", "rope_theta": 10000.0, "num_hidden_layers": 2})
OTHERS = {
    "weights": replace(BASE, weights=replace(BASE.weights, digest=b"\1" * 32)),
    "sampled weights": replace(BASE, weights=replace(BASE.weights, kind="sampled")),
    "rope": tiny_identity(LAYOUT, config={"model_type": "test", "rope_theta": 20000.0, "num_hidden_layers": 2}),
    "dtype of the same size": tiny_identity(tiny_layout(dtype="float32"), config={"model_type": "test"}),
    "part": replace(BASE, part="rank 1 of 2"),
    "layout tag": replace(BASE, tag="other-rows"),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS.keys())
def test_another_model_on_the_same_directory(open_cache, tmp_path, other):
    tokens = prompt(6, seed=8)
    for identity, hit in ((BASE, 0), (other, 0), (BASE, 80), (other, 80)):
        cache = open_cache(gpu=8, cpu=16, disk=tmp_path / "disk", layout=LAYOUT, identity=identity)
        with cache.lease(tokens) as lease:
            assert lease.matched == hit
        settle(cache)
        assert serve(cache, tokens).hit == hit  # and begin() proves whose bytes they are
        settle(cache)
        assert cache.stats()["corrupt"] == cache.stats()["stale"] == cache.stats()["key_conflicts"] == 0
        cache.close()


def test_two_dtypes_of_one_width(open_cache, tmp_path):
    """Rows of the same size in the same segments, and the same weights: the dtype alone keeps them apart."""
    tokens = prompt(6, seed=8)
    for dtype, hit in (("float16", 0), ("bfloat16", 0), ("float16", 80), ("bfloat16", 80)):
        cache = open_cache(gpu=8, cpu=8, disk=tmp_path / "disk", layout=tiny_layout(dtype=dtype))
        assert serve(cache, tokens).disk == hit
        cache.close()


A, B = b"a" * 32, b"b" * 32  # content digests of adapters
WHOSE = [{}, {"adapter": A}, {"adapter": B}, {"tenant": "one"}, {"tenant": "two"}, {"adapter": A, "tenant": "one"}]


@pytest.mark.parametrize("mine", WHOSE, ids=str)
def test_adapters_and_tenants_in_every_tier_of_one_process(open_cache, tmp_path, mine):
    cache = open_cache(gpu=14, cpu=28, disk=tmp_path / "disk")
    tokens = prompt(6, seed=9)

    def others_find_nothing():
        for theirs in WHOSE:
            if theirs != mine:
                with cache.lease(tokens, **theirs) as lease:
                    assert lease.matched == 0

    serve(cache, tokens, **mine)
    settle(cache)
    others_find_nothing()
    assert serve(cache, tokens, **mine).gpu == 80
    crowd(cache)
    others_find_nothing()
    assert serve(cache, tokens, **mine).cpu == 80
    crowd(cache, prompts=3)
    others_find_nothing()
    assert serve(cache, tokens, **mine).disk == 80
    settle(cache)
    cache.close()

    cache = open_cache(gpu=14, cpu=28, disk=tmp_path / "disk")
    others_find_nothing()
    assert serve(cache, tokens, **mine).disk == 80


def test_both_compute_the_same_tokens_side_by_side(open_cache, tmp_path):
    cache = open_cache(gpu=14, cpu=28, disk=tmp_path / "disk")
    tokens = prompt(6, seed=10)
    spaces = [{"adapter": A}, {"adapter": B}]
    leases = [begin(cache, tokens, **whose) for whose in spaces]
    for lease, whose in zip(leases, spaces, strict=True):
        finish(cache, lease, tokens, space=cache.namespace(whose["adapter"]))
    settle(cache)
    assert cache.stats()["duplicates"] == 0
    crowd(cache)
    for whose in spaces:
        assert serve(cache, tokens, **whose).cpu == 80  # and begin() proves whose bytes they are


@pytest.mark.guards
def test_what_keeps_it_from_happening():
    """Without one line adapters and tenants would share pages, and the tests above see it."""
    assert_needed("name_space", __file__, "test_adapters_and_tenants_in_every_tier_of_one_process")
