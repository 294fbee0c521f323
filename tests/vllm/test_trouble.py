"""Damaged pages, missing files, full and stalled disks, failing copies: computed again, with the right states, and no request
fails."""

import logging
import shutil

import pytest
from file_systems import MIB, bad_sectors, ext4, fill_up, tmpfs
from support import find_on_disk, flip, until
from vllm_sim import PAGE, Clock, tokens_of

from kvstrata.connect.vllm.copier import HostCopier

PROMPT = tokens_of(6 * PAGE + 1)
# vLLM's default fails a request whose promised load does not come. Nothing unproven is promised, so both must serve alike.
both_policies = pytest.mark.parametrize("policy", ["recompute", None])


def stored(make_sim, disk):
    """The prompt's six pages are in a directory that nobody has open; a function that finds page n of it: (file, offset)."""
    sim = make_sim(disk=disk)
    name = sim.add(PROMPT)
    sim.run()
    sim.settle()
    places = [find_on_disk(disk, sim.page_bytes(name, page))[0] for page in range(6)]
    sim.connector.shutdown()
    return places


@both_policies
@pytest.mark.parametrize("page", [0, 3, 5])
def test_a_damaged_page(make_sim, tmp_path, page, policy):
    places = stored(make_sim, tmp_path / "disk")
    flip(places[page][0], places[page][1] + 100)
    sim = make_sim(disk=tmp_path / "disk", policy=policy)
    assert sim.serve(PROMPT) == (0, page * PAGE)
    assert sim.cache.stats()["corrupt"] == 1
    sim.settle()
    sim.scheduler.reset_prefix_cache()
    assert sim.serve(PROMPT) == (0, 6 * PAGE), "it was saved anew"


@both_policies
def test_a_missing_shelf(make_sim, tmp_path, policy):
    stored(make_sim, tmp_path / "disk")
    sim = make_sim(disk=tmp_path / "disk", policy=policy)
    for shelf in (tmp_path / "disk" / "shelves").iterdir():
        shutil.rmtree(shelf)
    assert sum(sim.serve(PROMPT)) in (0, 6 * PAGE), "files that are open can still be read"
    other = tokens_of(6 * PAGE + 1, seed=1)
    assert sim.serve(other) == (0, 0)
    sim.scheduler.reset_prefix_cache()
    assert sim.serve(other) == (0, 6 * PAGE)


@both_policies
def test_unreadable_sectors(make_sim, tmp_path, policy):
    with ext4(tmp_path / "bad", 64 * MIB) as root:
        places = stored(make_sim, root / "disk")
        sim = make_sim(disk=root / "disk", policy=policy)
        with bad_sectors(tmp_path / "bad", {path for path, _ in places}):
            local, external = sim.serve(PROMPT)
        assert local == 0
        assert external < 6 * PAGE
        assert sim.cache.stats()["unreadable"] + sim.cache.stats()["corrupt"] > 0
        sim.connector.shutdown()


@both_policies
def test_a_full_disk(make_sim, tmp_path, policy):
    with tmpfs(tmp_path / "full", 16 * MIB) as root:
        sim = make_sim(disk=root / "disk", policy=policy, cpu_pages=16)
        filler = fill_up(root)
        for seed in range(5):
            assert sim.serve(tokens_of(6 * PAGE + 1, seed)) == (0, 0)
            sim.settle()
        assert sim.cache.stats()["spills_dropped"] > 0
        sim.scheduler.reset_prefix_cache()
        assert sim.serve(tokens_of(6 * PAGE + 1, seed=4)) == (0, 6 * PAGE), "the CPU tier works without it"
        filler.unlink()
        sim.connector.shutdown()


@pytest.fixture
def held(make_sim, tmp_path):
    """(sim, clock, a lease): half the rows of the slab are held, so that not all pages can come from disk: as when reads stall."""
    stored(make_sim, tmp_path / "disk")
    sim = make_sim(disk=tmp_path / "disk", cpu_pages=8, settings={"kvc2.load_deadline_s": 600})
    sim.connector.scheduler._now = clock = Clock()
    other = tokens_of(4 * PAGE, seed=7)
    sim.serve(other)
    sim.settle()
    lease = sim.cache.lease(other, leave=0)
    assert lease.matched == 4 * PAGE
    yield sim, clock, lease
    lease.release()


