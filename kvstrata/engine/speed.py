"""Whether loading a prefix beats computing it again, from speeds measured while serving."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvstrata.engine.sequence import Sequence
from kvstrata.lease import PagesLost
from kvstrata.speed import Speed, worth_loading

if TYPE_CHECKING:
    from kvstrata.cache import PrefixCache


class Patience:
    """How long a request waits for pages on disk: until the deadline when that beats computing them, else not at all."""

    def __init__(self, cache: PrefixCache) -> None:
        self.cache = cache
        self.prefill = Speed()  # tokens per second
        self.disk = Speed()  # bytes per second

    def seconds(self, sequence: Sequence, loading: Iterable[Sequence]) -> float:
        """For a request that has its lease, behind others that are `loading`. What the CPU tier has is on its way in no time."""
        tokens = _on_disk(sequence)
        per_token, queued = self.cache.layout.bytes_per_token, self._queued_before(sequence, loading) if tokens else 0
        worth = tokens and worth_loading(tokens * per_token, queued * per_token, self.disk.value, tokens, self.prefill.value)
        return self.cache.limits.load_deadline if worth else 0.0

    def learn(self, sequence: Sequence, late: bool) -> None:
        """The request stops waiting. `late`: a forward pass ran meanwhile, so that the end was seen late."""
        tokens = _on_disk(sequence)
        if tokens and sequence.lease and sequence.lease.ready:
            size = tokens * self.cache.layout.bytes_per_token
            self.disk.measured(size, time.monotonic() - sequence.leased_at[0], at_least=late)

    def _queued_before(self, sequence: Sequence, loading: Iterable[Sequence]) -> int:
        """Tokens on disk that others wait for and this one does not: pages that they share are read once."""
        seen, queued = self._found_rows(sequence), 0
        for other in loading:
            fresh = np.setdiff1d(self._found_rows(other), seen)
            queued += min(_on_disk(other), len(fresh) * self.cache.page_size)
            seen = np.concatenate((seen, fresh))
        return queued

    def _found_rows(self, sequence: Sequence) -> npt.NDArray[np.int32]:
        try:
            return sequence.lease.rows[: sequence.lease.hit // self.cache.page_size] if sequence.lease else np.empty(0, np.int32)
        except PagesLost:
            return np.empty(0, np.int32)


def _on_disk(sequence: Sequence) -> int:
    return sequence.lease.sources["disk"] if sequence.lease else 0
