"""PrefixCache.purge: dropping pages from a cache that is in use, out of every tier and out of the files."""

import random
import threading

import numpy as np
import pytest
from support import PAGE, begin, finish, prompt, serve, settle
from tool_kit import fill_disk, kvstrata, traces


@pytest.fixture
def cache(open_cache, tmp_path):
    return open_cache(gpu=24, cpu=40, disk=tmp_path / "disk")


def test_everything(cache, tmp_path):
    root = tmp_path / "disk"
    tokens = [fill_disk(cache, 6, seed=seed) for seed in range(3)]
    private = fill_disk(cache, 4, seed=9, tenant="acme")
    report = cache.purge(everything=True)
    assert report["done"]
    assert (report["pages"], report["cpu"], report["in_use"], report["used_pages"]) == (22, 22, 0, 0)
    cache.check_integrity()
    stats = cache.stats()
    assert stats["gpu"]["pages"] == stats["cpu"]["pages"] == stats["disk"]["pages"] == 0
    for one in [*tokens, private]:
        assert traces(root, one) == 0
        assert serve(cache, one).hit == 0
    settle(cache)
    assert serve(cache, tokens[0]).hit == 5 * PAGE


def test_one_namespace(cache, tmp_path):
    shared, private = fill_disk(cache, 6), fill_disk(cache, 6, tenant="acme")
    assert np.array_equal(shared, private)
    report = cache.purge(cache.namespace(tenant="acme"))
    assert (report["pages"], report["done"]) == (6, True)
    assert serve(cache, shared).hit == 5 * PAGE
    assert serve(cache, private, tenant="acme").hit == 0
    assert kvstrata("verify", tmp_path / "disk").status == 0


def test_a_prefix(cache, tmp_path):
    trunk = fill_disk(cache, 3)
    branches = [np.concatenate([trunk, prompt(2, seed=seed)]) for seed in (1, 2)]
    for tokens in branches:
        serve(cache, tokens)
        settle(cache)
    report = cache.purge(tokens=branches[0][: 4 * PAGE + 5])
    assert (report["pages"], report["cpu"], report["done"]) == (2, 2, True)
    assert (traces(tmp_path / "disk", branches[0]), traces(tmp_path / "disk", branches[1])) == (3, 5)
    assert serve(cache, branches[0]).hit == 3 * PAGE
    assert serve(cache, branches[1]).hit == 4 * PAGE


def test_pages_in_use_stay_and_are_counted(cache, tmp_path):
    tokens, other = fill_disk(cache, 4, seed=1), fill_disk(cache, 4, seed=2)
    lease = begin(cache, tokens)
    report = cache.purge(everything=True, timeout=0.1)
    assert not report["done"]
    assert report["in_use"] == 3  # in the pool, under the lease's pin
    assert report["pages"] == 8  # on disk nothing is in use
    assert finish(cache, lease, tokens).hit == 3 * PAGE  # proven
    assert serve(cache, other).hit == 0
    settle(cache)
    assert cache.purge(everything=True)["done"]
    assert traces(tmp_path / "disk", tokens) == 0


def test_without_a_disk(open_cache):
    cache = open_cache(gpu=8, cpu=16)
    serve(cache, prompt(4))
    settle(cache)
    report = cache.purge(everything=True)
    assert (report["gpu"], report["cpu"], report["pages"], report["done"]) == (4, 4, 0, True)
    assert serve(cache, prompt(4)).hit == 0


def test_by_age(cache):
    tokens = fill_disk(cache, 4)
    assert cache.purge(unused_for=3600)["pages"] == 0
    assert cache.purge(unused_for=0)["pages"] in (0, 4)  # times are kept in whole seconds
    assert serve(cache, tokens).gpu == 3 * PAGE  # in memory they were used just now


def test_shelves_of_processes_that_ended(open_cache, tmp_path):
    """Those of another model, which this cache took over and does not use."""
    from support import tiny_identity, tiny_layout

    layout = tiny_layout(width=32)
    other = open_cache(gpu=8, cpu=16, disk=tmp_path / "disk", layout=layout, identity=tiny_identity(layout))
    tokens = fill_disk(other, 4)
    other.close()
    cache = open_cache(gpu=8, cpu=16, disk=tmp_path / "disk")
    assert cache.purge(everything=True)["pages"] == 4
    assert traces(tmp_path / "disk", tokens) == 0


def test_while_others_serve(cache):
    """Purges of everything, of a prefix and of a namespace, again and again, beside requests: no wrong byte, and all is whole."""
    prompts = [prompt(4, seed=seed) for seed in range(6)]
    stop = threading.Event()
    failures = []

    def purge():
        dice = random.Random(1)
        try:
            while not stop.is_set():
                how = dice.choice(["all", "prefix", "space"])
                if how == "prefix":
                    cache.purge(tokens=dice.choice(prompts)[: dice.randint(1, 4) * PAGE], timeout=0)
                else:
                    cache.purge(timeout=0, **({"everything": True} if how == "all" else {"namespace": cache.namespace()}))
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=purge)
    thread.start()
    dice = random.Random(2)
    for _ in range(300):
        serve(cache, dice.choice(prompts))
    stop.set()
    thread.join()
    assert not failures, failures
    cache.check_integrity()
    settle(cache)
    assert cache.purge(everything=True)["done"]


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ({}, "say what to drop"),
        ({"everything": True, "unused_for": 5}, "say what to drop"),
        ({"everything": "yes"}, "everything is 'yes'"),
        ({"namespace": b"short"}, "b'short'"),
        ({"namespace": "acme"}, "'acme'"),
        ({"tokens": [1, 2, 3]}, "3 token ids"),
        ({"tokens": "text"}, "token ids"),
        ({"unused_for": -1}, "unused_for is -1"),
        ({"everything": True, "timeout": "x"}, "timeout is 'x'"),
    ],
    ids=str,
)
def test_orders_that_cannot_be(cache, order, words):
    tokens = fill_disk(cache, 3)
    with pytest.raises(ValueError, match=words):
        cache.purge(**order)
    assert serve(cache, tokens).hit == 2 * PAGE
