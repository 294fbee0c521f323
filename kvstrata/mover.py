"""Carrying out the core's device copies: threads that start them and report their ends, and what waits for them layer by layer."""

import threading
from collections import deque

from kvstrata._core import Core
from kvstrata.gpu import Copy, PagePool, Slab, Transfer

__all__ = ["Mover"]


class Mover:
    """Carries out the core's device copies, whatever the serving thread does meanwhile."""

    def __init__(self, core: Core, pool: PagePool) -> None:
        self._core = core
        self._pool = pool
        self.device = pool.backend
        self.layers = len(pool.layers)
        address, rows, stride, _ = core.slab()
        self._slab = Slab(address, rows, stride)
        if rows:
            pool.backend.attach(self._slab)
        self._changed = threading.Condition()
        self._under_way: dict[int, Transfer] = {}
        self._queue: deque[int] = deque()
        self._stopping = False
        self.error: BaseException | None = None  # of the latest copy that failed
        self._threads = [threading.Thread(target=self._start_copies, name="kvstrata-copies", daemon=True)]
        if pool.backend.asynchronous:
            self._threads.append(threading.Thread(target=self._finish_copies, name="kvstrata-copied", daemon=True))
        for thread in self._threads:
            thread.start()

    def _start_copies(self) -> None:
        while True:
            batches = self._core.take_copies(float("inf"))
            if not batches:
                break  # the core is closing
            for ticket, up, slab_rows, device_rows, fence in batches:
                copy = Copy(ticket, up, slab_rows, device_rows, fence)
                try:
                    transfer = self._pool.backend.start(copy, self._pool, self._slab)
                except Exception as error:
                    self.error = error
                    self._core.copied(ticket, False)
                    with self._changed:
                        self._changed.notify_all()
                    continue
                if not self._pool.backend.asynchronous:
                    self._core.copied(ticket, True)
                    continue
                with self._changed:
                    self._under_way[ticket] = transfer
                    self._queue.append(ticket)
                    self._changed.notify_all()
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def _finish_copies(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._stopping)
                if not self._queue:
                    return
                ticket = self._queue.popleft()
                transfer = self._under_way[ticket]
            try:
                ok = transfer.result()
            except Exception as error:
                self.error = error
                ok = False
            self._core.copied(ticket, ok)
            with self._changed:
                del self._under_way[ticket]
                self._changed.notify_all()

    def wait_layer(self, ticket: int, layer: int, timeout: float | None) -> bool:
        """Waits until a copy was started and brought the layer (see Transfer.wait_layer). True also when the copy is over."""
        if not self._pool.backend.asynchronous:
            return self._core.wait_copy(ticket, float("inf") if timeout is None else timeout)
        with self._changed:
            if not self._changed.wait_for(lambda: ticket in self._under_way or self._core.wait_copy(ticket, 0.0), timeout):
                return False
            transfer = self._under_way.get(ticket)
        return transfer is None or transfer.wait_layer(layer, timeout)

    def join(self, timeout: float) -> None:
        """After the core was closed: waits for the threads."""
        for thread in self._threads:
            if thread is not threading.current_thread():  # the collector may close a cache anywhere
                thread.join(timeout)
        if not any(thread.is_alive() for thread in self._threads):
            self._pool.backend.close()
