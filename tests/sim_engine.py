"""What an engine does to a cache on a SimDevice: everything it reads or writes goes through the compute queue, as kernels."""

import time
from typing import Any

from support import fill, wrong

from kvstrata.cache import CacheFull, Lease, PrefixCache
from kvstrata.sim_device import SimDevice


class SimEngine:
    """`wrong`: what kernels read and should not have, page by page."""

    def __init__(self, cache: PrefixCache, device: SimDevice) -> None:
        self.cache = cache
        self.device = device
        self.wrong: list[str] = []

    def lease(self, tokens: Any, **options: Any) -> Lease:
        """Asks again until moves and other requests leave room. The rows that the lease will surely write are poisoned at once:
        who still reads or writes them is caught."""
        end = time.monotonic() + 120
        while isinstance(lease := self.cache.lease(tokens, **options), CacheFull):
            assert not lease.never
            assert time.monotonic() < end, "the pool stays full"
            self.device.synchronize()
            self.cache.flush(0.01)
        rows = self.cache._core.rows(lease._id)
        self.device.poison(rows[lease.matched // self.cache.page_size :])
        return lease

    def write(self, rows: Any, tokens: Any, first: int, last: int) -> int:
        """Computes pages [first, last); the fence of the batch."""
        self.device.compute(lambda: fill(self.cache, rows, tokens, first, last))
        return self.device.mark_batch()

    def read(self, rows: Any, tokens: Any, pages: int) -> int:
        """Attends to the first pages; the fence of the batch."""

        def kernel() -> None:
            bad = wrong(self.cache, rows, tokens, pages)
            if bad:
                self.wrong.append(f"pages {bad} of {pages} in rows {[int(rows[page]) for page in bad]}")

        self.device.compute(kernel)
        return self.device.mark_batch()

    def serve(self, tokens: Any, timeout: float | None = None, **options: Any) -> int:
        """A request from lookup to release; the pages of its hit."""
        lease = self.lease(tokens, **options)
        hit = lease.wait(timeout) // self.cache.page_size
        while lease.lost:
            lease.release()
            lease = self.lease(tokens, **options)
            hit = lease.wait(timeout) // self.cache.page_size
        rows, pages = lease.rows, len(tokens) // self.cache.page_size
        self.read(rows, tokens, hit)
        lease.publish(len(tokens), ready=self.write(rows, tokens, hit, pages))
        lease.release(self.read(rows, tokens, pages))
        return hit

    def proven(self) -> None:
        """Everything submitted has run, and nothing read was wrong."""
        assert self.device.synchronize(60)
        assert not self.wrong, self.wrong[:3]
