"""CUDA devices: copies on a stream of their own, from a slab that is pinned chunk by chunk in the background."""

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from kvstrata.gpu import Copy, Device, PagePool, Slab, Transfer

__all__ = ["CudaDevice"]

log = logging.getLogger("kvstrata")
_cuda: Any = torch.cuda  # parts of it have no types
PIN_PATIENCE = 5.0  # seconds that close() gives copies under way, and the pinning of a chunk


class _CudaTransfer(Transfer):
    def __init__(self, device: torch.device, events: Sequence[Any], groups: Sequence[range]) -> None:
        self._device = device
        self._events = events
        self._groups = groups

    def wait_layer(self, layer: int, timeout: float | None) -> bool:
        for event, layers in zip(self._events, self._groups, strict=True):
            if layer in layers:
                torch.cuda.current_stream(self._device).wait_event(event)
        return True

    def result(self) -> bool:
        self._events[-1].synchronize()
        return True


class CudaDevice(Device):
    """One CUDA device."""

    asynchronous = True
    _KEPT_EVENTS = 4096  # an older batch has ended long ago

    def __init__(self, device: torch.device, pin_chunk_bytes: int = 64 << 20) -> None:
        self.device = torch.device(device.type, device.index if device.index is not None else torch.cuda.current_device())
        self._copies = _cuda.Stream(self.device)
        self._lock = threading.RLock()  # a lease that the collector finds may be given back inside mark_batch
        self._events: dict[int, Any] = {}
        self._slab: torch.Tensor | None = None
        self._pin_chunk_bytes = pin_chunk_bytes
        self._pinned: list[int] = []
        self._stop = threading.Event()
        self._pinner: threading.Thread | None = None
        self.pin_error = ""  # why (part of) the slab stayed pageable

    def allocate(self, rows: int, stride: int) -> torch.Tensor:
        try:
            data = torch.empty((rows, stride), dtype=torch.uint8, device=self.device)
        except torch.cuda.OutOfMemoryError as error:
            raise RuntimeError(
                f"no device memory for a page pool of {rows * stride:,} bytes; lower kvc2.utilization_percentage"
            ) from error
        self._copies.wait_stream(torch.cuda.current_stream(self.device))  # the allocator may hand out what a kernel still uses
        return data

    def mark_batch(self) -> int:
        event = _cuda.Event()
        with self._lock:  # numbers in the order of the stream: who waits for one has waited for all before it
            event.record(torch.cuda.current_stream(self.device))
            self._batch += 1
            self._events[self._batch] = event
            self._events.pop(self._batch - self._KEPT_EVENTS, None)
            return self._batch

    def _fence_event(self, fence: int) -> Any | None:
        with self._lock:
            return self._events.get(fence)

    def attach(self, slab: Slab) -> None:
        self._slab = torch.from_numpy(slab.bytes())
        self._pinner = threading.Thread(target=self._pin, args=(slab,), name="kvstrata-pin", daemon=True)
        self._pinner.start()

    def _pin(self, slab: Slab) -> None:
        _cuda.set_device(self.device)  # of this thread: else a context would be made on the first one
        # One huge registration can fail or block for minutes; a chunk that fails leaves the rest pageable, and working.
        cudart = _cuda.cudart()
        rows = max(1, self._pin_chunk_bytes // slab.stride)
        for first in range(0, slab.rows, rows):
            if self._stop.is_set():
                return
            size = min(rows, slab.rows - first) * slab.stride
            status = int(cudart.cudaHostRegister(slab.address + first * slab.stride, size, 0))
            if status != 0:
                done, whole = first * slab.stride, slab.rows * slab.stride
                self.pin_error = (
                    f"cudaHostRegister of {size:,} bytes returned {status}: {whole - done:,} of {whole:,} bytes of the CPU tier "
                    "stay pageable, so copies of them are slower"
                )
                log.warning("%s", self.pin_error)
                return
            self._pinned.append(slab.address + first * slab.stride)

    def start(self, copy: Copy, pool: "PagePool", slab: Slab) -> Transfer:
        assert self._slab is not None, "attach() comes first"
        try:
            return self._enqueue(copy, pool, self._slab)
        except BaseException:
            self._copies.synchronize()  # what was enqueued must not go on into rows that are somebody else's by then
            raise

    def _enqueue(self, copy: Copy, pool: PagePool, slab: torch.Tensor) -> Transfer:
        events = []
        with torch.cuda.stream(self._copies):
            fence = self._fence_event(copy.fence)
            if fence is not None:
                self._copies.wait_event(fence)
            for layers in pool.groups:
                offset, size = pool.group_range(layers)
                for here, there in zip(copy.slab_rows.tolist(), copy.device_rows.tolist(), strict=True):
                    slab_part = slab[here, offset : offset + size]
                    pool_part = pool.data[there, offset : offset + size]
                    target, source = (pool_part, slab_part) if copy.up else (slab_part, pool_part)
                    target.copy_(source, non_blocking=True)
                event = _cuda.Event()
                event.record(self._copies)
                events.append(event)
        return _CudaTransfer(self.device, events, pool.groups)

    def close(self) -> None:
        self._stop.set()
        end = time.monotonic() + PIN_PATIENCE
        while not self._copies.query():
            if time.monotonic() > end:
                log.warning("device copies do not end: the CPU tier stays pinned until the process ends")
                return
            time.sleep(0.001)
        if self._pinner is not None:
            self._pinner.join(PIN_PATIENCE)
            if self._pinner.is_alive():
                log.warning("a call of cudaHostRegister does not return: the CPU tier stays pinned until the process ends")
                return
        cudart = _cuda.cudart()
        while self._pinned:
            cudart.cudaHostUnregister(self._pinned.pop())
