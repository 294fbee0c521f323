"""A small engine that owns its device memory (guest mode), for processes that start in a moment: without torch.

Every page it is given is compared with its fingerprint; every page it computes gets one.
"""

import threading
from typing import NamedTuple

import numpy as np
from pages import fingerprint, tiny_identity, tiny_layout

from kvstrata._core import copy_rows
from kvstrata.cache import Limits, PrefixCache
from kvstrata.layout import PageLayout


class Answer(NamedTuple):
    """Pages of a request: found, of those wrong, saved."""

    hit: int
    wrong: int
    saved: int


class Guest:
    """One cache, one pool of `blocks` blocks, one thread for copies. Requests come one at a time."""

    def __init__(
        self,
        root: str,
        cap: int,
        *,
        cpu: int = 32,
        blocks: int = 16,
        layout: PageLayout | None = None,
        poison: bool = True,
        **limits: float,
    ) -> None:
        self.layout = layout or tiny_layout()
        self.cache = PrefixCache(
            self.layout,
            Limits(0, cpu, root, cap, **limits),  # type: ignore[arg-type]
            identity=tiny_identity(self.layout),
            poison=poison,
        )
        self.pool = np.zeros((blocks, self.layout.row_stride), np.uint8)
        self.loaded = 0  # pages that were copied into the pool
        self._core = self.cache._core
        self._mover = threading.Thread(target=self._copy, daemon=True)
        self._mover.start()

    def serve(self, tokens: np.ndarray) -> Answer:
        """Looks up, loads and compares what is cached, computes and saves the rest; at most as many pages as there are blocks."""
        size, space = self.layout.page_size, self.cache.namespace()
        pages = min(len(tokens) // size, len(self.pool))
        blocks = np.arange(pages, dtype=np.int32)
        with self.cache.lease(tokens, leave=0, must=True) as lease:
            hit = min(lease.wait() // size, pages)
            self.pool[:] = 0xEE
            lease.wait_copy(lease.load(0, blocks[:hit]))
            wrong = sum(not np.array_equal(self._row(page), self._right(space, tokens, page)) for page in range(hit))
            for page in range(hit, pages):
                self._row(page)[:] = self._right(space, tokens, page)
            ticket = lease.save(hit, blocks[hit:], 0) if hit < pages else 0
            lease.wait_copy(ticket)
        return Answer(hit, wrong, pages - hit if ticket else 0)

    def close(self) -> bool:
        ended = self.cache.close()
        self._mover.join(10)
        return ended

    def _row(self, block: int) -> np.ndarray:
        row: np.ndarray = self.pool[block, : self.layout.row_bytes]
        return row

    def _right(self, space: bytes, tokens: np.ndarray, page: int) -> np.ndarray:
        return fingerprint(self.layout, space, tokens[: (page + 1) * self.layout.page_size])

    def _copy(self) -> None:
        address, _, stride, _ = self._core.slab()
        there, here = (self.pool.ctypes.data, self.pool.strides[0]), (address, stride)
        while batches := self._core.take_copies(float("inf")):
            for ticket, up, slab, device, _ in batches:
                target, source = ((*there, device), (*here, slab)) if up else ((*here, slab), (*there, device))
                copy_rows(*target, *source, 0, self.layout.row_bytes)
                self.loaded += len(device) if up else 0
                self._core.copied(ticket, True)