def test_pages_that_do_not_come(held):
    """The request waits, others are served meanwhile; then it computes what did not come, and its late pages harm nobody."""
    sim, clock, lease = held
    name = sim.add(PROMPT)
    for _ in range(10):
        sim.step()
    assert name not in sim.cached, "it waits for pages that are on their way"
    other = sim.add(tokens_of(40, seed=8), new=3)
    sim.run_until(lambda: other in sim.finished, "nobody else waits")
    assert name not in sim.cached
    until(lambda: sim.cache.stats()["disk_reads"] == 4, "the pages that there is room for")
    clock.now += 600
    sim.run()
    assert sim.cached[name] == (0, 4 * PAGE), "what came in time is used"
    lease.release()
    sim.settle()
    assert sim.serve(PROMPT + tokens_of(50, seed=9)) == (6 * PAGE, 0)


def test_a_slab_that_is_full_for_a_moment(held):
    """The request waits for room and loses nothing of its hit."""
    sim, clock, lease = held
    name = sim.add(PROMPT)
    for _ in range(10):
        sim.step()
    assert name not in sim.cached
    clock.now += 599
    lease.release()
    sim.run()
    assert sim.cached[name] == (0, 6 * PAGE)


def failing(monkeypatch, which):
    """Copies for which `which(copy, up)` raise an OSError."""
    real = HostCopier.copy

    def copy(self, what, up):
        if which(what, up):
            raise OSError("a failed copy")
        real(self, what, up)

    monkeypatch.setattr(HostCopier, "copy", copy)


def test_a_failing_load_is_computed_again(make_sim, monkeypatch):
    sim = make_sim(policy="recompute")
    sim.serve(PROMPT)
    sim.scheduler.reset_prefix_cache()
    failing(monkeypatch, lambda what, up: up)
    assert sum(sim.serve(PROMPT)) == 0
    monkeypatch.undo()
    sim.scheduler.reset_prefix_cache()
    assert sim.serve(PROMPT) == (0, 6 * PAGE), "the pages were not to blame"
    assert sim.cache.stats()["copy_failures"] == 1


def test_a_failing_load_under_vllms_default_fails_one_request(make_sim, monkeypatch):
    """What `kv_load_failure_policy: recompute` is for; the engine lives on."""
    sim = make_sim(policy=None)
    sim.serve(PROMPT)
    sim.scheduler.reset_prefix_cache()
    failing(monkeypatch, lambda what, up: up)
    name = sim.add(PROMPT)
    sim.run()
    assert sim.finished[name] == "error"
    monkeypatch.undo()
    assert sim.serve(PROMPT) == (0, 6 * PAGE)


def test_d05_one_failing_save(make_sim, monkeypatch, caplog):
    """D5. One page cannot be saved: it is counted, its row is free again, and those that come after are saved."""
    caplog.set_level(logging.ERROR, "kvstrata")
    sim = make_sim(cpu_pages=16, budget=PAGE)
    times = iter(range(100))
    failing(monkeypatch, lambda what, up: not up and next(times) == 2)
    assert sim.serve(PROMPT) == (0, 0)
    stats = sim.cache.stats()
    assert stats["copy_failures"] == 1
    assert stats["cpu"]["free"] == 16 - 5
    sim.scheduler.reset_prefix_cache()
    assert sim.serve(PROMPT) == (0, 2 * PAGE)
    sim.scheduler.reset_prefix_cache()
    assert sim.serve(PROMPT) == (0, 6 * PAGE)
    assert "could not copy" in caplog.text


def test_rows_that_cannot_be_had_after_all(make_sim):
    """The cache is closed between the promise and the copy: a failed load, not a crash."""
    sim = make_sim()
    sim.serve(PROMPT)
    sim.scheduler.reset_prefix_cache()
    name = sim.add(PROMPT)
    real = sim.connector.scheduler.admitted

    def admitted(request, block_ids, external):
        if external:
            sim.connector.scheduler._requests[name].lease.release()
        real(request, block_ids, external)

    sim.connector.scheduler.admitted = admitted
    sim.run()
    assert sim.finished[name] == "length"
    assert sim.cached[name] == (0, 0)
