"""The device's side of the cache: the page pool, and the copies between its rows and the slab.

Stream order, all of it here and in the devices (cuda.py, sim_device.py). A batch is what the engine submits to its compute stream
between two calls of `mark_batch`, which returns the batch's number, the *fence*. A copy out of the pool starts after the fence of
the batch that wrote the pages. A copy into the pool starts after the fence of the last batch that may still read the rows' former
content. A batch that reads loaded pages is submitted after their copy has ended, or after its stream was made to wait for it
layer by layer (`Transfer.wait_layer`).
"""

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvstrata._core import Prefault, copy_rows
from kvstrata.layout import PageLayout
from kvstrata.machine import memory

__all__ = ["Copy", "Device", "HostDevice", "LayerViews", "PagePool", "Slab", "Transfer", "make_device", "plane_views"]

SCRATCH_ROW = 0
LAYER_GROUPS = 4  # parts of a row that are copied and waited for one by one: fewer, larger copies against earlier first layers


class Slab(NamedTuple):
    """The CPU tier's memory: `rows` rows, `stride` bytes apart, from `address` on."""

    address: int
    rows: int
    stride: int

    def bytes(self) -> npt.NDArray[np.uint8]:
        """uint8 `[rows, stride]`, a view."""
        memory = (ctypes.c_uint8 * (self.rows * self.stride)).from_address(self.address)
        return np.ctypeslib.as_array(memory).reshape(self.rows, self.stride)


@dataclass(frozen=True, slots=True)
class Copy:
    """One batch of rows to move. `up`: slab -> pool. `fence`: see the module's first lines."""

    ticket: int
    up: bool
    slab_rows: npt.NDArray[np.int32]
    device_rows: npt.NDArray[np.int32]
    fence: int


class Transfer(ABC):
    """A copy under way."""

    @abstractmethod
    def wait_layer(self, layer: int, timeout: float | None) -> bool:
        """The layer's bytes are there for work submitted from now on: by waiting here, or by making the compute stream wait."""

    @abstractmethod
    def result(self) -> bool:
        """Blocks until the copy has ended; whether it ended well."""


class Device(ABC):
    """Memory and order of one kind of device."""

    asynchronous: bool  # whether work goes on after the call that submitted it returned
    _batch = 0

    @property
    def marked(self) -> int:
        """The latest fence that was given out, 0: none."""
        return self._batch

    @abstractmethod
    def allocate(self, rows: int, stride: int) -> torch.Tensor:
        """uint8 `[rows, stride]` of device memory. Raises RuntimeError with a sentence when there is not enough."""

    @abstractmethod
    def mark_batch(self) -> int:
        """Ends a batch: the fence of everything the calling thread submitted so far."""

    @abstractmethod
    def start(self, copy: Copy, pool: "PagePool", slab: Slab) -> Transfer:
        """Starts a copy and does not wait for it where the device can avoid that."""

    def attach(self, slab: Slab) -> None:  # noqa: B027 - not every device has something to prepare
        """Told once where the slab is; may pin it, in the background."""

    def close(self) -> None:  # noqa: B027 - nor to give back
        """No copy is under way any more."""


class _Ended(Transfer):
    """A copy that was over when start() returned."""

    def wait_layer(self, layer: int, timeout: float | None) -> bool:
        return True

    def result(self) -> bool:
        return True


class HostDevice(Device):
    """Device "cpu": the pool is ordinary memory, torch computes synchronously, so order is program order."""

    asynchronous = False

    def allocate(self, rows: int, stride: int) -> torch.Tensor:
        known = memory()
        limit = min(known.total, known.cgroup_limit or known.total)
        if rows * stride > limit:
            raise RuntimeError(
                f"a page pool of {rows * stride:,} bytes does not fit into the {limit:,} bytes of memory here; "
                "lower kvc2.gpu_memory_size_GB"
            )
        try:
            data = torch.empty((rows, stride), dtype=torch.uint8, device="cpu")
        except RuntimeError as error:
            raise RuntimeError(f"no memory for a page pool of {rows * stride:,} bytes; lower kvc2.gpu_memory_size_GB") from error
        self._filling = Prefault(data.numpy())  # else the first requests would pay for the page faults
        return data

    def close(self) -> None:
        self._filling.stop()

    def mark_batch(self) -> int:
        self._batch += 1
        return self._batch

    def start(self, copy: Copy, pool: "PagePool", slab: Slab) -> Transfer:
        copy_host_rows(copy, pool, slab, 0, pool.layout.row_bytes)
        return _Ended()


