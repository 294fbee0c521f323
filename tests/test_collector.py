"""A lease that nobody gave back: the garbage collector finds it, wherever it happens to run."""

import gc

import numpy as np
import pytest
from support import tiny_layout

from kvstrata.cache import Limits, PrefixCache


@pytest.mark.timeout(60)
def test_the_collector_may_release_a_lease_inside_any_call():
    cache = PrefixCache(tiny_layout(), Limits(gpu_pages=8, cpu_pages=8))
    before = gc.get_threshold()
    kept = []
    try:
        for _ in range(20):
            lost: list = [cache.lease(np.arange(20))]
            lost.append(lost)
            del lost
            gc.set_threshold(1)  # from here on the collector runs at almost every new object
            kept.append(cache.stats())
            kept.append(cache._core.state(1))
            kept.append(cache.drain_events())
            lease = cache.lease(np.arange(20))
            kept.append(lease)
            if lease:
                kept += [lease.ready, lease.rows, lease.sources]
                lease.release()
            gc.set_threshold(*before)
    finally:
        gc.set_threshold(*before)
    gc.collect()
    assert cache.stats()["open_leases"] == 0
    cache.check_integrity()
    cache.close()
