"""A24: a request is preempted while its pages are being saved, and its rows are wanted at once by another one."""

import random

import pytest
from sim_engine import SimEngine
from support import PAGE, prompt, settle

from kvstrata.sim_device import SimDevice


def test_rows_under_a_save_are_nobody_elses(open_cache):
    device = SimDevice(seed=5)
    cache = open_cache(gpu=8, cpu=16, device=device)
    engine = SimEngine(cache, device)
    first, second = prompt(7, seed=1), prompt(8, seed=2)
    with cache.lease(first) as lease:
        lease.wait()
        rows = lease.rows.copy()
        fence = engine.write(rows, first, 0, 7)
        lease.publish(3 * PAGE, ready=fence)
        settle(cache)
        device.stall()
        lease.publish(7 * PAGE, ready=fence)  # pages 3 to 6 are being saved from here on
        lease.release(fence)
    full = cache.lease(second)
    assert not full
    assert not full.never
    assert full.available == 1  # the three pages that are saved are above those that are not yet
    one = cache.lease(prompt(1, seed=3))
    assert one
    assert not set(one.rows) & set(rows)
    one.release()
    device.resume()
    settle(cache)
    assert engine.serve(second) == 0
    settle(cache)
    assert engine.serve(first) == 6, "it comes back from the slab, but for the page that is always computed"
    engine.proven()


@pytest.mark.parametrize("seed", range(4))
def test_preempted_and_admitted_again_at_random(open_cache, tmp_path, seed):
    device = SimDevice(seed=seed, delay=3e-4, calm=0.3)
    cache = open_cache(gpu=10, cpu=12, disk=tmp_path / "disk", device=device)
    engine = SimEngine(cache, device)
    dice = random.Random(seed)
    prompts = [prompt(8, seed=number) for number in range(5)]
    for _ in range(200):
        tokens = dice.choice(prompts)
        lease = engine.lease(tokens)
        hit = lease.wait(dice.choice([0.0, None])) // PAGE
        if not lease.lost:
            engine.read(lease.rows, tokens, hit)
            done = dice.randint(hit, 8)  # chunks computed before it is preempted
            lease.publish(done * PAGE, ready=engine.write(lease.rows, tokens, hit, done))
        lease.release(device.mark_batch())
    engine.proven()
    settle(cache)
    cache.check_integrity()
    stats = cache.stats()
    assert stats["gpu"]["free"] + stats["gpu"]["pages"] == 10
    for tokens in prompts:
        engine.serve(tokens)
    engine.proven()
