"""Prefixes that come from lower tiers: who waits for them, for how long, and what happens when they do not arrive."""

import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_kit import BYTES, tiny_model, words
from support import GatedDevice, until

from kvstrata.cache import PrefixCache
from kvstrata.engine import Engine, Request, Sampling, Sequence, worth_loading
from kvstrata.lease import Lease
from kvstrata.sim_device import SimDevice
from kvstrata.speed import Speed

MakeCache = Callable[..., PrefixCache]


def outputs(engine: Engine, prompts: list[list[int]], new: int = 6) -> list[list[int]]:
    sequences = engine.generate(prompts, max_new_tokens=new)
    assert [sequence.error for sequence in sequences] == [None] * len(prompts)
    return [sequence.output for sequence in sequences]


# ---- a device whose copies run beside the computation ----


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimDevice:
    """The model computes on this thread: where a kernel would be made to wait for a layer, the thread waits."""
    device, wait = SimDevice(seed=3, delay=2e-3), Lease.wait

    def waiting(lease: Lease, timeout: float | None = None, layer: int | None = None) -> int:
        hit = wait(lease, timeout, layer)
        if layer is not None:
            assert device.synchronize(30)
        return hit

    monkeypatch.setattr(Lease, "wait", waiting)
    return device


@pytest.mark.parametrize("name", ["llama", "deepseek"])
def test_first_chunk_is_computed_while_pages_arrive(make_cache: MakeCache, device: SimDevice, name: str) -> None:
    model, prompts = tiny_model(name), [words(150, seed=i) for i in range(6)]
    expected = outputs(Engine(model, BYTES, make_cache(model), max_batch_size=1, reuse=False), prompts)
    cache = make_cache(model, gpu_pages=24, cpu_pages=80, device=device)
    engine = Engine(model, BYTES, cache, max_batch_size=1)
    for _ in range(4):
        for prompt, right in zip(prompts, expected, strict=True):
            assert outputs(engine, [prompt]) == [right]
    assert cache.stats()["cpu"]["used"] > 40


def test_a_failed_copy_costs_time_and_nothing_else(make_cache: MakeCache, device: SimDevice) -> None:
    model, prompts = tiny_model(), [words(150, seed=i) for i in range(4)]
    expected = outputs(Engine(model, BYTES, make_cache(model), max_batch_size=1, reuse=False), prompts)
    cache = make_cache(model, gpu_pages=24, cpu_pages=80, device=device)
    engine = Engine(model, BYTES, cache, max_batch_size=1)
    outputs(engine, prompts)
    for _ in range(6):
        for prompt, right in zip(prompts, expected, strict=True):
            cache.flush(30)
            device.fail_copy()
            assert outputs(engine, [prompt]) == [right]
    assert cache.stats()["copy_failures"] >= 6


# ---- a slow disk ----


class SlowLease:
    """A lease whose pages are on disk, and arrive when the test says so; until then only giving up settles it."""

    def __init__(self, lease: Lease, disk: "SlowDisk") -> None:
        self._lease, self._disk = lease, disk
        self.matched = disk.promised
        self.settled = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lease, name)

    @property
    def sources(self) -> dict[str, int]:
        return {"gpu": 0, "cpu": 0, "disk": 0 if self.settled else self.matched}

    @property
    def ready(self) -> bool:
        return self.settled or self._disk.arrived

    def wait(self, timeout: float | None = None, layer: int | None = None) -> int:
        assert timeout == 0 or self.ready  # the engine never waits for a disk
        self.settled = True
        return 0


class SlowDisk:
    """A cache that believes every prompt longer than 100 tokens to be on disk."""

    def __init__(self, cache: PrefixCache, load_deadline: float) -> None:
        self._cache = cache
        self.limits = cache.limits._replace(load_deadline=load_deadline)
        self.promised, self.arrived = 128, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def lease(self, tokens: list[int], **options: Any) -> Any:
        lease = self._cache.lease(tokens, **options)
        return SlowLease(lease, self) if lease and len(tokens) > 100 else lease


def test_others_do_not_wait_for_a_slow_disk(make_cache: MakeCache) -> None:
    model = tiny_model()
    cache: Any = SlowDisk(make_cache(model, gpu_pages=80), load_deadline=600)
    engine = Engine(model, BYTES, cache)
    slow = engine.submit(Request(words(150), Sampling(max_new_tokens=4)))
    quick = [engine.submit(Request(words(50, seed=i), Sampling(max_new_tokens=4))) for i in range(3)]
    assert [sequence.result().reason for sequence in quick] == ["length"] * 3
    assert not engine.step()
    assert engine.scheduler.loading == [slow]
    cache.arrived = True
    assert slow.result().reason == "length"


def test_who_is_late_computes(make_cache: MakeCache) -> None:
    model = tiny_model()
    cache: Any = SlowDisk(make_cache(model), load_deadline=0.05)
    sequence = Engine(model, BYTES, cache).submit(Request(words(150), Sampling(max_new_tokens=4)))
    started = time.monotonic()
    assert sequence.result().stats.computed_tokens == 150
    assert 0.05 <= time.monotonic() - started < 5


