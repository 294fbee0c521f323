"""Guest mode: an engine that owns its device blocks lets the cache fill them, and saves them, and reuses them as it likes."""

import ctypes
import random

import numpy as np
import pytest
from support import POISON, fingerprint, prompt, settle, tiny_identity, tiny_layout, until

from kvstrata.cache import Limits, PrefixCache

LAYOUT = tiny_layout()


class Guest:
    """An engine with `blocks` device blocks of host memory. Copies are carried out when it pleases."""

    def __init__(self, cpu=16, blocks=24, **limits):
        self.cache = PrefixCache(LAYOUT, Limits(0, cpu, **limits), identity=tiny_identity(LAYOUT), poison=True)
        self.blocks = np.full((blocks, LAYOUT.row_stride), POISON, np.uint8)
        place = self.cache.slab
        whole = (ctypes.c_uint8 * (place.rows * place.stride)).from_address(place.address)
        self.slab = np.ctypeslib.as_array(whole).reshape(place.rows, place.stride)
        self.batch = 0

    def page(self, tokens, page):
        return fingerprint(LAYOUT, self.cache.namespace(), tokens[: (page + 1) * LAYOUT.page_size])

    def compute(self, tokens, blocks, first=0):
        """Writes the pages from `first` on into these blocks; the batch that did."""
        for page, block in enumerate(blocks[first:], first):
            self.blocks[block, : LAYOUT.row_bytes] = self.page(tokens, page)
        self.batch += 1
        return self.batch

    def copy(self, ok=True, most=None):
        """Carries out what was asked for; how many rows."""
        rows = 0
        for plan in self.cache.take_copies()[:most]:
            assert plan.fence <= self.batch
            for here, there in zip(plan.slab, plan.blocks, strict=True):
                if plan.up:
                    self.blocks[there] = self.slab[here]
                else:
                    self.slab[here] = self.blocks[there]
                rows += 1
                if not ok:
                    break
            self.cache.copied(plan.ticket, ok)
        return rows

    def serve(self, tokens, blocks):
        """A request from lookup to save; the pages of its hit, which are proven."""
        pages = len(tokens) // LAYOUT.page_size
        with self.cache.lease(tokens, must=True, leave=0) as lease:
            hit = lease.wait() // LAYOUT.page_size
            self.blocks[blocks] = POISON
            ticket = lease.load(0, blocks[:hit])
            self.copy()
            assert lease.wait_copy(ticket, 0.0)
            for page in range(hit):
                assert np.array_equal(self.blocks[blocks[page], : LAYOUT.row_bytes], self.page(tokens, page))
            ready = self.compute(tokens, blocks, first=hit)
            lease.save(hit, blocks[hit:pages], ready)
            self.copy()
        self.blocks[blocks] = POISON  # they are somebody else's from now on
        return hit


@pytest.fixture
def make_guest():
    made = []

    def make(**options):
        made.append(Guest(**options))
        return made[-1]

    yield make
    for guest in made:
        guest.cache.check_integrity()
        assert guest.cache.stats()["open_leases"] == 0
        guest.cache.close()


def test_saved_once_and_loaded_ever_after(make_guest):
    guest = make_guest()
    tokens = prompt(4)
    assert guest.serve(tokens, [3, 1, 4, 15]) == 0
    assert guest.serve(tokens, [9, 2, 6, 5]) == 4
    longer = np.concatenate([tokens, prompt(2, seed=1)])
    assert guest.serve(longer, [8, 7, 10, 3, 2, 11]) == 4
    assert guest.serve(longer, [0, 1, 2, 3, 4, 5]) == 6


def test_an_unfinished_save_is_found_by_nobody(make_guest):
    guest = make_guest()
    tokens = prompt(3)
    with guest.cache.lease(tokens) as lease:
        lease.wait()
        ticket = lease.save(0, [1, 2, 3], guest.compute(tokens, [1, 2, 3]))
        assert ticket
        assert not lease.wait_copy(ticket, 0.0)
        with guest.cache.lease(tokens) as early:
            assert early.matched == 0
    assert guest.copy() == 3  # after the lease: the copy goes on
    with guest.cache.lease(tokens, leave=0) as late:
        assert late.wait() == 3 * LAYOUT.page_size


