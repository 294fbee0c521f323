"""Every argument of the public calls: what it cannot be is refused with its name or value, in one sentence, and nothing happens."""

import math

import numpy as np
import pytest
from support import prompt, tiny_identity, tiny_layout

from kvstrata.cache import Limits, MediaItem, PrefixCache

pytest.importorskip("torch")
LAYOUT = tiny_layout()
DIGEST = bytes(32)


def refused(call, *words):
    with pytest.raises((ValueError, TypeError)) as error:
        call()
    sentence = str(error.value)
    assert "\n" not in sentence
    assert "incompatible function arguments" not in sentence
    for word in words:
        assert word in sentence, sentence


LIMITS = [
    {field: value}
    for field, values in {
        "gpu_pages": [-1, 1.5, 1 << 32, "4", None, True],
        "cpu_pages": [-1, 2.5, 1 << 32, "4"],
        "disk_bytes": [-1, 1.0, 1 << 70],
        "disk_reserve_bytes": [-1],
        "disk_path": [5, None, b"/tmp"],
        "io_threads": [0, -1, 1000, 1.5],
        "load_deadline": [math.nan, -1, "1", None],
        "write_deadline": [math.nan, -1, None],
        "retry_after": [math.nan, -1, "x"],
    }.items()
    for value in values
]


@pytest.mark.parametrize("wrong", LIMITS, ids=str)
def test_limits(wrong):
    (field,) = wrong
    refused(lambda: PrefixCache(LAYOUT, Limits(4, 4)._replace(**wrong)), f"limits.{field}", repr(wrong[field]))


@pytest.mark.parametrize(
    "wrong", [{"chunk": -3}, {"chunk": 16.5}, {"chunk": "16"}, {"chunk": 0}, {"events": -1}, {"events": "x"}], ids=str
)
def test_numbers_of_a_cache(wrong):
    refused(lambda: PrefixCache(LAYOUT, Limits(4), **wrong), *wrong, *(repr(value) for value in wrong.values()))


@pytest.mark.parametrize("device", ["tpu", None, 5, "cuda:x", ""])
def test_devices(device):
    refused(lambda: PrefixCache(LAYOUT, Limits(4), device=device), repr(device), "'cpu'")


def test_kinds():
    refused(lambda: PrefixCache(None, Limits(4)), "PageLayout")
    refused(lambda: PrefixCache(LAYOUT, (4, 4)), "Limits", "tuple")
    refused(lambda: PrefixCache(LAYOUT, Limits(4), identity="me"), "identity", "'me'")


@pytest.mark.parametrize(
    "wrong",
    [
        {"adapter": "lora"},
        {"adapter": 5},
        {"adapter": b"short"},
        {"tenant": 5},
        {"tenant": b"x"},
        {"media": [(1, 2, DIGEST)]},
        {"media": [MediaItem(1, 2, "x" * 32)]},
        {"media": [MediaItem("1", 2, DIGEST)]},
        {"media": [MediaItem(1.5, 2, DIGEST)]},
        {"media": [MediaItem(-1, 2, DIGEST)]},
        {"media": [MediaItem(1, 0, DIGEST)]},
        {"media": [MediaItem(4, 2, DIGEST), MediaItem(5, 2, DIGEST)]},
        {"media": [MediaItem(1, 2, b"short")]},
        {"read": "no"},
        {"write": None},
        {"must": 3},
        {"reserve": -1},
        {"reserve": 1.0},
        {"leave": 1 << 31},
        {"multiple": 24},
        {"multiple": 0},
        {"multiple": True},
    ],
    ids=str,
)
def test_leases(open_cache, wrong):
    cache = open_cache(gpu=4)
    refused(lambda: cache.lease(prompt(2), **wrong), *wrong)
    assert cache.stats()["leases"] == 0


@pytest.mark.parametrize("tokens", [None, 5, "abc", b"abc", [1.5], [[1, 2]], [None], np.array([1 << 40]), {1, 2}, [True]], ids=repr)
def test_tokens(open_cache, tokens):
    cache = open_cache(gpu=4)
    refused(lambda: cache.lease(tokens), "token id")
    with cache.lease(prompt(1)) as lease:
        refused(lambda: lease.append(tokens), "token id")


NUMBERS = ["a", -1, 1.5, 1 << 70, True]


@pytest.mark.parametrize("number", NUMBERS, ids=repr)
def test_numbers_of_a_lease(open_cache, number):
    cache = open_cache(gpu=4, cpu=4)
    with cache.lease(prompt(1), reserve=16) as lease:
        refused(lambda: lease.publish(number), "tokens", repr(number))
        refused(lambda: lease.publish(16, ready=number), "ready", repr(number))
        refused(lambda: lease.grow(number), "tokens", repr(number))
        refused(lambda: lease.release(number), "fence", repr(number))
        refused(lambda: lease.wait(layer=number), "layer", repr(number))


@pytest.mark.parametrize("time", ["a", math.nan, [1]], ids=repr)
def test_times(open_cache, time):
    cache = open_cache(gpu=4)
    with cache.lease(prompt(1)) as lease:
        refused(lambda: lease.wait(time), "timeout", repr(time))
    refused(lambda: cache.flush(time), "timeout", repr(time))
    refused(lambda: cache.close(time), "timeout", repr(time))
    with cache.lease(prompt(1)):
        pass  # a close that was refused closed nothing


def test_numbers_of_guest_mode():
    with PrefixCache(LAYOUT, Limits(0, 4), identity=tiny_identity(LAYOUT)) as cache, cache.lease(prompt(1)) as lease:
        for number in NUMBERS:
            refused(lambda number=number: lease.load(number, [1]), "first_page", repr(number))
            refused(lambda number=number: lease.save(number, [1], ready=0), "first_page", repr(number))
            refused(lambda number=number: lease.save(0, [1], ready=number), "ready", repr(number))
            refused(lambda number=number: lease.wait_copy(number), "ticket", repr(number))
            refused(lambda number=number: cache.copied(number, True), "ticket", repr(number))
        refused(lambda: lease.save(0, [1.5], ready=0), "token ids")
        refused(lambda: cache.copied(1, "yes"), "ok", "'yes'")
        refused(lambda: cache.take_copies("x"), "timeout", "'x'")


def test_copies_of_a_cache_that_owns_the_device(open_cache):
    with pytest.raises(RuntimeError, match="guest mode"):
        open_cache(gpu=4).take_copies()
