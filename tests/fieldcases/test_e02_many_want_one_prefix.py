"""E2: many requests that want one cold prefix share one load of it; whoever has his pages does not wait for them."""

import threading

import pytest
from support import PAGE, ByHand, GatedDevice, begin, finish, prompt, serve, settle, until, wrong

SHARED = prompt(40, seed=2)
EACH = 50


def asked(seed):
    """The shared prefix and a question."""
    return [*SHARED.tolist(), *prompt(0.5, 1000 + seed).tolist()]


@pytest.fixture
def device():
    return GatedDevice()


@pytest.fixture
def cache(open_cache, tmp_path, device):
    """The prefix is on disk, another prompt on the device."""
    first = open_cache(gpu=44, cpu=48, disk=tmp_path / "disk")
    serve(first, SHARED)
    settle(first)
    first.close()
    cache = open_cache(gpu=40 + EACH + 10, cpu=48, disk=tmp_path / "disk", device=device)
    serve(cache, prompt(4, seed=3))
    settle(cache)
    return cache


def together(count, action):
    """Runs action(i) on threads that start at once; what they returned."""
    start, results = threading.Barrier(count), [None] * count

    def run(i):
        start.wait(30)
        results[i] = action(i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def check_and_release(cache, leases):
    for lease in leases:
        assert lease.wait(30) == 40 * PAGE
        assert lease.sources["gpu"] == 0, "on its way is not there"
    rows = {tuple(lease.rows[:40].tolist()) for lease in leases}
    assert len(rows) == 1, "all use the same rows"
    assert not wrong(cache, rows.pop(), SHARED, 40)
    own = [lease.rows[40] for lease in leases]
    assert len(set(own)) == len(leases)
    for lease in leases:
        lease.release()


def test_fifty_at_once_read_each_page_once(cache, device):
    device.ups.clear()  # nothing arrives before all have asked
    leases = together(EACH, lambda i: cache.lease(asked(i), must=True))
    assert not any(lease.ready for lease in leases)
    device.ups.set()
    check_and_release(cache, leases)
    stats = cache.stats()
    assert stats["disk_reads"] == 40
    assert stats["ups"] == 40
    for number in ("looked_up", "loaded"):
        assert stats["cpu"][number] + stats["disk"][number] == EACH * 40


def test_fifty_at_once_with_nothing_held_back(cache):
    """As it comes: some ask before, some while, some after the pages arrive."""
    served = together(EACH, lambda i: ask_and_finish(cache, i))
    assert served == [40 * PAGE] * EACH
    assert cache.stats()["disk_reads"] == 40
    assert cache.stats()["ups"] == 40


def ask_and_finish(cache, i):
    tokens = asked(i)
    lease = begin(cache, tokens)
    return finish(cache, lease, tokens).hit


def test_who_has_his_pages_does_not_wait(cache, device):
    device.ups.clear()
    leases = [cache.lease(asked(i), must=True) for i in range(EACH)]
    until(lambda: any(copy.up for copy in device.started), "the copies to begin")
    near = cache.lease(prompt(4, seed=3), must=True)
    assert near.ready, "at once, while fifty wait"
    assert near.wait(0) == near.sources["gpu"] == 3 * PAGE
    near.release()
    fresh = cache.lease(prompt(2, seed=4), must=True)
    assert fresh.ready
    fresh.release()
    device.ups.set()
    check_and_release(cache, leases)


def test_one_gives_up_and_the_others_do_not(cache, device):
    device.ups.clear()
    leases = [cache.lease(asked(i), must=True) for i in range(10)]
    for lease in leases[:5]:
        lease.cancel()
    device.ups.set()
    check_and_release(cache, leases[5:])
    assert cache.stats()["disk_reads"] == 40


def test_the_driver_starts_one_move_per_page():
    hand = ByHand(gpu_rows=100, cpu_rows=48, disk=True)
    hand.release(hand.publish(SHARED))
    hand.finish_all()
    for seed in range(3):
        hand.release(hand.publish(prompt(48, 50 + seed)))
        hand.finish_all()
    assert hand.where(SHARED) == [(0, 0, 2)] * 40
    reads, writes = hand.stats()["disk_reads"], hand.stats()["disk_writes"]
    leases = []
    for seed in range(EACH):
        leases.append(hand.lease(asked(seed)))
        if seed % 10 == 5:  # and they come while the load goes on
            hand.finish_ops()
        if seed % 10 == 9:
            hand.finish_copies()
    hand.finish_all()
    assert [hand.hit(lease) for lease in leases] == [40] * EACH
    assert hand.stats()["disk_reads"] == reads + 40
    assert hand.stats()["ups"] == 40
    assert hand.stats()["disk_writes"] == writes
    for lease in leases:
        hand.release(lease)
