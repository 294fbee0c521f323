"""Load or recompute, who waits for whom, and what the scheduler's thread does itself: by decisions and read counts, not by
clocks."""

import threading

import numpy as np
import pytest
from support import until
from vllm_sim import PAGE, Clock, Computing, tokens_of

from kvstrata.connect.vllm.patience import PROBE_EVERY, Patience
from kvstrata.speed import Speed

SHARED = tokens_of(20 * PAGE, seed=3)
MB, GB = 10**6, 10**9


def stored(make_sim, disk, *prompts):
    sim = make_sim(disk=disk, blocks=80)
    for prompt in prompts:
        sim.serve(prompt)
        sim.settle()
    sim.connector.shutdown()


def with_speeds(sim, prefill: float, disk: float) -> Patience:
    """Tokens per second that it computes, and tokens per second whose bytes the disk brings."""
    patience = sim.connector.scheduler.patience
    patience.prefill = Computing(prefill)
    patience.disk = Computing(disk * sim.cache.layout.bytes_per_token)
    return patience


@pytest.mark.parametrize(("prefill", "disk", "loads"), [(50_000, 20_000, False), (1_000, 3_000, True), (100, 200, True)])
def test_e01_load_or_recompute(make_sim, tmp_path, prefill, disk, loads):
    """E1. Loading is chosen where it beats computing; where it does not, the request neither waits nor loads what has yet to be
    read."""
    prompt = tokens_of(20 * PAGE + 1)
    stored(make_sim, tmp_path / "disk", prompt)
    sim = make_sim(disk=tmp_path / "disk", blocks=80)
    with_speeds(sim, prefill, disk)
    local, external = sim.serve(prompt)
    assert local == 0
    sim.settle()
    assert external == (20 * PAGE if loads else 0)
    assert sim.cache.stats()["disk_reads"] == (20 if loads else 0)


def test_e01_with_a_queue_the_slab_alone(make_sim, tmp_path):
    """The disk would do, were it not for those who wait already: what is in the slab is taken, and the rest computed."""
    prompt, other = tokens_of(20 * PAGE + 1), tokens_of(20 * PAGE, seed=4)
    stored(make_sim, tmp_path / "disk", prompt, other)
    sim = make_sim(disk=tmp_path / "disk", blocks=80, cpu_pages=64)
    sim.serve(prompt[: 4 * PAGE + 1])
    sim.scheduler.reset_prefix_cache()
    patience = with_speeds(sim, prefill=1000, disk=1500)
    patience._queued = lambda *given: 20 * PAGE
    local, external = sim.serve(prompt)
    assert (local, external) == (0, 4 * PAGE) or sim.cache.stats()["disk_reads"] == 20, "unless they came before it was asked"


def test_e01_a_disk_that_becomes_fast_is_found_out(make_sim, tmp_path):
    """While nobody waits for the disk, a look now and then tells when it is worth it again."""
    prompts = [tokens_of(6 * PAGE + 1, seed) for seed in range(3)]
    stored(make_sim, tmp_path / "disk", *prompts)
    sim = make_sim(disk=tmp_path / "disk", blocks=80)
    patience = with_speeds(sim, prefill=1.0, disk=0.5)
    patience.disk = Speed(weight=0.9)
    patience.disk.value = 0.5 * sim.cache.layout.bytes_per_token
    sim.connector.scheduler._now = clock = Clock()
    assert sim.serve(prompts[0]) == (0, 0)
    assert sim.cache.stats()["disk_reads"] == 0
    clock.now += PROBE_EVERY
    assert sim.serve(prompts[2]) == (0, 0)
    until(lambda: patience._probe is None or patience._probe[0].ready, "the pages that were only asked for to see")
    clock.now += 1e-3
    sim.serve(tokens_of(20, seed=9))
    assert sim.cache.stats()["disk_reads"] == 6
    assert patience.disk_helps
    assert sim.serve(prompts[1]) == (0, 6 * PAGE)


def test_e01_what_vllm_holds_is_not_loaded(make_sim, tmp_path):
    prompt = tokens_of(6 * PAGE + 1)
    sim = make_sim(disk=tmp_path / "disk")
    sim.serve(prompt)
    sim.settle()
    before = sim.cache.stats()
    for _ in range(5):
        assert sim.serve(prompt) == (6 * PAGE, 0)
    after = sim.cache.stats()
    assert after["ups"] == before["ups"] == 0
    assert after["disk_reads"] == before["disk_reads"] == 0
    assert after["downs"] == before["downs"], "nor saved again"


def test_e01_prompts_that_hit_nothing(make_sim, tmp_path):
    """They are saved once, and that is all."""
    sim = make_sim(disk=tmp_path / "disk", cpu_pages=40)
    for seed in range(10):
        assert sim.serve(tokens_of(4 * PAGE + 1, seed)) == (0, 0)
        sim.settle()
    stats = sim.cache.stats()
    assert stats["ups"] == stats["disk_reads"] == 0
    assert stats["downs"] == stats["disk_writes"] == 40


