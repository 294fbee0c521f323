"""F2: a disk tier that is written and never read says so, once, with what differs; and the self-test tells by tier in the log.

The self-test's rows in `kvstrata doctor` are in interface/test_s12_doctor.py.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import PAGE, GatedDevice, prompt, serve, settle, tiny_identity, tiny_layout, until

from kvstrata import hits
from kvstrata.cache import PrefixCache
from kvstrata.gpu import Copy, PagePool, Slab, Transfer
from kvstrata.selftest import selftest

FEW = 12


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """A dozen prompts say something here. few(): what the log says of hits."""
    monkeypatch.setattr(hits, "LOOKUPS", FEW)
    monkeypatch.setattr(hits, "STORED", 3 * FEW)
    caplog.set_level(logging.INFO, "kvstrata")
    return lambda: [record.getMessage() for record in caplog.records if "none of" in record.getMessage()]


def unlike(number: int) -> np.ndarray:
    """Prompts that all begin with the same five tokens, as those of a template with the date in it."""
    tokens = prompt(3, seed=2)
    tokens[5] = number
    return tokens


def offer(cache: PrefixCache, prompts: int = FEW, first: int = 0, **options: Any) -> None:
    for number in range(first, first + prompts):
        assert serve(cache, unlike(number), **options).hit == 0
        settle(cache)


def test_one_line_with_the_first_token_that_differs(open_cache: Any, tmp_path: Path, few: Any) -> None:
    cache = open_cache(gpu=4, cpu=8, disk=tmp_path / "disk")
    offer(cache, FEW - 1)
    cache._hits.look()
    assert not cache._hits.asking, "too few to say anything"
    offer(cache, 2, first=FEW - 1)
    cache._hits.look()
    assert few() == []
    offer(cache, 2, first=100)
    for _ in range(3):
        cache._hits.look()
    (line,) = few()
    assert line.startswith(
        f"disk tier {tmp_path}/disk: {3 * (FEW + 3)} pages were stored, and none of {FEW + 3} prompts found anything"
    )
    assert "token 5 is 100, and " in line
    assert "in the closest prompt that is cached: another prefix from there on" in line
    offer(cache, 2, first=200)
    cache._hits.look()
    assert len(few()) == 1


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"weights": b"w" * 32}, "weights: "),
        ({"config": {"rope_theta": 2.0}}, "config: "),
        ({"part": "rank 1 of 2"}, "part: rank 1"),
    ],
)
def test_the_field_that_differs_from_what_is_on_disk(open_cache: Any, tmp_path: Path, few: Any, options: Any, field: str) -> None:
    """After an upgrade, say: what was stored before is of another name."""
    before = open_cache(gpu=4, cpu=8, disk=tmp_path / "disk", disk_bytes=16 << 20)
    offer(before)
    before.close()
    identity = tiny_identity(tiny_layout(), **options)
    cache = open_cache(gpu=4, cpu=8, disk=tmp_path / "disk", disk_bytes=16 << 20, identity=identity)
    offer(cache)
    cache._hits.look()
    offer(cache, 1, first=50)
    cache._hits.look()
    (line,) = few()
    assert "the nearest other namespace (no name) differs in " + field in line


def test_a_tenant_for_every_prompt(open_cache: Any, tmp_path: Path, few: Any) -> None:
    cache = open_cache(gpu=4, cpu=8, disk=tmp_path / "disk")
    for number in range(FEW + 2):
        assert serve(cache, prompt(3), tenant=f"session {number}").hit == 0
        settle(cache)
        if number >= FEW - 1:
            cache._hits.look()
    (line,) = few()
    assert "nothing that continues the first 0 pages is cached" in line
    assert " differs in tenant" in line
    assert "session" not in line


@pytest.mark.parametrize("tier", ["gpu", "cpu", "disk"])
def test_one_hit_anywhere_is_enough(open_cache: Any, tmp_path: Path, few: Any, tier: str) -> None:
    cache = open_cache(gpu=4, cpu=8, disk=tmp_path / "disk")
    offer(cache)
    number = {"gpu": FEW - 1, "cpu": FEW - 2, "disk": 0}[tier]
    served = serve(cache, unlike(number))
    assert served.hit == 2 * PAGE
    assert getattr(served, tier) > 0
    settle(cache)
    cache._hits.look()
    assert cache._hits.over
    offer(cache, FEW, first=100)
    cache._hits.look()
    assert few() == []


def test_it_is_looked_for_without_being_asked(open_cache: Any, tmp_path: Path, few: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hits, "LOOK_S", 0.01)
    cache = open_cache(gpu=4, cpu=8, disk=tmp_path / "disk")
    offer(cache)
    until(lambda: cache._hits.asking, "the thread looks at the counters")
    offer(cache, 1, first=50)
    until(few, "and warns")
    until(lambda: cache._hits.over, "once")


class Damaging(GatedDevice):
    def start(self, copy: Copy, pool: PagePool, slab: Slab) -> Transfer:
        ended = super().start(copy, pool, slab)
        if copy.up:
            pool.data[int(copy.device_rows[0]), 0] += 1
        return ended


def test_the_self_test_is_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvstrata")

    def told() -> list[str]:
        lines = [f"{record.levelname} {record.getMessage()}" for record in caplog.records if "self-test" in record.getMessage()]
        caplog.clear()
        return lines

    selftest(tmp_path)
    assert told() == [f"INFO self-test: {tier}: pages came back as they were" for tier in ("gpu", "cpu", "disk", "restart")]
    selftest(None, Damaging())  # type: ignore[arg-type]
    assert told() == ["INFO self-test: gpu: pages came back as they were", "WARNING self-test: cpu: 1 pages came back changed"]
