"""SimDevice: memory of the host in the order of a GPU, for tests of stream order without one and for the simulator.

Two queues, each a thread that runs what it is given, in order and with random delays: kernels on one, copies on the other. Nothing
orders the two but what would order CUDA streams: a copy waits for a batch's fence, a kernel for the layers it was told to wait for.
Who forgets either reads or overwrites bytes that are not final, sooner or later.
"""

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

import torch

from kvstrata.gpu import Copy, Device, PagePool, Slab, Transfer, copy_host_rows

__all__ = ["POISON", "SimDevice"]

POISON = 0xEE  # a byte of rows that nobody has written yet


class SimDevice(Device):
    """`seed`: of the delays. `delay`: their mean in seconds. `calm`: the share of kernels and copies that have none, 0 to 1."""

    asynchronous = True

    def __init__(self, seed: int = 0, delay: float = 1e-4, calm: float = 0.5) -> None:
        self._compute = _Queue("compute", random.Random(f"compute {seed}"), delay, calm)
        self._copies = _Queue("copies", random.Random(f"copies {seed}"), delay, calm)
        self._lock = threading.RLock()  # a lease that the collector finds may be given back inside mark_batch
        self._passed = _Milestone()  # the latest fence that the compute queue has come to
        self._started = 0
        self._to_fail: set[int] = set()
        self._data = torch.empty(0, dtype=torch.uint8)

    # --- what an engine does

    def compute(self, kernel: Callable[[], object]) -> None:
        """Enqueues a kernel. It must not raise; if it does, close() raises the same."""
        self._compute.put(kernel)

    def poison(self, rows: Iterable[int]) -> None:
        """Enqueues a kernel that overwrites whole rows of the pool: who reads one without having written it will see that."""
        where = torch.tensor(list(rows), dtype=torch.long)
        self.compute(lambda: self._data.index_fill_(0, where, POISON))

    def mark_batch(self) -> int:
        with self._lock:
            self._batch += 1
            self._compute.put(partial(self._passed.reach, self._batch), delayed=False)
            return self._batch

    def synchronize(self, timeout: float | None = None) -> bool:
        """Waits until everything that was submitted to the compute queue so far has run; False after `timeout` seconds."""
        return self._passed.wait(self.mark_batch(), timeout)

    # --- what a test does to the copies

    def fail_copy(self, number: int = 1) -> None:
        """The `number`-th copy from now on moves half of its rows and fails."""
        with self._lock:
            self._to_fail.add(self._started + number)

    def stall(self) -> None:
        """No copy goes on until resume(), also one that has begun."""
        self._copies.running.clear()

    def resume(self) -> None:
        self._copies.running.set()

    # --- Device

    def allocate(self, rows: int, stride: int) -> torch.Tensor:
        self._data = torch.full((rows, stride), POISON, dtype=torch.uint8, device="cpu")
        return self._data

    def start(self, copy: Copy, pool: PagePool, slab: Slab) -> Transfer:
        with self._lock:
            if copy.fence > self._batch:
                raise RuntimeError(f"a copy is to wait for batch {copy.fence}, but the latest is {self._batch}")
            self._started += 1
            fails = self._started in self._to_fail
        if fails:
            half = len(copy.slab_rows) // 2
            copy = Copy(copy.ticket, copy.up, copy.slab_rows[:half], copy.device_rows[:half], copy.fence)
        transfer = _SimTransfer(self._compute, pool.groups, not fails)
        self._copies.put(partial(self._passed.wait, copy.fence), delayed=False)
        for number, layers in enumerate(pool.groups, 1):
            self._copies.put(partial(copy_host_rows, copy, pool, slab, *pool.group_range(layers)))
            self._copies.put(partial(transfer.groups_copied.reach, number), delayed=False)
        return transfer

    def close(self) -> None:
        self.resume()
        for queue in (self._copies, self._compute):
            queue.close()


class _SimTransfer(Transfer):
    def __init__(self, compute: "_Queue", groups: tuple[range, ...], ends_well: bool) -> None:
        self._compute = compute
        self._groups = groups
        self._ends_well = ends_well
        self.groups_copied = _Milestone()

    def wait_layer(self, layer: int, timeout: float | None) -> bool:
        group = next(number for number, layers in enumerate(self._groups, 1) if layer in layers)
        self._compute.put(partial(self.groups_copied.wait, group), delayed=False)
        return True

    def result(self) -> bool:
        self.groups_copied.wait(len(self._groups))
        return self._ends_well


class _Milestone:
    """A number that only grows, and who waits for it."""

    def __init__(self) -> None:
        self._reached = 0
        self._changed = threading.Condition()

    def reach(self, number: int) -> None:
        with self._changed:
            self._reached = max(self._reached, number)
            self._changed.notify_all()

    def wait(self, number: int, timeout: float | None = None) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._reached >= number, timeout)


class _Queue:
    """A thread that runs what it is given, in order; also after something raised, which close() raises again."""

    def __init__(self, name: str, dice: random.Random, delay: float, calm: float) -> None:
        self._dice = dice
        self._delay = delay
        self._calm = calm
        self._work: deque[tuple[Callable[[], object] | None, bool]] = deque()
        self._filled = threading.Semaphore(0)
        self._error: Exception | None = None
        self.running = threading.Event()
        self.running.set()
        self._thread = threading.Thread(target=self._run, name=f"kvstrata-sim-{name}", daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], object] | None, delayed: bool = True) -> None:
        self._work.append((work, delayed))
        self._filled.release()

    def close(self) -> None:
        self.put(None, delayed=False)
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while self._filled.acquire():
            work, delayed = self._work.popleft()
            if work is None:
                return
            if delayed and self._dice.random() >= self._calm:
                time.sleep(self._dice.expovariate(1 / self._delay))
            self.running.wait()
            try:
                work()
            except Exception as error:
                self._error = self._error or error
