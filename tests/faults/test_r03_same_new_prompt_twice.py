"""R3: two requests in flight with the same new prompt: each page is saved once, with the bytes of whoever published it first."""

import threading

import pytest
from support import PAGE, POISON, begin, crowd, device_row, fill, finish, prompt, serve, settle, wrong
from unguarded import assert_needed


@pytest.mark.parametrize("slower", [0, 2, 6])
def test_the_first_writer_wins_in_every_tier(open_cache, tmp_path, slower):
    """One has published everything when the other, in the same batch of requests, has computed only `slower` pages."""
    cache = open_cache(gpu=14, cpu=20, disk=tmp_path / "disk")
    tokens = prompt(6, seed=3)
    one, two = begin(cache, tokens), begin(cache, tokens)
    assert one.hit == two.hit == 0
    assert not set(one.rows.tolist()) & set(two.rows.tolist())
    fill(cache, two.rows, tokens, 0, slower)
    two.publish(slower * PAGE, ready=cache.pool.mark_batch())
    fill(cache, one.rows, tokens, 0, 6)
    one.publish(len(tokens), ready=cache.pool.mark_batch())
    # What the second one computes later must not change what is findable: let it differ visibly.
    for page in range(slower, 6):
        device_row(cache, two.rows[page])[:] = POISON
    two.publish(len(tokens), ready=cache.pool.mark_batch())
    two.release()
    settle(cache)
    assert not wrong(cache, one.rows, tokens, 6)
    one.release()
    stats = cache.stats()
    assert stats["duplicates"] == 6
    assert [stats[tier]["stored"] for tier in ("gpu", "cpu", "disk")] == [6, 6, 6]
    assert stats["disk_writes"] == stats["downs"] == 6
    assert begin_and_end(cache, tokens) == 96
    crowd(cache)
    assert serve(cache, tokens).cpu == 80
    cache.close()

    cache = open_cache(gpu=8, cpu=8, disk=tmp_path / "disk")
    assert serve(cache, tokens).disk == 80


def begin_and_end(cache, tokens):
    with begin(cache, tokens, leave=0) as lease:
        return lease.hit


def test_many_threads_with_one_prompt(open_cache, tmp_path):
    cache = open_cache(gpu=80, cpu=40, disk=tmp_path / "disk")
    documents = [prompt(8, seed) for seed in range(3)]
    start = threading.Barrier(6)
    faults = []

    def ask():
        try:
            for tokens in documents:
                start.wait(30)
                lease = begin(cache, tokens)
                for page in range(lease.hit // PAGE, 8):  # chunk by chunk, as a prefill goes
                    fill(cache, lease.rows, tokens, page, page + 1)
                    lease.publish((page + 1) * PAGE, ready=cache.pool.mark_batch())
                finish(cache, lease, tokens)
        except BaseException as error:
            faults.append(error)
            start.abort()

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not faults
    settle(cache)
    assert cache.stats()["disk_writes"] == 24
    cache.close()
    cache = open_cache(gpu=8, cpu=8, disk=tmp_path / "disk")
    for tokens in documents:
        assert serve(cache, tokens).disk == 112
        settle(cache)


@pytest.mark.guards
def test_what_keeps_it_from_happening():
    """Without one line the second writer would take the page over, and the tests above see it."""
    assert_needed("first_writer", __file__, "test_the_first_writer_wins_in_every_tier")
