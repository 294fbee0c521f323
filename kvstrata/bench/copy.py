"""`kvstrata bench copy`: pages of a lease between the device pool and the CPU tier, beside memcpy.

Two ways pages lie on a device: as rows (our own pool), and as blocks whose layers lie apart, as engines with a pool of their own
have them. `save`: from publishing until the pages are in the CPU tier. `load`: from the lease until they are on the device. Limit:
memcpy of the same bytes on one thread, page by page. Every page is compared after it was loaded.
"""

import ctypes
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstrata._core import copy_layers
from kvstrata.bench.held import Tokens, random_tokens
from kvstrata.bench.report import Row, WrongData, compare
from kvstrata.cache import PrefixCache
from kvstrata.layout import PageLayout, PlaneSpec
from kvstrata.limits import Limits

__all__ = ["CASES", "Case", "measure"]

Bytes = npt.NDArray[np.uint8]
LAYERS = 32
PATIENCE_S = 60.0


class Case(NamedTuple):
    """Pages of `page_mib` MiB and `page_size` tokens; `layers` apart on the device, 1: rows."""

    page_size: int
    page_mib: int
    layers: int


CASES = (Case(256, 2, 1), Case(256, 32, 1), Case(16, 2, LAYERS))


def measure(cases: tuple[Case, ...], total_mib: int, rounds: int, say: Callable[[str], None]) -> Iterator[Row]:
    """Rows for each case: about `total_mib` MiB are moved at a time."""
    for case in cases:
        pages = max(2, total_mib // case.page_mib)
        say(f"copying {pages} pages of {case.page_mib} MiB, {'rows' if case.layers == 1 else f'{case.layers} layers apart'}")
        device = (PoolRows if case.layers == 1 else LayeredBlocks)(case, pages)
        try:
            yield from figures(device, case, pages, rounds)
        finally:
            device.close()


def figures(device: "DeviceSide", case: Case, pages: int, rounds: int) -> Iterator[Row]:
    total = pages * device.layout.row_bytes
    plain = Memcpy(pages, device.layout.row_bytes)
    content = np.random.default_rng(0).integers(0, 256, (pages, device.layout.row_bytes), np.uint8)
    figures: dict[str, list[float]] = {"save": [], "save_limit": [], "load": [], "load_limit": []}
    before = None
    for round_ in range(rounds + 2):
        tokens = random_tokens(pages * case.page_size, round_)
        figures["save"].append(total / device.save(tokens, stamped(content, round_)) / 1e9)
        figures["save_limit"].append(total / plain.seconds() / 1e9)
        if before is not None:
            figures["load"].append(total / device.load(before) / 1e9)
            if not np.array_equal(device.found(), stamped(content, round_ - 1)):
                raise WrongData("pages did not come back as they were saved")
            figures["load_limit"].append(total / plain.seconds() / 1e9)
        before = tokens
    for name in ("save", "load"):  # the first touches memory
        yield compare(name, "GB/s", figures[name][1:], figures[f"{name}_limit"][1:], **case._asdict(), pages=pages)


def stamped(content: Bytes, number: int) -> Bytes:
    """The same memory, different in every page for each number."""
    content[:, :8] = np.frombuffer(np.uint64(number + 1).tobytes(), np.uint8)
    content[:, 8:16] = np.arange(len(content), dtype=np.uint64).view(np.uint8).reshape(-1, 8)
    return content


class DeviceSide(ABC):
    """A cache and the memory its pages are used in."""

    def __init__(self, case: Case, gpu_pages: int, cpu_pages: int) -> None:
        per_token = (case.page_mib << 20) // case.page_size // LAYERS
        specs = [PlaneSpec(layer, "kv", "uint8", (1, per_token)) for layer in range(LAYERS)]
        self.layout = PageLayout.from_planes(specs, page_size=case.page_size, dtype="uint8", tag="bench")
        self.cache = PrefixCache(self.layout, Limits(gpu_pages, cpu_pages))

    @abstractmethod
    def save(self, tokens: Tokens, content: Bytes) -> float:
        """Puts uint8 `[pages, row_bytes]` on the device; seconds until it is in the CPU tier."""

    @abstractmethod
    def load(self, tokens: Tokens) -> float:
        """Seconds until what was saved of these tokens is on the device."""

    @abstractmethod
    def found(self) -> Bytes:
        """What the last load brought, uint8 `[pages, row_bytes]`."""

    def close(self) -> None:
        self.cache.close()


class PoolRows(DeviceSide):
    """Our own pool: a page is one row."""

    def __init__(self, case: Case, pages: int) -> None:
        super().__init__(case, pages, 3 * pages)
        self._rows: npt.NDArray[np.int32] = np.empty(0, np.int32)

    def save(self, tokens: Tokens, content: Bytes) -> float:
        with self.cache.lease(tokens, leave=0, must=True) as lease:
            self.cache.pool.data.numpy()[lease.rows, : self.layout.row_bytes] = content
            started = time.perf_counter()
            lease.publish(len(tokens))
            if not self.cache.flush(PATIENCE_S):
                raise WrongData("pages were not saved")
            return time.perf_counter() - started

    def load(self, tokens: Tokens) -> float:
        started = time.perf_counter()
        with self.cache.lease(tokens, leave=0, must=True) as lease:
            hit = lease.wait(PATIENCE_S)
            took = time.perf_counter() - started
            if hit != len(tokens) or lease.sources["cpu"] != hit:
                raise WrongData(f"{hit} of {len(tokens)} tokens were loaded: {lease.sources}")
            self._rows = lease.rows
        return took

    def found(self) -> Bytes:
        rows: Bytes = self.cache.pool.data.numpy()[self._rows, : self.layout.row_bytes]
        return rows


class LayeredBlocks(DeviceSide):
    """An engine's pool: a block's layers lie apart; copies are carried out as the vLLM connector does it."""

    def __init__(self, case: Case, pages: int) -> None:
        super().__init__(case, 0, 3 * pages)
        size = self.layout.row_bytes // LAYERS
        self._memory = np.zeros((LAYERS, pages, size), np.uint8)
        self._layers = np.array([(one.ctypes.data, size, at * size, size) for at, one in enumerate(self._memory)], np.int64)
        self._blocks = np.random.default_rng(1).permutation(pages).astype(np.int32)
        self._slab = self.cache.slab

    def save(self, tokens: Tokens, content: Bytes) -> float:
        self._memory[:, self._blocks] = content.reshape(len(self._blocks), LAYERS, -1).swapaxes(0, 1)
        with self.cache.lease(tokens, leave=0, read=False, must=True) as lease:
            started = time.perf_counter()
            self._copy(lease.save(0, self._blocks, 0))
            return time.perf_counter() - started

    def load(self, tokens: Tokens) -> float:
        started = time.perf_counter()
        with self.cache.lease(tokens, leave=0, must=True) as lease:
            hit = lease.wait(PATIENCE_S)
            self._copy(lease.load(0, self._blocks))
            took = time.perf_counter() - started
        if hit != len(tokens):
            raise WrongData(f"{hit} of {len(tokens)} tokens were loaded")
        return took

    def found(self) -> Bytes:
        return self._memory[:, self._blocks].swapaxes(0, 1).reshape(len(self._blocks), -1)

    def _copy(self, ticket: int) -> None:
        if not ticket:
            raise WrongData("there is nothing to copy")
        for plan in self.cache.take_copies():
            place = self._slab
            copy_layers(self._layers, plan.blocks, place.address, place.stride, plan.slab, plan.up, streaming=not plan.up)
            self.cache.copied(plan.ticket, True)


class Memcpy:
    """Plain copies of the same size, page by page in no order, on this thread."""

    def __init__(self, pages: int, size: int) -> None:
        self._here, self._there = np.ones((pages, size), np.uint8), np.ones((pages, size), np.uint8)
        order = np.random.default_rng(2).permutation(pages)
        self._pairs = [(self._there[int(to)].ctypes.data, self._here[int(page)].ctypes.data) for page, to in enumerate(order)]
        self._size = size

    def seconds(self) -> float:
        started = time.perf_counter()
        for target, source in self._pairs:
            ctypes.memmove(target, source, self._size)
        return time.perf_counter() - started