def copy_host_rows(copy: Copy, pool: "PagePool", slab: Slab, offset: int, size: int) -> None:
    """Copies bytes [offset, offset + size) of each row, for pools in host memory; the interpreter lock is released meanwhile."""
    there = (pool.data.data_ptr(), pool.data.stride(0), copy.device_rows)
    here = (slab.address, slab.stride, copy.slab_rows)
    target, source = (there, here) if copy.up else (here, there)
    copy_rows(*target, *source, offset, size, streaming=not copy.up)  # what is loaded is read at once, what is saved is not


def make_device(device: "str | torch.device | Device") -> Device:
    """The Device for "cpu", "cuda", "cuda:1", a torch device, or a Device as it is (tests). Raises ValueError for others."""
    if isinstance(device, Device):
        return device
    known = f"device {device!r} is not supported; use 'cpu' or 'cuda[:index]'"
    if not isinstance(device, str | torch.device):
        raise ValueError(known)
    try:
        where = torch.device(device)
    except RuntimeError:
        raise ValueError(known) from None
    if where.type == "cpu":
        return HostDevice()
    if where.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"device {str(device)!r} was asked for, but torch sees no CUDA device; use device='cpu'")
        from kvstrata.cuda import CudaDevice

        return CudaDevice(where)
    raise ValueError(known)


class LayerViews(NamedTuple):
    """The planes of one layer in the pool, by name. GQA: `k` and `v` `[rows, page_size, kv_heads, head_dim]`. MLA: `latent`
    `[rows, page_size, 1, width]`."""

    planes: dict[str, torch.Tensor]

    @property
    def k(self) -> torch.Tensor:
        return self.planes["k"]

    @property
    def v(self) -> torch.Tensor:
        return self.planes["v"]


def plane_views(rows: torch.Tensor, layout: PageLayout, layer: int) -> dict[str, torch.Tensor]:
    """The planes of a layer in page rows, uint8 `[rows, row_stride]`: by name, each `[rows, page_size, *shape]` of its dtype."""
    planes = {}
    for plane in layout.layer_planes(layer):
        part = rows[:, plane.offset : plane.offset + plane.bytes].view(getattr(torch, plane.dtype))
        planes[plane.name] = part.view(len(rows), layout.page_size, *plane.shape)
    return planes


class PagePool:
    """The hot tier: one allocation of `rows` page rows, made once, never moved. Row 0 is the scratch row: padding is written there
    and nothing is ever read from it.

    `data`: uint8 `[rows, row_stride]`. `layers[i]`: typed views of layer i whose addresses never change.
    """

    scratch_row = SCRATCH_ROW

    def __init__(self, layout: PageLayout, rows: int, device: "str | torch.device | Device" = "cpu") -> None:
        if rows < 2:
            raise ValueError(f"a page pool of {rows} rows is too small: it needs the scratch row and at least one page")
        self.layout = layout
        self.rows = rows
        self.page_size = layout.page_size
        self.backend = make_device(device)
        with torch.inference_mode(False):  # else only code in that mode could write to it
            self.data = self.backend.allocate(rows, layout.row_stride)
            self.data[SCRATCH_ROW].zero_()
            self.layers = tuple(LayerViews(plane_views(self.data, layout, layer)) for layer in layout.layers)
        self.device = self.data.device
        self.dtype: torch.dtype = getattr(torch, layout.dtype)
        self.groups = _split(len(self.layers), LAYER_GROUPS)
        mark: Callable[[torch.Tensor], None] = torch._dynamo.mark_static_address
        mark(self.data)
        for views in self.layers:
            for view in views.planes.values():
                mark(view)

    @property
    def pages(self) -> int:
        """Rows of the pool, the scratch row included: page ids below it are rows."""
        return self.rows

    def group_range(self, layers: range) -> tuple[int, int]:
        """(offset, bytes) in a row of some adjacent layers, given by position."""
        first, _ = self.layout.layer_range(self.layout.layers[layers.start])
        last, size = self.layout.layer_range(self.layout.layers[layers.stop - 1])
        return first, last + size - first

    def mark_batch(self) -> int:
        """Call after submitting a forward: its fence, for Lease.publish(ready=...) and Lease.release(fence=...)."""
        return self.backend.mark_batch()


def _split(layers: int, groups: int) -> tuple[range, ...]:
    groups = min(groups, layers)
    bounds = [layers * i // groups for i in range(groups + 1)]
    return tuple(range(bounds[i], bounds[i + 1]) for i in range(groups))
