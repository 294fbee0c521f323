"""The scheduler's role: it owns the core, decides what is loaded and saved, and writes the plan of each step.

It runs on the thread of vLLM's scheduler, so nothing here waits and nothing raises because of the cache. Order that matters:

* A lease is made when a request arrives; what must come from disk moves into the slab while the request waits in the queue. Only
  pages that are in the slab, and proven, are ever promised to vLLM.
* Rows of the slab belong to a copy from the moment the core was asked for it (`load`, `save`) until its ticket is reported by all
  ranks; the lease may go before. Pages that are being saved are found by nobody until then.
* A save reads device blocks after the forward pass of the very step that planned it, before the worker begins another step. So
  whatever vLLM does with the blocks afterwards, it does to blocks that were read.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kvstrata.cache import Lease, PrefixCache
from kvstrata.connect.vllm.adapters import Adapters
from kvstrata.connect.vllm.blocks import BlockLayout
from kvstrata.connect.vllm.events import EventWriter
from kvstrata.connect.vllm.identity import content_of
from kvstrata.connect.vllm.patience import Patience
from kvstrata.connect.vllm.plan import BlockCopy, Plan, Report, SharedSlab
from kvstrata.connect.vllm.requests import Tracked
from kvstrata.connect.vllm.stats import Stats, StatsTaker
from kvstrata.plan import CopyPlan

__all__ = ["Scheduler"]

log = logging.getLogger("kvstrata")


class Scheduler:
    """For one cache in guest mode with a shared slab. `save_generated`: whether pages with generated tokens are kept. `events`:
    learns the names of pages, to tell vLLM what happens to them. `now`: a clock, in seconds."""

    def __init__(
        self,
        cache: PrefixCache,
        blocks: BlockLayout,
        slab: SharedSlab,
        *,
        save_generated: bool = True,
        events: EventWriter | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cache = cache
        self.blocks = blocks
        self.adapters = Adapters()
        self.events = events
        self.patience = Patience(cache)
        self._save_generated = save_generated
        self._stats = StatsTaker(cache.stats)
        self._slab = slab
        self._now = now
        self._requests: dict[str, Tracked] = {}
        self._ahead: dict[str, int] = {}  # pages that requests nobody has asked about yet keep in the slab
        self._copies: dict[int, CopyPlan] = {}  # of the core, not in a plan yet
        self._loads: list[BlockCopy] = []
        self._loading: dict[int, str] = {}  # tickets of loads under way, and for whom
        self._open: set[int] = set()  # tickets that were handed out and not reported by all ranks
        self._reported: dict[int, tuple[int, bool]] = {}  # tickets that some ranks have reported
        self._step = 0
        self._planned_at = 0.0

    # --- a request comes

    def arrived(self, request: Any) -> None:
        """Remembers it, and begins to bring what is cached of it nearer."""
        content = None if request.resumable else content_of(request, self.cache.page_size)  # a session rewrites its tokens
        if content is None:
            return
        limit = None if self._save_generated else request.num_prompt_tokens
        tracked = Tracked(request, content, self.adapters.ask(content.adapter), not request.skip_reading_prefix_cache, limit)
        self._requests[request.request_id] = tracked
        # Half the slab for those in the queue: the other half is for those whose turn it is.
        pages = request.num_tokens // self.cache.page_size
        if tracked.read and tracked.adapter.done and sum(self._ahead.values()) + pages <= self.cache.limits.cpu_pages // 2:
            self._look_up(tracked)
            if tracked.lease is not None and tracked.lease.matched:
                self._ahead[request.request_id] = tracked.lease.matched // self.cache.page_size

    def _look_up(self, tracked: Tracked) -> None:
        if tracked.adapter.value is None and tracked.content.adapter is not None:
            tracked.read = False
            return
        tracked.began_at, tracked.steps = self._now(), self._step
        if self.patience.disk_helps:
            tracked.lease = self._lease(tracked, None, read=True)
        else:
            tracked.lease = self._lease(tracked, None, read=True, load=False)
            self.patience.probe(tracked, lambda: self._lease(tracked, None, read=True), tracked.began_at)
        self._name_pages(tracked)

    def _lease(self, tracked: Tracked, tokens: int | None, *, read: bool, load: bool = True) -> Lease | None:
        tenant, _, media = tracked.content
        try:
            lease = self.cache.lease(
                tracked.tokens(tokens), adapter=tracked.adapter.value, tenant=tenant, media=media, read=read, load=load, leave=0
            )
        except (RuntimeError, ValueError) as error:  # a closed cache, tokens that are none of a vocabulary: computed as without us
            log.warning("request %s is not cached: %s", tracked.request.request_id, error)
            return None
        return lease if isinstance(lease, Lease) else None

    # --- vLLM tries to admit it

    def matched(self, request: Any, local: int) -> int | None:
        """Tokens beyond the `local` ones that vLLM holds, all of them in the slab and proven; None: ask again, it will be known."""
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return 0
        tracked.offered = (local, 0)
        tracked.void = False  # it starts over
        if not tracked.read:
            return 0
        now = self._now()
        if tracked.asked_at is None:
            tracked.asked_at = now
            self._ahead.pop(request.request_id, None)
        if tracked.lease is None:
            if not tracked.adapter.done and now - tracked.asked_at < self.cache.limits.load_deadline:
                return None
            if not tracked.adapter.done:
                return 0
            self._look_up(tracked)
        return self._offer(tracked, local, now)

    def _offer(self, tracked: Tracked, local: int, now: float) -> int | None:
        lease = tracked.lease
        if lease is None:
            return 0
        settled, gain = lease.ready, self._beyond(tracked, lease, local)
        if gain > 0 and not settled:
            assert tracked.asked_at is not None
            if tracked.wait is None:
                tracked.wait = self.patience.seconds(tracked, self._requests.values())
            if now - tracked.asked_at < tracked.wait:
                return None
            lease.wait(0.0)  # at once: what is not there is given up
            gain = self._beyond(tracked, lease, local)
        elif settled:
            self.patience.loaded(tracked, now, self._step)
        tracked.saved = max(lease.hit // self.cache.page_size, 0)
        if gain <= 0:
            tracked.drop_lease()
            return 0
        tracked.offered = (local, gain)
        return gain

    def _beyond(self, tracked: Tracked, lease: Lease, local: int) -> int:
        """What a load would bring. One token is always computed; the last page may serve in part."""
        size = self.blocks.block_size
        most: int = (tracked.request.num_tokens - 1) // size * size
        return min(lease.hit, most) - local

    def admitted(self, request: Any, block_ids: list[int], external: int) -> None:
        """vLLM has blocks for it, and wants `external` tokens loaded into them; 0: it goes on without us."""
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return
        lease = tracked.lease
        if external > 0 and lease is not None:
            local, _ = tracked.offered
            tracked.load = self._sources(lease, external)
            size, per_page = self.blocks.block_size, self.blocks.blocks_per_page
            blocks = np.arange(local // size, (local + external) // size, dtype=np.int32)
            first, last = int(blocks[0]) // per_page, int(blocks[-1]) // per_page
            ticket = lease.load(first, np.arange(first, last + 1, dtype=np.int32))
            copy = self._copy(ticket, request.request_id, blocks, block_ids)
            tracked.read = not copy.lost
            if copy.ticket:
                self._loading[copy.ticket] = request.request_id
            self._loads.append(copy)
        tracked.drop_lease()  # the rows stay until the copy was reported

    def _sources(self, lease: Lease, external: int) -> tuple[int, int]:
        """(from the CPU tier, from disk). Deep pages leave the slab before those above them, so the end of a hit is what was on
        disk."""
        disk = min(lease.sources["disk"], external)
        return external - disk, disk

    def sources(self, request: Any) -> tuple[int, int]:
        """Tokens of the load that was just planned: (from the CPU tier, from disk)."""
        tracked = self._requests.get(request.request_id)
        return (0, 0) if tracked is None else tracked.load

    def _copy(self, ticket: int, request: str, blocks: "np.ndarray[Any, np.dtype[np.int32]]", table: list[int]) -> BlockCopy:
        """The core's copy of pages as one of blocks. `blocks`: which of the request's, ascending; `table`: where it has them."""
        for plan in self.cache.take_copies(0.0):
            self._copies[plan.ticket] = plan
        where = np.asarray(table, np.int32)[blocks]
        found = self._copies.pop(ticket, None)
        per_page = self.blocks.blocks_per_page
        if found is None:
            none = np.empty(0, np.int32)
            return BlockCopy(0, request, none, none, where, lost=True)
        self._open.add(ticket)
        pages = blocks // per_page
        at = np.searchsorted(found.blocks, pages)  # the core was given numbers of pages, and names those it copies
        there = at < len(found.blocks)
        there[there] = found.blocks[at[there]] == pages[there]
        return BlockCopy(ticket, request, found.slab[at[there]], (blocks % per_page)[there], where[there])

    # --- a step

    def plan(self, output: Any) -> Plan:
        """The copies of the step that `output`, a SchedulerOutput, describes."""
        plan = Plan(self._slab, self._loads)
        self._loads = []
        for request_id, count in output.num_scheduled_tokens.items():
            tracked = self._requests.get(request_id)
            if tracked is not None and (save := self._save(tracked, count, output)) is not None:
                plan.saves.append(save)
        self._step += 1
        self.patience.began(output.total_num_scheduled_tokens, now := self._now())
        self.patience.watch(now)
        return plan

    def _save(self, tracked: Tracked, count: int, output: Any) -> BlockCopy | None:
        request = tracked.request
        # Computed when the step has ended, and of tokens that stay: drafts may be rejected, tokens of steps in flight are not known
        # yet.
        known = min(request.num_computed_tokens + count, request.num_tokens)
        pages = min(known, known if tracked.limit is None else tracked.limit) // self.cache.page_size
        if pages <= tracked.saved or tracked.void or not tracked.adapter.done:
            return None
        if tracked.content.adapter is not None and tracked.adapter.value is None:
            return None
        table = output.kv_connector_block_state.get_block_ids(request.request_id)
        lease = self._lease(tracked, pages * self.cache.page_size, read=False)
        if table is None or lease is None:
            return None
        first, tracked.saved = tracked.saved, pages
        self._name_pages(tracked)
        with lease:
            ticket = lease.save(first, np.arange(first, pages, dtype=np.int32), 0)
        if ticket == 0:
            return None
        per_page = self.blocks.blocks_per_page
        return self._copy(ticket, request.request_id, np.arange(first * per_page, pages * per_page, dtype=np.int32), table[0])

    def reported(self, report: Any) -> None:
        """What the ranks say about copies of a step."""
        self.patience.ended(self._now())
        if not isinstance(report, Report):
            return
        for ticket, (ranks, ok) in report.ended.items():
            before, good = self._reported.pop(ticket, (0, True))
            if before + ranks < self.blocks.ranks:
                self._reported[ticket] = (before + ranks, good and ok)
                continue
            self._open.discard(ticket)
            self.cache.copied(ticket, good and ok)
            loaded = self._requests.get(self._loading.pop(ticket, ""))
            if loaded is not None and not (good and ok):
                loaded.read = False  # vLLM asks again, and the same load would fail again, for ever

    def _name_pages(self, tracked: Tracked) -> None:
        tenant, _, media = tracked.content
        if self.events is not None and not media:
            space = self.cache.namespace(tracked.adapter.value, tenant)
            self.events.learn(tracked.request, space, tracked.tokens())

    def take_events(self) -> list[Any]:
        """vLLM's events of its blocks in our tiers, since the last call."""
        return list(self.events.translate(self.cache.drain_events())) if self.events is not None else []

    def take_stats(self) -> Stats | None:
        """What happened since the last look; one a second."""
        return self._stats.take(self._now())

    # --- the end

    def finished(self, request_id: str) -> None:
        """The request is over, however it ended. Copies under way go on."""
        self._ahead.pop(request_id, None)
        tracked = self._requests.pop(request_id, None)
        if tracked is not None:
            tracked.drop_lease()

    def reset(self) -> bool:
        """All that is cached is outdated, in every tier and for every process: the weights were changed in place. Writes to the
        cache
        directory."""
        for tracked in self._requests.values():
            tracked.drop_lease()
            tracked.saved, tracked.void = 0, tracked.request.num_computed_tokens > 0
        self._ahead.clear()
        self.patience.forget_probe()
        try:
            report = self.cache.bump_version()
        except RuntimeError as error:
            log.error("the cache could not be reset: %s", error)
            return False
        log.info("the cache was reset: %s pages on disk and %s in memory are gone", report["pages"], report["cpu"])
        return True

    def close(self) -> None:
        """Writes what is on its way to disk, within the cache's bound, and ends it."""
        for request_id in list(self._requests):
            self.finished(request_id)
        self.patience.forget_probe()
        for ticket in self._open:  # the workers end, too: nobody will report them
            self.cache.copied(ticket, False)
        self.adapters.close()
        self.cache.close()