def test_a_failed_save_leaves_nothing(make_guest):
    guest = make_guest()
    tokens = prompt(3)
    with guest.cache.lease(tokens) as lease:
        lease.wait()
        lease.save(0, [1, 2, 3], guest.compute(tokens, [1, 2, 3]))
        guest.copy(ok=False)
    assert guest.serve(tokens, [1, 2, 3]) == 0
    assert guest.serve(tokens, [4, 5, 6]) == 3
    assert guest.cache.stats()["copy_failures"] == 1


def test_a_failed_load_costs_nothing(make_guest):
    guest = make_guest()
    tokens = prompt(3)
    guest.serve(tokens, [1, 2, 3])
    with guest.cache.lease(tokens, leave=0) as lease:
        lease.wait()
        assert lease.load(0, [4, 5, 6])
        guest.copy(ok=False)
        assert lease.load(0, [7, 8, 9])  # the pages are still there
        guest.copy()
        assert np.array_equal(guest.blocks[9, : LAYOUT.row_bytes], guest.page(tokens, 2))


def test_a_copy_that_is_never_reported(make_guest):
    """Its pages are protected while it may go on, whatever becomes of its lease; then it is given up."""
    guest = make_guest(cpu=4)
    tokens = prompt(4)
    guest.serve(tokens, [1, 2, 3, 4])
    with guest.cache.lease(tokens, leave=0) as lease:
        lease.wait()
        lease.load(0, [5, 6, 7, 8])
    (plan,) = guest.cache.take_copies()
    assert guest.serve(prompt(4, seed=1), [9, 10, 11, 12]) == 0  # no row to save it in
    for page, row in enumerate(plan.slab):
        assert np.array_equal(guest.slab[row, : LAYOUT.row_bytes], guest.page(tokens, page))
    guest.cache.copied(plan.ticket, True)
    guest.cache.copied(plan.ticket, True)
    assert guest.serve(prompt(4, seed=1), [9, 10, 11, 12]) == 0
    assert guest.serve(prompt(4, seed=1), [9, 10, 11, 12]) == 4


def test_through_the_disk(make_guest, tmp_path):
    guest = make_guest(cpu=8, disk_path=str(tmp_path / "disk"), disk_bytes=4 << 20)
    prompts = [prompt(4, seed=seed) for seed in range(6)]
    for tokens in prompts:
        assert guest.serve(tokens, [1, 2, 3, 4]) == 0
        settle(guest.cache)
    for tokens in prompts:
        assert guest.serve(tokens, [5, 6, 7, 8]) == 4
    assert guest.cache.stats()["disk"]["used"] >= 16
    guest.cache.close()
    again = make_guest(cpu=8, disk_path=str(tmp_path / "disk"), disk_bytes=4 << 20)
    assert again.serve(prompts[3], [1, 2, 3, 4]) == 4


def test_many_requests(make_guest, tmp_path):
    """Random prefixes, copies in any order and late, failures, cancels; every block that was loaded is proven."""
    guest = make_guest(cpu=12, disk_path=str(tmp_path / "disk"), disk_bytes=4 << 20)
    dice = random.Random(5)
    trunk = [prompt(6, seed=seed) for seed in range(8)]
    hits = 0
    for _ in range(400):
        tokens = dice.choice(trunk)[: dice.randint(1, 6) * LAYOUT.page_size]
        if dice.random() < 0.2:
            with guest.cache.lease(tokens, leave=0) as lease:  # cancelled
                if dice.random() < 0.5:
                    lease.load(0, [20, 21, 22, 23][: lease.wait() // LAYOUT.page_size])
            guest.copy(ok=dice.random() < 0.5)
        else:
            hits += guest.serve(tokens, dice.sample(range(20), len(tokens) // LAYOUT.page_size))
    guest.copy()
    assert hits > 200
    until(lambda: guest.cache.flush(1.0), "everything settled")