def test_e02_many_want_one_prefix(make_sim, tmp_path):
    """E2. Fifty requests, one cold prefix of 20 pages: each page is read once, and all get it."""
    stored(make_sim, tmp_path / "disk", SHARED)
    sim = make_sim(disk=tmp_path / "disk", blocks=400, seqs=50)
    names = [sim.add(SHARED + tokens_of(7, seed=1000 + n)) for n in range(50)]
    sim.run()
    assert sim.cache.stats()["disk_reads"] == 20
    assert all(sum(sim.cached[name]) == 20 * PAGE for name in names)


def test_e02_who_has_his_pages_does_not_wait(make_sim, tmp_path):
    """Others wait for the disk; a request whose pages are in the slab goes on at once."""
    cold, warm = tokens_of(6 * PAGE + 1, seed=1), tokens_of(4 * PAGE + 1, seed=2)
    stored(make_sim, tmp_path / "disk", cold)
    sim = make_sim(disk=tmp_path / "disk", cpu_pages=9)
    sim.serve(warm)
    sim.settle()
    sim.scheduler.reset_prefix_cache()
    with sim.cache.lease(warm, leave=0):  # its four pages stay, so that five rows are left, and the other prompt needs six
        waiting = [sim.add(cold + tokens_of(5, seed=n)) for n in range(3)]
        for _ in range(5):
            sim.step()
        ready = sim.add(warm)
        for _ in range(5):
            sim.step()
        assert sim.cached.get(ready) == (0, 4 * PAGE)
        assert not any(name in sim.cached for name in waiting)
    sim.run()
    assert all(sum(sim.cached[name]) == 6 * PAGE for name in waiting)


def test_the_queue_counts_others_once(make_sim, tmp_path):
    """Requests that share their first page wait for the same pages."""
    other, held = tokens_of(20 * PAGE, seed=4), tokens_of(20 * PAGE, seed=5)
    stored(make_sim, tmp_path / "disk", SHARED, other)
    sim = make_sim(disk=tmp_path / "disk", cpu_pages=24, blocks=80)
    for pages in (10, 20):  # half the slab waits for the disk at most
        sim.serve(held[: pages * PAGE])
        sim.settle()
    scheduler, patience = sim.connector.scheduler, sim.connector.scheduler.patience
    with sim.cache.lease(held, leave=0) as hold:  # four rows are left, so that nobody else gets all he waits for
        assert hold.ready
        assert hold.hit == 20 * PAGE
        names = [sim.add(prompt + tokens_of(5, seed=n)) for n, prompt in enumerate([SHARED, SHARED, other])]
        tracked = [scheduler._requests[name] for name in names]
        for one in tracked:
            scheduler._look_up(one)
        assert [patience._queued(one, tracked) for one in tracked] == [20 * PAGE] * 3
        for name in names:
            sim.abort(name)


def test_speeds_are_learned(make_sim):
    sim = make_sim()
    patience = sim.connector.scheduler.patience
    patience.prefill = Speed()
    patience.began(32, 10.0)
    patience.ended(11.0)
    assert patience.prefill.value is None, "a step of a few tokens says nothing"
    patience.began(0, 12.0)
    patience.began(2000, 20.0)
    patience.ended(21.0)
    assert patience.prefill.value == 2000


def test_the_schedulers_thread_makes_no_file_call(make_sim, tmp_path):
    """Lookups, plans and reports of requests that are on disk, of new tenants, and of new prompts."""
    prompts = [tokens_of(6 * PAGE + 1, seed) for seed in range(4)]
    stored(make_sim, tmp_path / "disk", *prompts)
    sim = make_sim(disk=tmp_path / "disk", cpu_pages=8)
    scheduler = sim.connector.scheduler
    calls = _calls()
    counted = [0, 0]
    for name in ("arrived", "matched", "admitted", "plan", "reported", "finished", "take_stats"):
        setattr(scheduler, name, _counting(getattr(scheduler, name), calls, counted))
    for n, prompt in enumerate(prompts):
        sim.serve(prompt)
        sim.serve(prompt, salt=f"tenant {n}")
    assert counted == [0, 0], "read and write calls of this thread"
    assert sim.cache.stats()["disk_reads"] > 0


def _calls():
    path = f"/proc/self/task/{threading.get_native_id()}/io"

    def now() -> np.ndarray:
        with open(path) as file:
            return np.array([int(line.split()[1]) for line in file][2:4])

    own = now()
    return now, now() - own  # what looking itself takes


def _counting(real, calls, counted):
    now, own = calls

    def call(*arguments, **options):
        before = now()
        answer = real(*arguments, **options)
        for at, made in enumerate(now() - before - own):
            counted[at] += int(made)
        return answer

    return call
