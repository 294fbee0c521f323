"""A7: sessions come and go, most of what they were lies on disk, and nobody ever gets a byte of somebody else's."""

import random
import sys
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np
import pytest
from support import PAGE, fingerprint, tiny_identity, tiny_layout

from kvstrata._core import page_key
from kvstrata.cache import Limits, PrefixCache
from kvstrata.sim_device import SimDevice

SESSIONS = 50
PAGES = 40  # of a session at most
CPU_ROWS = SESSIONS * PAGES // 20  # 5 % of the data
DISK_PAGES = SESSIONS * PAGES * 2
KEPT_EVENTS = 50


@dataclass(frozen=True)
class Session:
    """What a session is at one moment. `rows`: what its full pages must hold, uint8 `[PAGES, row_bytes]`."""

    tokens: np.ndarray
    rows: np.ndarray
    keys: list[bytes]
    length: int

    @property
    def pages(self) -> int:
        return self.length // PAGE


@dataclass
class House:
    cache: PrefixCache
    device: SimDevice
    sessions: list[Session] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)
    history: dict[bytes, deque[str]] = field(default_factory=dict)  # of pages, by key

    def __post_init__(self) -> None:
        self.pool = self.cache.pool.data.numpy()[:, : self.cache.layout.row_bytes]
        self.layers = [self.cache.layout.layer_range(layer) for layer in self.cache.layout.layers]
        dice = random.Random(7)
        for number in range(SESSIONS):
            self.sessions.append(self.written(None, number % 5, 0, dice.randrange(PAGES * PAGE), dice))

    def written(self, old: Session | None, system: int, keep: int, length: int, dice: random.Random) -> Session:
        """A session that shares the first `keep` tokens with `old`, or a system prompt of three pages with others."""
        draw = np.random.default_rng(dice.getrandbits(32))
        tokens = draw.integers(0, 1000, PAGES * PAGE, np.int32)
        rows = np.empty((PAGES, self.cache.layout.row_bytes), np.uint8)
        keys: list[bytes] = []
        kept = 0
        if old is None:
            tokens[: 3 * PAGE] = np.arange(3 * PAGE) + system
        else:
            tokens[:keep] = old.tokens[:keep]
            kept = keep // PAGE
            rows[:kept], keys = old.rows[:kept], old.keys[:kept]
        space = self.cache.namespace()
        for page in range(kept, PAGES):
            rows[page] = fingerprint(self.cache.layout, space, tokens[: (page + 1) * PAGE])
            parent = keys[-1] if keys else space
            keys.append(page_key(space, parent, tokens[page * PAGE : (page + 1) * PAGE]))
        return Session(tokens, rows, keys, length)

    # --- one request

    def operate(self, dice: random.Random) -> None:
        with self.lock:
            number = dice.randrange(SESSIONS)
            session = self.sessions[number]
            what = dice.choices(["append", "return", "cancel", "edit"], [45, 35, 18, 2])[0]
            if what == "append":
                length = session.length + dice.randrange(1, 2 * PAGE)
                if length <= PAGES * PAGE:
                    session = Session(session.tokens, session.rows, session.keys, length)
                else:  # it is over; another begins
                    session = self.written(None, number % 5, 0, dice.randrange(1, PAGES * PAGE // 4), dice)
            if what == "edit":  # an earlier turn is written anew
                keep = dice.randrange(session.length + 1)
                session = self.written(session, 0, keep, keep, dice)
            self.sessions[number] = session
            self.counts[what] += 1
        self.request(session, dice, cancel=what == "cancel")

    def request(self, session: Session, dice: random.Random, cancel: bool) -> None:
        while not (lease := self.cache.lease(session.tokens[: session.length])):
            self.count("full")
            assert not lease.never
            self.device.synchronize()  # others give back
        first_own = lease.matched // PAGE
        self.device.poison(self.cache._core.rows(lease._id)[first_own:])
        if cancel and dice.random() < 0.5:  # while its pages are on their way
            lease.release(self.cache.pool.mark_batch())
            return
        by_layer = dice.random() < 0.3
        patience = dice.choice([0.0, 0.0, 0.001, None])
        if by_layer:
            hit = lease.wait(patience, layer=0) // PAGE
            for layer, (offset, size) in enumerate(self.layers):
                lease.wait(layer=layer)
                if not lease.lost:
                    self.expect(session, lease.rows[:hit].copy(), offset, size)
        hit = lease.wait(patience) // PAGE
        if lease.lost:  # the pool is too full even to compute what did not come
            self.count("lost")
            lease.release()
            return
        rows = lease.rows
        self.count("hit pages", hit)
        self.count("pages", session.pages)
        if hit < first_own:
            self.device.poison(rows[hit:first_own])
        if not by_layer:
            self.expect(session, rows[:hit], 0, self.cache.layout.row_bytes)
        if cancel:
            lease.release(self.cache.pool.mark_batch())
            return
        self.write(session, rows, hit)
        lease.publish(session.length, ready=self.cache.pool.mark_batch())
        self.expect(session, rows[: session.pages], 0, self.cache.layout.row_bytes)
        lease.release(self.cache.pool.mark_batch())

    def count(self, what: str, more: int = 1) -> None:
        with self.lock:
            self.counts[what] += more

    # --- kernels

    def write(self, session: Session, rows: np.ndarray, first: int) -> None:
        def kernel() -> None:
            self.pool[rows[first : session.pages]] = session.rows[first : session.pages]

        self.device.compute(kernel)

    def expect(self, session: Session, rows: np.ndarray, offset: int, size: int) -> None:
        def kernel() -> None:
            seen = self.pool[rows, offset : offset + size]
            if not np.array_equal(seen, session.rows[: len(rows), offset : offset + size]):
                self.tell(session, rows, seen, offset, size)

        self.device.compute(kernel)

    # --- what went wrong

    def tell(self, session: Session, rows: np.ndarray, seen: np.ndarray, offset: int, size: int) -> None:
        page = next(i for i in range(len(rows)) if not np.array_equal(seen[i], session.rows[i, offset : offset + size]))
        whose = {
            bytes(other.rows[i, offset : offset + size]): (n, i) for n, other in enumerate(self.sessions) for i in range(PAGES)
        }
        self.note_events()
        lines = [f"page {page} of {len(rows)}, row {rows[page]}, bytes {offset} to {offset + size}: {bytes(seen[page, :8]).hex()}"]
        lines.append(f"these are the bytes of (session, page) {whose.get(bytes(seen[page]), 'nobody')}")
        self.wrong.append("\n  ".join([*lines, *self.history.get(session.keys[page], ["no event"])]))

    def note_events(self) -> None:
        with self.lock:
            for event in self.cache.drain_events():
                line = f"{event.sequence} {event.time:.4f} {event.kind} {event.tier} from {event.source}"
                self.history.setdefault(event.key, deque(maxlen=KEPT_EVENTS)).append(line)


@pytest.mark.slow
@pytest.mark.parametrize(("clients", "operations"), [(1, 30_000), (4, 70_000)])
def test_no_wrong_byte(tmp_path, clients, operations):
    layout = tiny_layout(width=2)
    device = SimDevice(seed=clients, delay=1e-4, calm=0.95)
    limits = Limits(PAGES + 25 * clients, CPU_ROWS, str(tmp_path / "disk"), DISK_PAGES * (layout.row_stride + 4096))
    cache = PrefixCache(layout, limits, identity=tiny_identity(layout), device=device, poison=True)
    house = House(cache, device)
    errors: list[BaseException] = []

    def client(seed: int) -> None:
        dice = random.Random(f"{clients} {seed}")
        try:
            for done in range(operations // clients):
                if house.wrong or errors:
                    return
                house.operate(dice)
                if done % 100 == 0:
                    house.note_events()
                if done % 64 == 0:
                    device.synchronize()  # no client is more than so many batches ahead
        except BaseException as error:
            errors.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    began = time.monotonic()
    try:
        threads = [threading.Thread(target=client, args=(seed,)) for seed in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        device.synchronize()
    finally:
        sys.setswitchinterval(before)
    print(f"{operations / (time.monotonic() - began):.0f} operations a second", dict(house.counts), cache.stats())
    assert not errors, errors[0]
    assert not house.wrong, f"{len(house.wrong)} wrong:\n{house.wrong[0]}"
    stats = cache.stats()
    assert cache.flush(60)
    cache.check_integrity()
    assert stats["open_leases"] == 0
    assert all(stats[tier]["loaded"] > operations // 20 for tier in ("gpu", "cpu", "disk")), "a tier was not worked"
    assert stats["corrupt"] == stats["stale"] == stats["key_conflicts"] == 0
    cache.close()
