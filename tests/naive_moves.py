"""What moves, and how it ends: the second third of the naive model (naive_model.py).

A lease that a failed page makes shorter is the business of the last third, NaiveCache.
"""

import math

from naive_ledger import CPU, DISK, GPU, INCOMING, NONE, RESIDENT, CopyMove, DiskMove, NaiveLedger, Page


class NaiveMoves(NaiveLedger):
    def want(self, page: Page) -> None:
        if not page.waiters or page.state[GPU] == RESIDENT or page.uploading:
            return
        if page.state[CPU] == RESIDENT:
            page.uploading = True
            self.ups.append(page)
        elif page.state[CPU] == NONE and not page.load_queued:
            page.load_queued = True
            self.loads.append((page, self.now))

    def queue_down(self, page: Page) -> None:
        if self.sizes.cpu_rows and page.state[CPU] == NONE:
            if len(self.downs) >= 2 * self.sizes.gpu_rows:
                self.downs.pop(0)
                self.count["saves_dropped"] += 1
            self.downs.append(page)

    def save_instead(self, page: Page) -> None:
        """A load did not come, but somebody computed the page meanwhile."""
        if page.state[GPU] == RESIDENT:
            self.queue_down(page)

    def save_again(self, page: Page) -> None:
        """In the slab, and the disk does not have it: a use is another chance to write it."""
        writing = any(move.kind == "write" and move.page is page for move in self.disk_moves.values())
        if not self.sizes.disk or page.state[CPU] != RESIDENT or page.entry or page in self.spills or writing:
            return
        if self.writes_again_at <= self.now and self.may_dirty(0):
            self.queue_spill(page)

    def fail_page(self, page: Page) -> None:
        if page.waiters:
            for lease in list(page.waiters):
                self.shorten(lease, page.depth - 1)
        elif page.state[GPU] == INCOMING and not page.uploading:
            self.withdraw(page, GPU)

    def may_dirty(self, more: int) -> bool:
        """Half of the slab may wait for the disk."""
        writing = sum(move.kind == "write" and not move.abandoned for move in self.disk_moves.values())
        saving = sum(len(copy.pages) for copy in self.copies.values() if not copy.up and not copy.abandoned)
        limit = max(1, self.sizes.cpu_rows // 2)
        return not self.sizes.disk or len(self.spills) + writing + saving + more < limit

    def in_flight(self, kind: str) -> int:
        """Those that hang included: no more than so many threads and rows can be stuck."""
        return sum(move.kind == kind for move in self.disk_moves.values())

    def stuck(self, kind: str) -> int:
        return sum(move.kind == kind and move.abandoned for move in self.disk_moves.values())

    def disk_moving(self) -> bool:
        return any(not move.abandoned for move in self.disk_moves.values())

    def submit(self, move: DiskMove, patience: float) -> None:
        move.deadline = self.now + patience
        id = self.new_id()
        self.disk_moves[id] = move
        self.ops.append((id, move))

    def start_copy(self, up: bool, pages: list[Page], fence: int) -> None:
        id = self.new_id()
        self.copies[id] = CopyMove(up, pages, fence, self.now + self.sizes.copy_deadline)
        self.started.append((id, self.copies[id]))

    def step(self, done: list[tuple[int, str, list[tuple[int, int]]]]) -> None:
        """What is to be started lies in `ops` and `started` then."""
        self.ops, self.started = [], []
        for id, status, slots in done:
            self.finish(id, status, slots)
        self.expire()
        self.pump_loads()
        while self.ups:
            batch = self.ups[: self.sizes.copy_rows]
            del self.ups[: self.sizes.copy_rows]
            self.start_copy(True, batch, self.released)
        self.pump_spills()
        self.pump_downs()

    def pump_loads(self) -> None:
        self.load_without_row = False
        while self.loads:
            page, since = self.loads[0]
            entry = page.entry
            if not page.waiters or entry is None or not self.readable(entry):
                self.drop_load()
            elif page.state[CPU] != NONE:  # it comes another way
                self.loads.pop(0)
                page.load_queued = False
                self.want(page)
            elif self.in_flight("read") >= self.sizes.reads_at_once:
                return
            elif self.take_row(CPU):
                self.loads.pop(0)
                page.load_queued = False
                page.state[CPU] = INCOMING
                self.submit(DiskMove("read", 0, entry.slot, page, entry), self.sizes.read_deadline)
            elif self.now < since + self.sizes.read_deadline:
                self.load_without_row = True
                return
            else:
                self.count["timeouts"] += 1
                self.drop_load()

    def drop_load(self) -> None:
        page, _ = self.loads.pop(0)
        page.load_queued = False
        self.fail_page(page)

    def pump_downs(self) -> None:
        room = True
        while self.downs and room:
            batch: list[Page] = []
            while self.downs and len(batch) < self.sizes.copy_rows:
                page = self.downs[0]
                if page.state[CPU] == NONE and page.state[GPU] == RESIDENT and self.known(page):
                    room = self.may_dirty(len(batch)) and self.take_row(CPU)
                    if not room:
                        break
                    page.state[CPU] = INCOMING
                    batch.append(page)
                elif page.state[CPU] == NONE:
                    self.count["saves_dropped"] += page.entry is None
                self.downs.pop(0)
            if batch:
                self.start_copy(False, batch, max(page.ready for page in batch))

    def pump_spills(self) -> None:
        paused = self.writes_again_at > self.now
        while self.spills and (paused or self.in_flight("write") < self.sizes.writes_at_once):
            page = self.spills[0]
            if paused:
                self.count["spills_dropped"] += 1
            elif not self.on_disk(page):
                if self.in_flight("grow") > self.stuck("grow"):
                    return
                if not self.slots and self.grow_again_at <= self.now:
                    self.submit(DiskMove("grow", 0), self.sizes.write_deadline)
                    return
                slot = self.take_slot()
                if slot is not None:
                    self.spills.pop(0)
                    assert page.parent is not None
                    entry = self.add_entry(page.key, page.parent.key, slot, page)
                    self.submit(DiskMove("write", 0, slot, page, entry), self.sizes.write_deadline)
                    continue
                if self.disk_moving():
                    return
                self.count["spills_dropped"] += 1
            self.spills.pop(0)

    def on_disk(self, page: Page) -> bool:
        """The disk has a page under this key, so that it need not, or cannot, be written. If it is this one, that is a use."""
        entry = page.entry or self.entries.get(page.key)
        if entry is None:
            return False
        if entry.page is None and not entry.contested:
            self.attach(page, entry)
        if page.entry is entry:
            self.touch_entry(entry)
        else:
            self.count["key_conflicts"] += 1
        return True

    def queue_spill(self, page: Page) -> None:
        if not self.sizes.disk or self.on_disk(page):
            return
        if self.writes_again_at > self.now:
            self.count["spills_dropped"] += 1
        else:
            self.spills.append(page)

    # --- completions

    def finish(self, id: int, status: str, slots: list[tuple[int, int]]) -> None:
        move = self.disk_moves.get(id)
        if move is None:
            self.count["late_completions"] += 1
            return
        reads_stuck = self.stuck("read") == self.sizes.reads_at_once
        writes_stuck = self.stuck("write") == self.sizes.writes_at_once
        del self.disk_moves[id]
        if status == "ok":
            self.timeouts_in_a_row = 0
        if move.abandoned:  # after all
            self.count["late_completions"] += 1
            if move.kind == "write" and writes_stuck:
                self.pause_writes()
            if move.kind == "read" and reads_stuck:
                self.disk_back_at = self.now
        if move.kind == "clear":
            self.add_slot(move.slot)
        elif move.kind == "grow":
            for slot in slots:
                self.add_slot(slot)
            self.grow_again_at = self.now if status == "ok" and slots else self.now + self.sizes.retry_after
            if not slots and not self.entries_to_evict() and not self.disk_moving():
                self.pause_writes()
        elif move.kind == "write":
            self.finish_write(move, status)
        elif move.abandoned:
            assert move.entry is not None
            move.entry.retry_at = self.now
            self.forget_retired(move.entry)
            self.free[CPU] += 1
        else:
            self.finish_read(move, status)

    def pause_writes(self) -> None:
        all_stuck = self.stuck("write") >= self.sizes.writes_at_once
        self.writes_again_at = math.inf if all_stuck else self.now + self.sizes.retry_after

    def finish_read(self, move: DiskMove, status: str) -> None:
        page, entry = move.page, move.entry
        assert page is not None
        assert entry is not None
        if status == "ok":
            self.count["disk_reads"] += 1
            self.arrive(page, CPU, DISK)
            self.forget_retired(entry)
            self.want(page)
            return
        self.withdraw(page, CPU)
        self.tier_count[CPU]["failures"] += 1
        self.save_instead(page)
        if entry.foreign:  # whatever it is: it is forgotten, and its owner sees to it
            self.count[
                "key_conflicts" if status == "conflict" else "stale" if status in ("corrupt", "stale") else "unreadable"
            ] += 1
            self.forget_entry(entry, "removed")
        elif status == "conflict":
            self.count["key_conflicts"] += 1
            page.entry = entry.page = None
            entry.contested = True
            self.forget_retired(entry)
        elif status in ("corrupt", "stale"):
            self.count[status] += 1
            slot = self.forget_entry(entry, "damaged")
            if slot[0] not in self.retired:
                self.submit(DiskMove("clear", 0, slot), self.sizes.write_deadline)
        else:
            self.count["unreadable"] += 1
            entry.retry_at = self.now + self.sizes.retry_after
            self.forget_retired(entry)
        self.fail_page(page)

    def finish_write(self, move: DiskMove, status: str) -> None:
        entry = move.entry
        assert entry is not None
        if status == "ok":
            self.count["disk_writes"] += 1
            entry.writing = False
            self.tier_count[DISK]["stored"] += 1
            self.events.append(("stored", DISK, CPU, entry.page.depth if entry.page else 0, entry.key))
            self.forget_retired(entry)
        else:
            self.count["spills_dropped"] += 1
            self.tier_count[DISK]["failures"] += 1
            self.add_slot(self.forget_entry(entry, "removed"))
            if entry.slot[0] not in self.retired:
                self.pause_writes()

    def copied(self, id: int, ok: bool) -> None:
        copy = self.copies.pop(id, None)
        if copy is None:
            self.count["late_completions"] += 1
            return
        self.count["copy_failures"] += not ok
        target, source = (GPU, CPU) if copy.up else (CPU, GPU)
        if copy.abandoned:
            self.free[target] += len(copy.pages)
            return
        for page in copy.pages if copy.up and not ok else []:
            page.uploading = False
        for page in copy.pages:
            if ok:
                page.uploading = page.uploading and not copy.up
                self.count["ups" if copy.up else "downs"] += 1
                self.arrive(page, target, source)
                if copy.up:
                    waiting, page.waiters = page.waiters, []
                    for lease in waiting:
                        self.check_settled(lease)
                else:
                    self.queue_spill(page)
            else:
                self.tier_count[target]["failures"] += 1
                if copy.up:
                    self.fail_page(page)
                else:
                    self.withdraw(page, CPU)
                    self.want(page)

    def expire(self) -> None:
        failed: list[Page] = []
        for move in self.disk_moves.values():
            if move.abandoned or move.deadline > self.now:
                continue
            move.abandoned = True
            self.count["timeouts"] += 1
            if move.kind == "read":
                assert move.page is not None
                assert move.entry is not None
                move.page.state[CPU] = NONE  # its row stays with the move
                self.save_instead(move.page)
                move.entry.retry_at = math.inf
                failed.append(move.page)
                if self.stuck("read") == self.sizes.reads_at_once:
                    self.disk_back_at = math.inf
                else:
                    self.timeouts_in_a_row += 1
                    if self.timeouts_in_a_row >= 3:
                        self.disk_back_at = self.now + self.sizes.retry_after
            elif move.kind == "write":
                self.pause_writes()
            elif move.kind == "grow":
                self.grow_again_at = math.inf
        for copy in self.copies.values():
            if copy.abandoned or copy.deadline > self.now:
                continue
            copy.abandoned = True
            self.count["timeouts"] += 1
            for page in copy.pages:
                page.state[GPU if copy.up else CPU] = NONE
                if copy.up:
                    page.uploading = False
                    failed.append(page)
                else:
                    self.want(page)
        for page in failed:
            self.fail_page(page)

    # --- to compare

    def next_deadline(self) -> float:
        moves = [*self.disk_moves.values(), *self.copies.values()]
        waits = [self.loads[0][1] + self.sizes.read_deadline] if self.load_without_row else []
        return min(waits + [move.deadline for move in moves if not move.abandoned], default=math.inf)

    def idle(self) -> bool:
        moves = [*self.disk_moves.values(), *self.copies.values()]
        return not (self.loads or self.ups or self.downs or self.spills) and all(move.abandoned for move in moves)

    def resident(self, tier: str) -> int:
        if tier == DISK:
            return sum(not entry.writing and not entry.foreign for entry in self.entries.values())
        return sum(page.state[tier] == RESIDENT for page in self.pages())
