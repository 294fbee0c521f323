"""A cache that is slow and plain: what the driver of the core (core/driver.hpp) must decide, told once more with lists and scans.

Three files: naive_ledger.py (which page is where, which goes first), naive_moves.py (what moves and how it ends), and here what a
request does.
"""

from naive_ledger import CPU, DISK, GPU, INCOMING, NONE, RESIDENT, Lease, Page
from naive_moves import NaiveMoves


class NaiveCache(NaiveMoves):
    def find_path(self, root: Page, contents: list[tuple[int, ...]]) -> list[Page]:
        path: list[Page] = []
        for content in contents:
            page = self.child(path[-1] if path else root, content, root)
            if not self.findable(page):
                entry = self.entries.get(page.key)
                if entry is None or not self.readable(entry):
                    break
                self.attach(page, entry)
            path.append(page)
        return path

    def lease(
        self, space: bytes, tokens: list[int], reserve: int, leave: int, multiple: int, read: bool, write: bool
    ) -> tuple[int, bool, int, int, int]:
        size = self.sizes.page_size
        total = -(-(len(tokens) + reserve) // size)
        self.count["leases"] += 1
        if total > self.sizes.gpu_rows:
            self.count["full"] += 1
            return 0, True, total, self.sizes.gpu_rows, 0
        lease = Lease(self.new_id(), self.roots.setdefault(space, Page(None, space)), list(tokens), multiple or size, write)
        missed = 0
        if read and len(tokens) > leave:
            most = (len(tokens) - leave) // lease.multiple * lease.multiple // size
            path = self.find_path(lease.root, self.contents(tokens)[:most])
            lease.path = path[: len(path) * size // lease.multiple * lease.multiple // size]
            missed = most - len(lease.path)
        for page in lease.path:
            lease.source.append(next((tier for tier in (GPU, CPU) if page.state[tier] == RESIDENT), DISK))
        self.look_for_copies(lease, len(lease.path))
        lease.matched = lease.hit = len(lease.path)
        needed = total - sum(page.state[GPU] != NONE for page in lease.path)
        self.asking = lease.path
        available = self.free[GPU]
        if needed > available:
            available += self.evictable()
        if needed > available:
            self.count["full"] += 1
            self.asking = []
            return 0, False, needed, available, 0
        self.count["missed_pages"] += missed
        for source in lease.source:
            self.tier_count[source]["looked_up"] += 1
        for page in lease.path:
            if page.state[GPU] == NONE:
                assert self.take_row(GPU)
                page.state[GPU] = INCOMING
        for _ in range(total - lease.matched):
            assert self.take_row(GPU)
        lease.own = [False] * lease.matched + [True] * (total - lease.matched)
        self.leases[lease.id] = lease
        self.asking = []
        for page in lease.path:
            if page.state[GPU] != RESIDENT:
                page.waiters.append(lease)
        for page in lease.path:
            self.want(page)
        self.check_settled(lease)
        for page in lease.path:
            self.save_again(page)
        self.used_by(lease)
        return lease.id, False, 0, 0, lease.matched

    # Of what a lookup found, the deepest copy of each lower tier counts as used, and if that is gone, none.

    def look_for_copies(self, lease: Lease, pages: int) -> None:
        for tier in (CPU, DISK):
            known = lease.path[: min(pages, lease.deepest.get(tier, pages))]
            lease.deepest[tier] = max((i + 1 for i, page in enumerate(known) if self.has_copy(page, tier)), default=0)

    @staticmethod
    def has_copy(page: Page, tier: str) -> bool:
        return page.entry is not None if tier == DISK else page.state[tier] == RESIDENT

    def used_by(self, lease: Lease) -> None:
        for tier in (GPU, CPU, DISK):
            found = 0 if tier == GPU else lease.hit
            there = [page for page in lease.path[found:] if self.has_copy(page, tier)]
            if not there and tier != GPU and (deepest := lease.deepest[tier]):
                there = [page for page in [lease.path[deepest - 1]] if self.has_copy(page, tier)]
            if there and tier == DISK:
                self.touch_entry(there[-1].entry)
            elif there:
                self.touch(there[-1], tier)

    def missing(self, lease: Lease) -> int:
        return sum(lease in page.waiters for page in lease.path)

    def check_settled(self, lease: Lease) -> None:
        if not lease.settled and self.missing(lease) == 0:
            lease.settled = True
            for source in lease.source[: lease.hit]:
                self.tier_count[source]["loaded"] += 1

    def use_hit(self, lease: Lease) -> None:
        if not lease.used:
            lease.used = True
            for source in lease.source[: lease.hit]:
                self.tier_count[source]["used"] += 1

    def grow(self, id: int, tokens: int) -> bool:
        lease = self.leases.get(id)
        if lease is None:
            return False
        rows = -(-tokens // self.sizes.page_size)
        if rows > self.free[GPU] + self.evictable():
            self.count["full"] += 1
            return False
        for _ in range(rows):
            assert self.take_row(GPU)
            lease.own.append(True)
        return True

    def settle(self, id: int) -> None:
        lease = self.leases.get(id)
        if lease is None or lease.settled:
            return
        coming = [page.state[GPU] == RESIDENT or page.uploading for page in lease.path]
        self.shorten(lease, coming.index(False) if False in coming else len(coming))

    def stop_waiting(self, lease: Lease, page: Page) -> bool:
        """Whether this freed the row that was reserved for the page."""
        if lease not in page.waiters:
            return False
        page.waiters.remove(lease)
        if page.waiters or page.uploading or page.state[GPU] != INCOMING:
            return False
        page.state[GPU] = NONE
        return True

    def shorten(self, lease: Lease, pages: int) -> None:
        size = self.sizes.page_size
        pages = pages * size // lease.multiple * lease.multiple // size
        if lease.settled or pages >= len(lease.path):
            return
        has_row = {i: self.stop_waiting(lease, lease.path[i]) for i in reversed(range(pages, len(lease.path)))}
        lease.hit = pages
        del lease.path[pages:]
        self.look_for_copies(lease, pages)
        for i in sorted(has_row):
            lease.own[i] = True if has_row[i] or self.take_row(GPU) else None
        lease.lost = lease.lost or None in lease.own
        self.check_settled(lease)

    def publish(self, id: int, tokens: int, ready: int) -> int:
        lease = self.leases.get(id)
        if lease is None or not lease.settled:
            return 0
        self.use_hit(lease)
        if not lease.write:
            return len(lease.path)
        full = min(tokens, len(lease.tokens)) // self.sizes.page_size
        for i in range(len(lease.path), min(full, len(lease.own))):
            page = self.child(lease.path[-1] if lease.path else lease.root, self.contents(lease.tokens)[i], lease.root)
            if not lease.own[i] or page.state[GPU] == INCOMING:
                break
            if page.state[GPU] == NONE:
                self.arrive(page, GPU, GPU)
                lease.own[i] = False
                page.ready = ready
                self.queue_down(page)
            else:
                self.count["duplicates"] += 1
                self.save_again(page)
            lease.path.append(page)
        return len(lease.path)

    def release(self, id: int, fence: int) -> None:
        lease = self.leases.pop(id, None)
        if lease is None:
            return
        self.released = max(self.released, fence)
        for page in lease.path:
            self.free[GPU] += self.stop_waiting(lease, page)
        self.free[GPU] += lease.own.count(True)
        self.used_by(lease)
