"""Which requests compute next, and what they hold of the cache meanwhile.

A request that is not finished is in one place: `waiting` (no lease yet), `loading` (holds a lease whose pages are on their way) or
`running` (first computes the rest of its prompt, chunk by chunk, then one token a step). The lease is released when it ends,
whatever the reason.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvstrata.engine.sequence import Sequence
from kvstrata.engine.speed import Patience
from kvstrata.lease import CacheFull

if TYPE_CHECKING:
    from kvstrata.cache import PrefixCache
    from kvstrata.engine.runner import Runner

ROOM_S = 0.02  # between two tries to find room in a pool that others use as well


@dataclass(frozen=True)
class Batch:
    """What one forward pass computes: the tokens `chunk` of one prompt, or the newest token of several requests."""

    sequences: list[Sequence]
    chunk: range | None = None


class Scheduler:
    """One thread at a time uses it; only `live` may be added to, and read, by others."""

    def __init__(self, cache: PrefixCache, runner: Runner, max_running: int, reuse: bool) -> None:
        self.cache, self.runner, self.max_running, self.reuse = cache, runner, max_running, reuse
        self.patience = Patience(cache)
        self.live: dict[int, Sequence] = {}  # all that are not finished, in the order they came
        self._forwards = 0
        self._published = 0
        self._prefilled = False  # by the latest forward; prefill and decode take turns
        self._full_until = 0.0  # there was no room for who is next: asked again when something was given back, or then

    @property
    def waiting(self) -> list[Sequence]:
        return [sequence for sequence in list(self.live.values()) if sequence.lease is None]

    @property
    def loading(self) -> list[Sequence]:
        return [sequence for sequence in list(self.live.values()) if sequence.lease is not None and not sequence.admitted]

    @property
    def running(self) -> list[Sequence]:
        return [sequence for sequence in list(self.live.values()) if sequence.lease is not None and sequence.admitted]

    def schedule(self) -> Batch | None:
        """What the next forward pass computes; None when all that is left is on its way from a lower tier, or waits for room."""
        for sequence in list(self.live.values()):
            if sequence.cancelled:
                self.finish(sequence, "cancelled")
        while True:
            self._lease()
            self._admit()
            running = self.running
            decoding = [sequence for sequence in running if sequence.output]
            if (decoding and self._prefilled) or len(decoding) == len(running):
                return Batch(decoding) if decoding else None
            # One prompt at a time: first the one that has begun.
            prefilling = min((sequence for sequence in running if not sequence.output), key=lambda sequence: not sequence.begun)
            with self.guard(prefilling):
                if prefilling.begun or self._begin(prefilling):
                    start, chunk = prefilling.computed, self.cache.chunk
                    return Batch([prefilling], range(start, min(start // chunk * chunk + chunk, len(prefilling.prompt))))

    def _lease(self) -> None:
        """Give leases to the queue, in order: who does not fit now keeps his place, and nobody overtakes him."""
        for sequence in self.waiting:
            if len(self.loading) >= self.max_running or time.monotonic() < self._full_until:
                return
            with self.guard(sequence):
                self._take_lease(sequence)
            if sequence.lease is None and not sequence.finished:  # he did not fit, whatever time it is
                return

    def _take_lease(self, sequence: Sequence) -> None:
        request = sequence.request
        lease = self.cache.lease(
            sequence.prompt,
            reserve=request.sampling.max_new_tokens,
            adapter=request.adapter,
            tenant=request.tenant,
            media=sequence.media,
            read=self.reuse,
            write=self.reuse,
            leave=1,
            multiple=self.cache.chunk,
        )
        if isinstance(lease, CacheFull):
            if lease.never:
                raise lease
            self._full_until = time.monotonic() + ROOM_S
            return
        before, sequence.lease = self.loading, lease
        sequence.leased_at = (time.monotonic(), self._forwards, self._published)
        sequence.deadline = sequence.leased_at[0] + self.patience.seconds(sequence, before)

    def _admit(self) -> None:
        """Those whose pages are on the device, or late, may run."""
        room = self.max_running - len(self.running)
        for sequence in self.loading:
            assert sequence.lease is not None
            if room and (sequence.lease.ready or time.monotonic() >= sequence.deadline):
                self.patience.learn(sequence, late=sequence.leased_at[1] != self._forwards)
                sequence.admitted = True
                room -= 1

    def _begin(self, sequence: Sequence) -> bool:
        """Settle how much of the prompt is there. False: it is back in the queue, with its place, and gets another lease."""
        assert sequence.lease is not None
        best = (len(sequence.prompt) - 1) // self.cache.chunk * self.cache.chunk
        # Of several that came together with the same new prompt, the later ones reuse what the first one has published since.
        outdated = self.reuse and sequence.leased_at[2] != self._published and sequence.lease.matched < best
        if not outdated or sequence.renewed:
            sequence.hit = self.runner.wait(sequence.lease)
            if not sequence.lease.lost:
                sequence.computed = sequence.hit  # a multiple of the chunk, since the lease was asked for with that
                sequence.ids = torch.zeros(sequence.limit, dtype=torch.int64, device=self.cache.pool.device)
                sequence.ids[: len(sequence.prompt)] = torch.from_numpy(sequence.prompt)
                sequence.stats.reused_tokens = sequence.lease.sources
                sequence.stats.computed_tokens = len(sequence.prompt) - sequence.computed
                sequence.begun = True
                return True
        sequence.renewed = True
        self.requeue(sequence)
        return False

    def requeue(self, sequence: Sequence) -> None:
        """Back to its place in the queue, where it gets another lease. It has no output yet."""
        assert sequence.lease is not None
        sequence.admitted = sequence.begun = False
        sequence.past = None
        sequence.lease.release()  # behind whatever the pass that failed has submitted
        sequence.lease = None
        self._full_until = 0.0

    def passed(self, batch: Batch, fence: int, seconds: float) -> None:
        """A forward pass of so many seconds has computed the batch: the pages that it completed are findable from now on."""
        self._forwards += 1
        self._prefilled = batch.chunk is not None
        if batch.chunk:
            self.patience.prefill.measured(len(batch.chunk), seconds)
        for sequence in batch.sequences:
            before, sequence.computed = sequence.computed, batch.chunk.stop if batch.chunk else sequence.length
            sequence.fence = fence
            if self.reuse and sequence.lease and sequence.computed // self.cache.page_size > before // self.cache.page_size:
                with self.guard(sequence):
                    sequence.lease.publish(sequence.computed, ready=fence)
                    self._published += 1
                    self._full_until = 0.0  # who is next may share what was published

    # ---- the end of a request ----

    @contextmanager
    def guard(self, sequence: Sequence) -> Iterator[None]:
        """What goes wrong with one request ends that request and nothing else."""
        try:
            yield
        except Exception as error:
            self.fail(sequence, error)

    def fail(self, sequence: Sequence, error: Exception) -> None:
        self.finish(sequence, "error", f"{type(error).__name__}: {error}")

    def finish(self, sequence: Sequence, reason: str, error: str | None = None) -> None:
        if sequence.lease:
            # After an error the pass that failed may have submitted work that no fence covers yet.
            sequence.lease.release(None if reason == "error" else sequence.fence)
            self._full_until = 0.0
        sequence.error, sequence.reason = error, reason
        self.live.pop(sequence.number, None)
        sequence.lease = sequence.past = None  # last: without a lease it would be waiting

    def abort(self) -> None:
        """After an interrupt nobody knows what was half done: all that had begun ends. Waiting ones keep their places."""
        for sequence in list(self.live.values()):
            if sequence.lease is not None:
                self.finish(sequence, "error", "the engine was interrupted")
