"""A1: a page key is a name and never a proof. Pages with equal keys and different tokens are told apart in every tier.

What is compared is the page itself, its parent's key and the namespace. That the pages *before* it are the same rests on the
parent's key, so for a prefix of several pages on the strength of SHA-256.
"""

import functools
import random

import numpy as np
import pytest
from support import PAGE, ByHand, begin, prompt, serve, settle, tiny_identity, tiny_layout

import kvstrata.cache
from kvstrata._core import Core, page_key

SPACE = b"\5" * 32


@pytest.fixture
def short_keys(monkeypatch):
    """Page keys of one byte."""
    monkeypatch.setattr(kvstrata.cache, "Core", functools.partial(Core, key_bytes=1))


def colliding(space, count, first=0):
    """So many prompts of one page whose keys begin with the same byte."""
    found = {}
    for seed in range(first, first + 100000):
        tokens = prompt(1, seed)
        same = found.setdefault(page_key(space, space, tokens)[0], [])
        same.append(tokens)
        if len(same) == count:
            return same
    raise AssertionError


def namespace():
    return tiny_identity(tiny_layout()).namespace()


def miss(cache, tokens, reads):
    """Looks the prompt up: nothing is found, one conflict is counted, and so many slots are read to find out."""
    before = cache.stats()
    with begin(cache, tokens, leave=0) as lease:
        assert lease.hit == 0
    settle(cache)
    assert cache.stats()["key_conflicts"] == before["key_conflicts"] + 1
    assert cache.stats()["cpu"]["failures"] == before["cpu"]["failures"] + reads


def test_on_disk_from_an_earlier_run(open_cache, tmp_path, short_keys):
    x, y = colliding(namespace(), 2)
    cache = open_cache(gpu=4, cpu=4, disk=tmp_path / "disk")
    serve(cache, x)
    settle(cache)
    cache.close()
    cache = open_cache(gpu=4, cpu=4, disk=tmp_path / "disk")
    miss(cache, y, reads=1)  # read, compared, found to be another's
    assert serve(cache, x, leave=0).disk == PAGE
    miss(cache, y, reads=0)  # x is known by now
    assert serve(cache, y).hit == 0
    settle(cache)
    assert serve(cache, y, leave=0).gpu == PAGE
    assert serve(cache, x, leave=0).gpu == PAGE
    assert cache.stats()["corrupt"] == cache.stats()["stale"] == 0
    settle(cache)
    cache.close()
    cache = open_cache(gpu=4, cpu=4, disk=tmp_path / "disk")
    assert serve(cache, x, leave=0).disk == PAGE, "the first one's page is kept"


def test_on_disk_in_one_run(open_cache, tmp_path, short_keys):
    x, y, z = colliding(namespace(), 3)
    cache = open_cache(gpu=4, cpu=1, disk=tmp_path / "disk")
    serve(cache, x)
    settle(cache)
    before = cache.stats()["key_conflicts"]
    serve(cache, y)
    settle(cache)
    assert cache.stats()["key_conflicts"] > before, "y cannot be written under x's name"
    assert cache.stats()["disk"]["pages"] == 1
    cache.lease(prompt(4, seed=1 << 21), read=False, write=False, must=True).release()  # empties the device; RAM holds y
    for tokens, hit in ((y, PAGE), (x, PAGE), (z, 0), (x, PAGE)):
        with begin(cache, tokens, leave=0) as lease:
            assert lease.hit == hit
    settle(cache)


def test_everywhere_at_once(open_cache, tmp_path, short_keys):
    """Hundreds of pages share 256 names; whoever is served gets his own bytes (begin() compares them)."""
    rng = random.Random(1)
    prompts = [prompt(rng.choice([1, 1.5]), seed) for seed in range(300)]
    hits = conflicts = 0
    for _ in range(4):
        cache = open_cache(gpu=6, cpu=8, disk=tmp_path / "disk")
        for _ in range(400):
            served = serve(cache, rng.choice(prompts), leave=0)
            hits += served.hit
            settle(cache)
        conflicts += cache.stats()["key_conflicts"]
        assert cache.stats()["corrupt"] == 0
        cache.close()
    assert hits > 100 * PAGE
    assert conflicts > 100


def test_the_driver_keeps_what_is_anothers():
    """A sound slot with our key and another content is not ours to clear: it stays for its owner."""
    hand = ByHand(gpu_rows=4, cpu_rows=4, disk=True, key_bytes=1)
    x, y = colliding(hand.space, 2)
    key = page_key(hand.space, hand.space, x)[:1] + bytes(31)
    hand.driver.add_found(key, hand.space, (0, 0))  # holds x
    lease = hand.lease(y, leave=0)
    ((_, kind, slot, _, asked),) = hand.ops
    assert (kind, slot, asked) == ("read", (0, 0), key)
    hand.finish_ops(lambda kind, slot: "conflict")
    assert hand.hit(lease) == 0
    assert hand.stats()["key_conflicts"] == 1
    assert not hand.ops, "nothing is cleared"
    hand.driver.publish(0.0, lease, PAGE)
    hand.release(lease)
    hand.finish_all()
    lease = hand.lease(x, leave=0)
    hand.finish_ops()
    hand.finish_copies()
    assert hand.hit(lease) == 1
    assert hand.driver.state(lease)[3] == (0, 0, 1)
    hand.release(lease)


# --- the keys as they are


def test_a_million_random_pages_have_a_million_keys():
    """The first eight bytes alone are compared, which makes it harder: 2.7e-8 is the chance of two equal ones among a million."""
    count = 1_000_000
    tokens = np.random.default_rng(1).integers(0, 1 << 17, (count, PAGE), np.int32)
    keys = np.fromiter((page_key(SPACE, SPACE, page)[:8] for page in tokens), "S8", count)
    assert len(np.unique(keys)) == len(np.unique(tokens.view(f"V{PAGE * 4}"))) == count


def test_the_additive_trick():
    """+31 here and -1 there leave a polynomial hash as it was (31 * a + b): no key of ours, in any place and under any parent."""
    page = prompt(1, seed=3) + 1000
    for parent in (SPACE, b"\6" * 32):
        keys = {page_key(SPACE, parent, page)}
        for at in range(PAGE - 1):
            for sign in (1, -1):
                changed = page.copy()
                changed[at] += -sign
                changed[at + 1] += 31 * sign
                keys.add(page_key(SPACE, parent, changed))
        assert len(keys) == 1 + 2 * (PAGE - 1)


def test_every_part_of_a_key_counts():
    page = prompt(1, seed=3)
    swapped = page.copy()
    swapped[[0, 1]] = page[[1, 0]]
    zeros = [np.zeros(n, np.int32) for n in (PAGE, 2 * PAGE)]
    keys = [
        page_key(SPACE, SPACE, page),
        page_key(SPACE, b"\6" * 32, page),
        page_key(b"\6" * 32, SPACE, page),
        page_key(SPACE, SPACE, swapped),
        page_key(SPACE, SPACE, page[::-1].copy()),
        *(page_key(SPACE, SPACE, some) for some in zeros),
    ]
    assert len(set(keys)) == len(keys)
    assert page_key(SPACE, SPACE, page.copy()) == keys[0]
