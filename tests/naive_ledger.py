"""A ledger that is slow and plain: the first third of the naive model (naive_model.py). Which page is where, and which goes first.

Nothing is counted ahead here. Who uses a page, whether a move reads it, which page may go and which goes first is found by looking
at all pages, leases and moves, every time. Rows have no numbers, only how many are free; the test compares the driver's numbers
itself.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from kvstrata._core import page_key

NONE, INCOMING, RESIDENT = 0, 1, 2
GPU, CPU, DISK = "gpu", "cpu", "disk"
TIERS = (GPU, CPU, DISK)
COUNTERS = (
    "leases full missed_pages key_conflicts corrupt unreadable stale timeouts copy_failures saves_dropped spills_dropped "
    "duplicates late_completions disk_reads disk_writes ups downs"
).split()
TIER_COUNTERS = "looked_up loaded used stored evicted failures".split()


@dataclass(eq=False)
class Page:
    parent: "Page | None"  # None: the root of a namespace
    key: bytes
    depth: int = 0
    children: "dict[tuple[int, ...], Page]" = field(default_factory=dict)
    state: dict[str, int] = field(default_factory=lambda: {GPU: NONE, CPU: NONE})
    stamp: dict[str, int] = field(default_factory=lambda: {GPU: 0, CPU: 0})
    entry: "Entry | None" = None
    waiters: "list[Lease]" = field(default_factory=list)
    ready: int = 0  # the batch that wrote it
    load_queued: bool = False
    uploading: bool = False

    def chain(self) -> "Iterator[Page]":
        """The page and what lies above it, without the root."""
        page = self
        while page.parent is not None:
            yield page
            page = page.parent


@dataclass(eq=False)
class Entry:
    """A page on disk."""

    key: bytes
    slot: tuple[int, int]
    parent: "Entry | None"
    page: Page | None = None
    writing: bool = False
    contested: bool = False  # another content has its key
    foreign: bool = False  # in another process's slot
    gone: bool = False  # which holds something else by now; a move still uses the entry
    retry_at: float = 0
    stamp: int = 0


@dataclass(eq=False)
class Lease:
    id: int
    root: Page
    tokens: list[int]
    multiple: int
    write: bool
    path: list[Page] = field(default_factory=list)
    own: list[bool | None] = field(default_factory=list)  # of each row: the lease's alone; None: it lost the row
    source: list[str] = field(default_factory=list)
    deepest: dict[str, int] = field(default_factory=dict)  # pages up to the last with a copy in the tier, as found
    matched: int = 0
    hit: int = 0
    settled: bool = False
    lost: bool = False
    used: bool = False


@dataclass(eq=False)
class DiskMove:
    kind: str
    deadline: float
    slot: tuple[int, int] = (0, 0)
    page: Page | None = None
    entry: Entry | None = None
    abandoned: bool = False


@dataclass(eq=False)
class CopyMove:
    up: bool
    pages: list[Page]
    fence: int
    deadline: float
    abandoned: bool = False


@dataclass(frozen=True)
class Sizes:
    page_size: int
    gpu_rows: int
    cpu_rows: int
    disk: bool
    copy_rows: int
    reads_at_once: int
    writes_at_once: int
    read_deadline: float
    write_deadline: float
    copy_deadline: float
    retry_after: float


class NaiveLedger:
    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.now = 0.0
        self.ticks = 0
        self.roots: dict[bytes, Page] = {}
        self.entries: dict[bytes, Entry] = {}
        self.slots: list[tuple[int, int]] = []
        self.retired: set[int] = set()  # segments that are gone
        self.free = {GPU: sizes.gpu_rows, CPU: sizes.cpu_rows}
        self.leases: dict[int, Lease] = {}
        self.asking: list[Page] = []  # the path of a lease that is being made
        self.loads: list[tuple[Page, float]] = []  # and since when it waits
        self.ups: list[Page] = []
        self.downs: list[Page] = []
        self.spills: list[Page] = []
        self.disk_moves: dict[int, DiskMove] = {}
        self.copies: dict[int, CopyMove] = {}
        self.next_id = 1
        self.released = 0
        self.grow_again_at = self.writes_again_at = self.disk_back_at = 0.0
        self.timeouts_in_a_row = 0
        self.load_without_row = False
        self.count = dict.fromkeys(COUNTERS, 0)
        self.tier_count = {tier: dict.fromkeys(TIER_COUNTERS, 0) for tier in TIERS}
        self.events: list[tuple[str, str, str, int, bytes]] = []
        self.ops: list[tuple[int, DiskMove]] = []
        self.started: list[tuple[int, CopyMove]] = []

    def new_id(self) -> int:
        self.next_id += 1
        return self.next_id - 1

    # --- what is where

    def pages(self, above: Page | None = None) -> Iterator[Page]:
        for page in list(self.roots.values()) if above is None else list(above.children.values()):
            yield from self.pages(page)
            if page.parent is not None:
                yield page

    def known(self, page: Page) -> bool:
        return page in self.pages()

    def forget_unneeded(self) -> None:
        """A record lives as long as something needs it: a copy, a page below, a lease, a move."""
        for page in self.pages():
            needed = page.children or page.entry or page.load_queued or any(page.state.values()) or self.on_a_path(page)
            if not needed and not any(self.held(page, tier) for tier in (GPU, CPU)):
                assert page.parent is not None
                page.parent.children = {content: other for content, other in page.parent.children.items() if other is not page}

    def readable(self, entry: Entry) -> bool:
        return not self.lost(entry) and not entry.writing and entry.retry_at <= self.now and self.disk_back_at <= self.now

    def lost(self, entry: Entry) -> bool:
        return entry.gone or entry.slot[0] in self.retired

    def findable(self, page: Page) -> bool:
        return RESIDENT in page.state.values() or (page.entry is not None and self.readable(page.entry))

    def held(self, page: Page, tier: str) -> bool:
        """A move reads this copy, or will."""
        if any(page in copy.pages for copy in self.copies.values() if copy.up == (tier == CPU)):
            return True
        if tier == GPU:
            return False
        late_reads = [move.page for move in self.disk_moves.values() if move.kind == "read" and move.abandoned]
        writes = [move.page for move in self.disk_moves.values() if move.kind == "write"]
        return page in self.ups or page in self.spills or page in late_reads or page in writes

    def on_a_path(self, page: Page) -> bool:
        return page in self.asking or any(page in lease.path for lease in self.leases.values())

    def may_go(self, page: Page, tier: str) -> bool:
        if page.state[tier] != RESIDENT or self.held(page, tier) or (tier == GPU and self.on_a_path(page)):
            return False
        return all(child.state[tier] == NONE for child in page.children.values())

    def evictable(self) -> int:
        """Pages of the device that could go one after the other, leaf first."""
        gone: list[Page] = []
        while True:
            leaf = next(
                (
                    page
                    for page in self.pages()
                    if page not in gone
                    and page.state[GPU] == RESIDENT
                    and not self.held(page, GPU)
                    and not self.on_a_path(page)
                    and all(child.state[GPU] == NONE or child in gone for child in page.children.values())
                ),
                None,
            )
            if leaf is None:
                return len(gone)
            gone.append(leaf)

    # --- least recently used: a use of a page is a use of what lies above it, as far as the tier has it without a gap

    def touch(self, page: Page, tier: str) -> None:
        self.ticks += 1
        for one in page.chain():
            if one.state[tier] != RESIDENT:
                return
            one.stamp[tier] = self.ticks

    def touch_entry(self, entry: Entry | None) -> None:
        self.ticks += 1
        while entry is not None:
            entry.stamp = self.ticks  # another's matters to nobody
            entry = entry.parent

    def take_row(self, tier: str) -> bool:
        if self.free[tier] == 0:
            leaves = [page for page in self.pages() if self.may_go(page, tier)]
            if not leaves:
                return False
            victim = min(leaves, key=lambda page: page.stamp[tier])
            victim.state[tier] = NONE
            self.free[tier] += 1
            self.tier_count[tier]["evicted"] += 1
            self.events.append(("removed", tier, tier, victim.depth, victim.key))
        self.free[tier] -= 1
        return True

    def arrive(self, page: Page, tier: str, source: str) -> None:
        page.state[tier] = RESIDENT
        self.touch(page, tier)
        self.tier_count[tier]["stored"] += 1
        self.events.append(("stored", tier, source, page.depth, page.key))

    def withdraw(self, page: Page, tier: str) -> None:
        page.state[tier] = NONE
        self.free[tier] += 1

    # --- pages on disk

    def add_entry(self, key: bytes, parent: bytes, slot: tuple[int, int], page: Page | None) -> Entry:
        entry = Entry(key, slot, self.entries.get(parent), page, writing=page is not None)
        self.entries[key] = entry
        if page is not None:
            page.entry = entry
        self.touch_entry(entry)
        return entry

    def attach(self, page: Page, entry: Entry) -> None:
        page.entry, entry.page = entry, page
        if page.parent is not None and page.parent.entry is not None and entry.parent is None:
            entry.parent = page.parent.entry  # which was written later

    def forget_entry(self, entry: Entry, why: str) -> tuple[int, int]:
        if not entry.writing:
            self.events.append((why, DISK, DISK, entry.page.depth if entry.page else 0, entry.key))
        if entry.page is not None:
            entry.page.entry = None
        del self.entries[entry.key]
        for other in self.entries.values():
            if other.parent is entry:
                other.parent = entry.parent
        return entry.slot

    def add_slot(self, slot: tuple[int, int]) -> None:
        if slot[0] not in self.retired:
            self.slots.append(slot)

    def retire_segment(self, segment: int) -> None:
        self.retired.add(segment)
        self.slots = [slot for slot in self.slots if slot[0] != segment]
        for entry in sorted(self.entries.values(), key=lambda entry: entry.slot):
            self.forget_retired(entry)

    def forget_retired(self, entry: Entry) -> None:
        """Unless a move uses it: then when that ends."""
        reading = any(move.kind == "read" and move.entry is entry for move in self.disk_moves.values())
        if self.lost(entry) and not entry.writing and not reading:
            self.forget_entry(entry, "removed")

    # --- pages in other processes' slots

    def add_shared(self, key: bytes, parent: bytes, slot: tuple[int, int]) -> None:
        known = self.entries.get(key)
        if slot[0] in self.retired or (known is not None and not self.lost(known)):
            return
        if known is None:
            self.entries[key] = Entry(key, slot, self.entries.get(parent), foreign=True)
            self.events.append(("stored", DISK, DISK, 0, key))

    def slot_gone(self, slot: tuple[int, int]) -> None:
        for entry in list(self.entries.values()):
            if entry.slot == slot and entry.foreign and not entry.gone:
                entry.gone = True
                self.forget_retired(entry)

    def own_below(self, entry: Entry) -> bool:
        return any(not other.foreign or self.own_below(other) for other in self.entries.values() if other.parent is entry)

    def entries_to_evict(self) -> list[Entry]:
        reading = [move.entry for move in self.disk_moves.values() if move.kind == "read"]
        ours = [entry for entry in self.entries.values() if not entry.foreign and not entry.writing]
        return [entry for entry in ours if entry not in reading and not self.own_below(entry)]

    def take_slot(self) -> tuple[int, int] | None:
        if self.slots:
            return self.slots.pop()
        leaves = self.entries_to_evict()
        if not leaves:
            return None
        self.tier_count[DISK]["evicted"] += 1
        return self.forget_entry(min(leaves, key=lambda entry: entry.stamp), "removed")

    # --- contents

    def child(self, above: Page, content: tuple[int, ...], root: Page) -> Page:
        if content not in above.children:
            key = page_key(root.key, above.key, np.array(content, np.int32))
            above.children[content] = Page(above, key, above.depth + 1)
        return above.children[content]

    def contents(self, tokens: list[int]) -> list[tuple[int, ...]]:
        size = self.sizes.page_size
        return [tuple(tokens[at : at + size]) for at in range(0, len(tokens) - size + 1, size)]
