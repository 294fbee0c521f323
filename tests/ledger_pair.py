"""The core's driver and the naive model, told the same and compared after every step: see test_ledger_model.py."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from naive_ledger import COUNTERS, CPU, GPU, NONE, TIER_COUNTERS, TIERS, Page, Sizes
from naive_model import NaiveCache

from kvstrata._core import Driver, page_key

Slots = list[tuple[int, int]]
UNKNOWN = 999_999  # neither a lease nor a move


def array(values: list[int]) -> np.ndarray:
    return np.array(values, np.int32)


class LedgerPair:
    """`finished`, `given_back`: moves and leases that ended; reporting them again must change nothing."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.model = NaiveCache(sizes)
        self.driver = Driver(events=100_000, **vars(sizes))
        self.finished: list[int] = []
        self.given_back: list[int] = []
        self.row_of: dict[Page, int] = {}  # device rows, as far as seen
        self.moving: dict[int, tuple[str, list[int], list[int]]] = {}  # kind, device rows, slab rows
        self.slots_made = 0
        self.others_made = 0
        self.batch = 0

    # --- what an earlier run left on disk

    def new_slot(self) -> tuple[int, int]:
        self.slots_made += 1
        return divmod(self.slots_made, 4)

    def add_slot(self) -> None:
        slot = self.new_slot()
        self.driver.add_slot(slot)
        self.model.add_slot(slot)

    def add_shared(self, space: bytes, tokens: list[int]) -> None:
        """Another process wrote these pages; each lies in a segment of its own."""
        parent = space
        for content in self.model.contents(tokens):
            self.others_made += 1
            key, slot = page_key(space, parent, array(list(content))), (1000 + self.others_made, 0)
            known = self.model.entries.get(key)
            if known is None or not self.model.lost(known):  # one that is lost and still used is another story
                self.driver.add_shared(key, parent, slot)
                self.model.add_shared(key, parent, slot)
            parent = key

    def slot_gone(self, number: int) -> None:
        self.driver.slot_gone((1000 + number, 0))
        self.model.slot_gone((1000 + number, 0))

    def retire_segment(self, segment: int) -> None:
        self.driver.retire_segment(segment)
        self.model.retire_segment(segment)

    def add_found(self, space: bytes, tokens: list[int]) -> None:
        parent = space
        for content in self.model.contents(tokens):
            key, slot = page_key(space, parent, array(list(content))), self.new_slot()
            self.driver.add_found(key, parent, slot)
            if key in self.model.entries or slot[0] in self.model.retired:
                self.model.add_slot(slot)
            else:
                self.model.add_entry(key, parent, slot, None)
            parent = key

    # --- requests

    def lease(self, request: dict[str, Any]) -> None:
        expected = self.model.lease(**request)
        answer = self.driver.lease(self.model.now, **(request | {"tokens": array(request["tokens"])}))
        agree(answer, expected, "lease (id, never, needed, available, matched)")
        self.compare()

    def generate(self, id: int, tokens: list[int]) -> None:
        self.driver.append(id, array(tokens))
        if id in self.model.leases:
            self.model.leases[id].tokens += tokens
        agree(self.driver.grow(self.model.now, id, len(tokens)), self.model.grow(id, len(tokens)), "grow")

    def settle(self, id: int) -> None:
        self.model.settle(id)
        self.driver.settle(self.model.now, id)

    def publish(self, id: int, tokens: int, late: int = 0) -> None:
        """`late`: how many batches were submitted after the one that wrote the tokens."""
        self.batch += 1
        ready = max(0, self.batch - late)
        agree(self.driver.publish(self.model.now, id, tokens, ready), self.model.publish(id, tokens, ready), "publish")

    def release(self, id: int, late: int = 0) -> None:
        fence = max(0, self.batch - late)
        self.model.release(id, fence)
        self.driver.release(self.model.now, id, fence)
        self.given_back.append(id)

    def serve(self, id: int, patience: int) -> None:
        """The usual end of a request, which waits for its hit for so many rounds of moves."""
        self.advance([])
        for _ in range(patience):
            if not self.model.leases[id].settled:
                self.all_moves_end(True)
        self.settle(id)
        self.advance([])
        self.compare()
        self.publish(id, 1000)
        self.advance([])
        self.compare()
        self.release(id)
        self.advance([])
        self.compare()

    # --- what the I/O threads and the device report

    def advance(self, done: list[tuple[int, str, Slots]]) -> None:
        self.finished += [id for id, _, _ in done]
        for id, _, _ in done:
            self.moving.pop(id, None)
        self.model.step(done)
        ops, copies = self.driver.step(self.model.now, done)
        expected = [(id, m.kind, m.slot, m.entry.key if m.entry else bytes(32)) for id, m in self.model.ops]
        agree([(id, kind, slot, key) for id, kind, slot, _, key in ops], expected, "disk operations")
        started = [(id, copy.up, copy.fence, len(copy.pages)) for id, copy in self.model.started]
        agree([(id, up, fence, len(rows)) for id, up, rows, _, fence in copies], started, "device copies")
        for id, kind, _, row, _ in ops:
            if kind in ("read", "write"):
                self.moving[id] = (kind, [], [row])
        for id, up, slab, device, _ in copies:
            self.moving[id] = ("up" if up else "down", device.tolist(), slab.tolist())
            for page, row in zip(self.model.copies[id].pages, device.tolist(), strict=True):
                agree(row, self.row_of.setdefault(page, row), "the row of a page")

    def end_copy(self, id: int, ok: bool) -> None:
        self.finished.append(id)
        self.moving.pop(id, None)
        self.model.copied(id, ok)
        self.driver.copied(self.model.now, id, ok)

    def all_moves_end(self, ok: bool, kinds: Sequence[str] = ("read", "write", "clear", "grow"), status: str = "ok") -> None:
        """Copies first; of the disk operations those of these kinds."""
        for id in list(self.model.copies):
            self.end_copy(id, ok)
            self.compare()
        done: list[tuple[int, str, Slots]] = []
        for id, move in self.model.disk_moves.items():
            if move.kind in kinds:
                done.append((id, status if ok else "unreadable", [self.new_slot()] * (ok and move.kind == "grow")))
        self.advance(done)

    # --- what must agree after every step

    def compare(self) -> None:
        driver, model = self.driver, self.model
        model.forget_unneeded()
        agree(driver.check_integrity(), "", "integrity")
        expected, model.events = model.events, []
        agree([event[2:] for event in driver.events()], expected, "events")
        stats = driver.stats()
        agree({name: stats[name] for name in COUNTERS}, model.count, "counters")
        for tier in TIERS:
            agree({name: stats[tier][name] for name in TIER_COUNTERS}, model.tier_count[tier], tier)
            agree(stats[tier]["pages"], model.resident(tier), f"{tier} pages")
        agree({tier: stats[tier]["free"] for tier in (GPU, CPU)}, model.free, "free rows")
        agree(stats["open_leases"], len(model.leases), "leases")
        agree(stats["known_pages"], len(list(model.pages())), "known pages")
        agree(driver.next_deadline(), model.next_deadline(), "next deadline")
        agree(driver.idle(), model.idle(), "idle")
        self._rows_are_distinct()

    def _rows_are_distinct(self) -> None:
        self.row_of = {page: row for page, row in self.row_of.items() if page.state[GPU] != NONE}
        owners: dict[int, object] = {}
        for id, lease in self.model.leases.items():
            rows = self.driver.rows(id).tolist()
            sources = tuple(lease.source[: lease.hit].count(tier) for tier in TIERS)
            agree(self.driver.state(id), (lease.settled, lease.hit, lease.lost, sources), "state of a lease")
            for i, (row, own) in enumerate(zip(rows, lease.own, strict=True)):
                if own is None:
                    agree(row, -1, "a lost row")
                    continue
                agree(1 <= row <= self.sizes.gpu_rows, True, "row in range")
                page = lease.path[i] if not own else None
                if page is not None:
                    agree(page.state[GPU] != NONE, True, "a page in use is on the device")
                    agree(row, self.row_of.setdefault(page, row), "the row of a page")
                owner: object = (id, i) if page is None else page
                agree(owners.setdefault(row, owner), owner, "one owner per row")
        for page, row in self.row_of.items():
            agree(owners.setdefault(row, page), page, "one owner per row")
        users: dict[int, list[str]] = {}
        for kind, device, slab in self.moving.values():
            for row in device if kind == "down" else []:
                agree(isinstance(owners.get(row), Page), True, "a row that is being saved still has its page")
            for row in slab:
                agree(0 <= row < self.sizes.cpu_rows, True, "slab row in range")
                users.setdefault(row, []).append(kind)
        for kinds in users.values():
            agree(len(kinds) == 1 or not {"read", "down"} & {*kinds}, True, "a slab row that is written has one user")

    def finish(self) -> None:
        """All leases given back and every move ended: nothing moves any more, nothing is pinned, everything may go."""
        for id in list(self.model.leases):
            self.release(id)
        for _ in range(1000):
            if self.model.idle() and not self.model.copies and not self.model.disk_moves:
                break
            self.all_moves_end(True)
            self.compare()
        agree(self.model.idle(), True, "moves come to an end")
        rows = self.sizes.gpu_rows
        request = {"space": b"\7" * 32, "tokens": [9] * (rows * self.sizes.page_size), "reserve": 0, "leave": 1, "multiple": 0}
        self.lease(request | {"read": True, "write": True})
        agree(len(self.model.leases), 1, "every page may go")
        self.compare()


def agree(seen: object, expected: object, what: str) -> None:
    assert seen == expected, f"{what}: the driver says {seen!r}, the model {expected!r}"
