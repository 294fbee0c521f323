"""A11: at least `leave` tokens of a prompt are always left to compute, also where every page of it is cached."""

import pytest
from support import PAGE, begin, crowd, prompt, serve, settle

EIGHT = prompt(8, seed=11)


WAYS = [  # tokens of EIGHT asked for, leave, multiple in pages -> pages of the hit
    (128, 1, 1, 7),
    (128, 2, 1, 7),
    (128, PAGE, 1, 7),
    (128, PAGE + 1, 1, 6),
    (128, 128, 1, 0),
    (128, 500, 1, 0),
    (128, 0, 1, 8),
    (128, 1, 4, 4),
    (128, 0, 4, 8),
    (128, 1, 8, 0),
    (128, 0, 3, 6),
    (PAGE + 1, 1, 1, 1),
    (PAGE, 1, 1, 0),
    (PAGE, 0, 1, 1),
    (1, 1, 1, 0),
    (1, 0, 1, 0),
    (0, 1, 1, 0),
    (0, 0, 1, 0),
]


@pytest.mark.parametrize("tier", ["gpu", "cpu", "disk", "disk of an earlier run"])
def test_in_each_tier_in_turn(open_cache, tmp_path, tier):
    cache = open_cache(gpu=16, cpu=24, disk=tmp_path / "disk")
    serve(cache, EIGHT)
    settle(cache)
    if "run" in tier:
        cache.close()
        cache = open_cache(gpu=16, cpu=24, disk=tmp_path / "disk")
    for tokens, leave, multiple, pages in WAYS:
        crowd(cache, prompts={"gpu": 0, "cpu": 1}.get(tier, 4))
        with begin(cache, EIGHT[:tokens], leave=leave, multiple=multiple * PAGE) as lease:
            assert lease.matched == lease.hit == pages * PAGE <= max(tokens - leave, 0)
            assert lease.sources[tier[:4].rstrip()] == pages * PAGE
            assert len(lease.rows) == -(-tokens // PAGE)
        settle(cache)


@pytest.mark.parametrize("length", [1, 2, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE - 1, 2 * PAGE, 2 * PAGE + 1])
def test_short_prompts_asked_twice(open_cache, length):
    cache = open_cache(gpu=8, cpu=24)
    tokens = prompt(3, seed=12)[:length]
    assert serve(cache, tokens).hit == 0
    settle(cache)
    expected = (length - 1) // PAGE * PAGE
    assert serve(cache, tokens).gpu == expected
    settle(cache)
    crowd(cache)
    assert serve(cache, tokens).cpu == expected


def test_an_empty_prompt_that_grows(open_cache):
    cache = open_cache(gpu=8)
    tokens = prompt(2, seed=13)
    with cache.lease([], reserve=len(tokens)) as lease:
        assert lease.wait() == 0
        lease.append(tokens)
        assert lease.publish(0) == 0
    with cache.lease([]) as lease:
        assert lease.wait() == 0
        assert lease.publish(100) == 0
