"""R10: eviction from the GPU and the flush to RAM and disk need each other's rows; together they must not come to a standstill."""

import random
import threading
import time

import pytest
from support import ByHand, begin, finish, prompt
from unguarded import assert_needed

REQUESTS = 150  # of each thread


def test_tiny_tiers_many_threads(open_cache, tmp_path):
    cache = open_cache(gpu=7, cpu=2, disk=tmp_path / "disk", disk_bytes=1 << 20, load_deadline=1.0)
    documents = [prompt(random.Random(seed).randint(1, 4) + 0.5, seed) for seed in range(12)]
    over = threading.Event()
    flushed, faults = [], []

    def ask(seed):
        rng = random.Random(seed)
        try:
            served = 0
            while served < REQUESTS:
                tokens = rng.choice(documents)
                lease = begin(cache, tokens, timeout=rng.choice([0, 0.01, None]))
                finish(cache, lease, tokens)
                served += 1
        except BaseException as error:
            faults.append(error)

    def flush():
        try:
            while not over.is_set():
                flushed.append(cache.flush(0.05))
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=ask, args=(seed,), daemon=True) for seed in range(6)]
    flusher = threading.Thread(target=flush, daemon=True)
    for thread in [*threads, flusher]:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a thread hangs"
    over.set()
    flusher.join(60)
    assert not flusher.is_alive(), "the flush hangs"
    assert flushed
    assert not faults
    assert cache.flush(20), "the flush never ends"
    stats = cache.stats()
    assert stats["disk_writes"] > 0
    assert stats["gpu"]["evicted"] > 0
    # Nothing is stuck: the whole pool can be had at once, and again.
    for seed in range(3):
        lease = cache.lease(prompt(7, seed=100 + seed), must=True)
        lease.release()
    started = time.monotonic()
    assert cache.close(10)
    assert time.monotonic() - started < 10


def test_every_row_waits_for_the_disk():
    """GPU full of pages being saved, RAM full of pages being written, and a disk that does not answer."""
    hand = ByHand(gpu_rows=4, cpu_rows=4, disk=True, write_deadline=30.0, copy_deadline=30.0, retry_after=5.0)
    old, new = prompt(4, seed=1), prompt(4, seed=2)
    hand.release(hand.publish(old))
    hand.finish_copies()  # two of four: half the slab may wait for the disk
    hand.finish_ops(kind="grow")
    assert [op[1] for op in hand.ops] == ["write"] * 2
    assert hand.where(old) == [(2, 2, 1), (2, 2, 1), (2, 0, 0), (2, 0, 0)]
    lease = hand.publish(new)  # the rest of the old pages goes unsaved: a request does not wait for the flush
    assert hand.where(new) == [(2, 0, 0)] * 4
    assert hand.driver.next_deadline() == 30.0
    hand.now = 31.0
    hand.step()  # the disk is ill by now, but the writes still borrow their rows
    assert hand.stats()["timeouts"] == 2
    hand.release(lease)
    hand.finish_ops()  # late answers after all
    hand.now = 40.0
    hand.step()
    hand.finish_all()
    assert hand.where(new) == [(2, 2, 2)] * 4
    assert hand.driver.idle()


@pytest.mark.guards
def test_what_keeps_it_from_happening():
    """Without one line all rows of the slab could wait for a disk that does not answer, and the tests above see it."""
    assert_needed("half_the_slab", __file__, "test_every_row_waits_for_the_disk")
