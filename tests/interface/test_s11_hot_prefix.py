"""S11: a hot prefix is found and pinned without work in Python that grows with it. The time it takes, well under a millisecond for
131,072 tokens, is measured by benchmarks/match.py, which is run here for what it finds, not for how fast.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pages import PAGE, prompt

from kvstrata.cache import PrefixCache
from kvstrata.layout import PageLayout, PlaneSpec
from kvstrata.limits import Limits

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "match.py"
LONG = 8192  # pages: 131,072 tokens


@pytest.fixture
def cache() -> Any:
    layout = PageLayout.from_planes([PlaneSpec(0, "k", "uint8", (1, 8))], page_size=PAGE, dtype="uint8", tag="test")
    with PrefixCache(layout, Limits(LONG + 8)) as cache:
        yield cache
        cache.check_integrity()


def calls_in(work: Callable[[], Any]) -> int:
    """Calls of functions, Python's and native ones, that it makes."""
    count = 0

    def one(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(one)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def test_nothing_is_done_page_by_page(cache: PrefixCache) -> None:
    """As many calls for 131,072 tokens as for 16: all the rest is one walk in the core, comparing tokens."""
    tokens = prompt(LONG)
    with cache.lease(tokens, must=True) as lease:
        lease.publish(len(tokens))
    counts = []
    for pages in (1, LONG):
        asked = np.append(tokens[: pages * PAGE], np.int32(1))

        def match_and_pin(asked: np.ndarray = asked, pages: int = pages) -> None:
            lease = cache.lease(asked, must=True)
            assert lease.ready
            assert lease.hit == pages * PAGE
            assert lease.sources["gpu"] == pages * PAGE
            lease.release()

        match_and_pin()  # what is done once is done now
        counts.append(calls_in(match_and_pin))
    assert counts[0] == counts[1]


def test_what_is_pinned_stays(cache: PrefixCache) -> None:
    """The whole of it, by one pin, while others ask for every row there is."""
    tokens = prompt(LONG)
    with cache.lease(tokens, must=True) as lease:
        rows = lease.rows.copy()
        lease.publish(len(tokens))
    with cache.lease(tokens, leave=0, must=True) as lease:
        assert lease.hit == len(tokens)
        for seed in range(4):
            with cache.lease(prompt(8, 1 + seed), must=True) as other:
                assert not set(other.rows.tolist()) & set(rows.tolist())
                other.publish(8 * PAGE)
        assert not cache.lease(prompt(9, 9))  # CacheFull: nothing of the prefix is given away
        assert lease.rows.tolist() == rows.tolist()
    with cache.lease(tokens, leave=0, must=True) as lease:
        assert lease.hit == len(tokens)


def test_what_is_measured() -> None:
    ran = subprocess.run([sys.executable, BENCHMARK, "--json", "--rounds", "20"], capture_output=True, text=True, timeout=300)
    rows = json.loads(ran.stdout)["rows"]
    assert [(row["page_size"], row["hit_tokens"]) for row in rows] == [(16, 131072), (256, 131072)]
    assert all(row["limit_ms"] == 1.0 for row in rows)