def test_a_disk_known_to_be_slow_is_not_waited_for(make_cache: MakeCache) -> None:
    """E1: with measured speeds, computing again wins."""
    model = tiny_model()
    cache: Any = SlowDisk(make_cache(model), load_deadline=600)
    engine = Engine(model, BYTES, cache)
    engine.scheduler.patience.disk.measured(1000, 1.0)
    engine.scheduler.patience.prefill.measured(50_000, 1.0)
    (sequence,) = engine.generate([words(150)], max_new_tokens=2)
    assert sequence.stats.computed_tokens == 150


def test_cancelled_while_loading(make_cache: MakeCache) -> None:
    model = tiny_model()
    cache: Any = SlowDisk(make_cache(model), load_deadline=600)
    engine = Engine(model, BYTES, cache)
    sequence = engine.submit(Request(words(150)))
    engine.step()
    assert engine.scheduler.loading == [sequence]
    sequence.cancel()
    assert sequence.result().reason == "cancelled"
    assert cache.stats()["open_leases"] == 0


def test_worth_loading() -> None:
    mb = 10**6
    per_token = 46_080
    assert not worth_loading(2048 * per_token, 0, 20 * mb, 2048, 50_000)
    assert worth_loading(2048 * per_token, 0, 3000 * mb, 2048, 1000)
    assert not worth_loading(2048 * per_token, 10_000 * mb, 3000 * mb, 2048, 1000)  # behind a long queue
    assert worth_loading(2048 * per_token, 0, None, 2048, 1000)  # nothing measured yet: try
    assert worth_loading(2048 * per_token, 0, 20 * mb, 2048, None)


def test_speed_learns_more_only_from_what_was_seen_late() -> None:
    speed = Speed(weight=0.5)
    speed.measured(100, 1, at_least=True)
    assert speed.value is None
    speed.measured(100, 1)
    speed.measured(50, 1, at_least=True)
    assert speed.value == 100
    speed.measured(200, 1, at_least=True)
    assert speed.value == 150
    speed.measured(50, 1)
    assert speed.value == 100


def test_a_deadline_of_zero_waits_for_nothing_and_loads_all_the_same(make_cache: MakeCache, tmp_path: Path) -> None:
    model, device = tiny_model(), GatedDevice()
    prompt, other = words(200), words(200, seed=1)  # 3 chunks of 4 pages, and a rest
    disk = {"disk_path": str(tmp_path / "disk"), "disk_bytes": 64 << 20}
    first = make_cache(model, cpu_pages=40, **disk)
    right, _ = outputs(Engine(model, BYTES, first), [prompt, other])
    assert first.close()
    cache = make_cache(model, cpu_pages=12, gpu_pages=60, device=device, load_deadline=0, **disk)
    engine = Engine(model, BYTES, cache)

    def first_step() -> Sequence:
        sequence = engine.submit(Request(prompt))
        assert engine.step()  # it computes, whatever is on its way
        sequence.cancel()
        return sequence

    device.ups.clear()
    with cache.lease(other, must=True, multiple=64) as busy:
        # Every row of the CPU tier is being read now: what else is on disk cannot even begin to come.
        until(lambda: cache.stats()["cpu"]["pages"] == 12, "12 pages to come from disk")
        assert first_step().stats.computed_tokens == 200
        device.ups.set()
        assert busy.wait(30) == 192
    assert not engine.step()
    assert cache.flush(30)
    first_step()  # with 8 pages on their way; those of the last chunk arrive after all
    assert not engine.step()
    assert cache.flush(30)
    (again,) = engine.generate([prompt], max_new_tokens=6)
    assert again.output == right
    assert again.stats.computed_tokens == 8
    assert again.stats.reused_tokens["disk"] == 0
    assert cache.stats()["timeouts"] == 0


# ---- long runs ----


def test_memory_is_flat(make_cache: MakeCache) -> None:
    """Over 1,000 requests on a two-layer model, after the first 200."""
    model = tiny_model(num_hidden_layers=2)
    engine = Engine(model, BYTES, make_cache(model, gpu_pages=60, cpu_pages=60))

    def serve(first: int, last: int) -> int:
        for number in range(first, last, 8):
            outputs(engine, [words(20 + seed % 60, seed % 50) for seed in range(number, number + 8)], new=3)
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()

    before = serve(0, 200)
    assert serve(200, 1000) - before < 8 << 20


def test_gradients_are_never_kept(make_cache: MakeCache) -> None:
    model = tiny_model()
    engine = Engine(model, BYTES, make_cache(model))
    outputs(engine, [words(100)])
    assert not any(plane.requires_grad for layer in engine.cache.pool.layers for plane in layer.planes.values())
    assert torch.is_grad_enabled()
