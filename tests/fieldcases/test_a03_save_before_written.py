"""A3: a page is saved as soon as it is published, long before the kernels that compute it have run."""

import random

import pytest
from sim_engine import SimEngine
from support import PAGE, POISON, device_row, prompt, settle

from kvstrata.sim_device import SimDevice


@pytest.mark.parametrize("disk", [False, True])
def test_what_comes_back_is_what_the_kernels_wrote_last(open_cache, tmp_path, disk):
    """1,000 random delays in all: per page two kernels, a wrong value first, and its save asked for at once."""
    device = SimDevice(seed=3, delay=5e-4, calm=0.2)
    cache = open_cache(gpu=12, cpu=24, disk=tmp_path / "disk" if disk else "", device=device)
    engine = SimEngine(cache, device)
    dice = random.Random(3)
    written: list = []
    came_back = 0
    for number in range(250):
        tokens = prompt(2, seed=1000 + number)
        with engine.lease(tokens) as lease:
            rows = lease.rows
            for page in range(2):
                device.compute(lambda row=rows[page]: device_row(cache, row).fill(POISON))
                fence = engine.write(rows, tokens, page, page + 1)
                assert lease.publish((page + 1) * PAGE, ready=fence) == (page + 1) * PAGE
            lease.release(fence)
        written.append(tokens)
        if number % 3 == 2:  # pages that were pushed out of the device since, none of them before it was saved
            settle(cache)
            came_back += engine.serve(dice.choice(written[-8:-3] or written), leave=0)
    engine.proven()
    settle(cache)
    assert came_back > 100
    stats = cache.stats()
    assert stats["ups"] > 50
    assert stats["downs"] >= 500
    assert stats["saves_dropped"] == 0


def test_a_save_without_a_fence_is_refused(open_cache):
    device = SimDevice(seed=4)
    cache = open_cache(gpu=4, cpu=4, device=device)
    with cache.lease(prompt(2)) as lease:
        lease.wait()
        for missing in ({}, {"ready": 1}, {"ready": 7}):
            with pytest.raises(ValueError, match="ready="):
                lease.publish(2 * PAGE, **missing)
    settle(cache)
    stats = cache.stats()
    assert stats["gpu"]["pages"] == stats["cpu"]["pages"] == stats["downs"] == 0
