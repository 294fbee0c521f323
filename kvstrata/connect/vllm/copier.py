"""Copies between rows of the slab and vLLM's blocks, layer by layer, for one rank's slice."""

import mmap
import os
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvstrata._core import copy_layers
from kvstrata.connect.vllm.blocks import BlockLayout
from kvstrata.connect.vllm.plan import BlockCopy, SharedSlab

__all__ = ["DeviceBlocks", "HostCopier", "MappedSlab", "TorchCopier"]


class MappedSlab:
    """The slab in this process: `address`, and its bytes as uint8 `[rows, stride]`. Raises OSError where it cannot be mapped."""

    def __init__(self, slab: SharedSlab) -> None:
        # /proc names the descriptor of the process that made it; the mapping stays when that process is gone.
        descriptor = os.open(f"/proc/{slab.pid}/fd/{slab.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            self._map = mmap.mmap(descriptor, slab.rows * slab.stride, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(descriptor)
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8).reshape(slab.rows, slab.stride)
        self.address = int(self.bytes.ctypes.data)
        self.stride = slab.stride


class DeviceBlocks:
    """vLLM's blocks of one rank, layer by layer in the order of the row: `bytes[layer]` is uint8 `[blocks, bytes of a block]`.

    `count`: blocks of the pool. Raises ValueError where a block is not one contiguous range of bytes.
    """

    def __init__(self, caches: dict[str, torch.Tensor], blocks: BlockLayout, count: int) -> None:
        self.bytes: list[torch.Tensor] = []
        for name, size in zip(blocks.layers, blocks.block_bytes, strict=True):
            self.bytes.append(_as_blocks(name, caches[name], count, size))
        self.count = count

    @property
    def on_host(self) -> bool:
        return all(one.device.type == "cpu" for one in self.bytes)


def _as_blocks(name: str, cache: torch.Tensor, count: int, size: int) -> torch.Tensor:
    """One layer's cache as uint8 `[count, size]`, over the same memory. The kernel's blocks may be smaller than vLLM's."""
    kernel, rest = divmod(cache.shape[0], max(count, 1))
    width, step = cache.element_size(), cache.stride(0) * cache.element_size()
    whole = cache[0].numel() * width * kernel == size and _dense(cache[0])
    if not kernel or rest or not whole or (kernel > 1 and step * kernel != size):
        raise ValueError(
            f"layer {name} has a KV cache of shape {tuple(cache.shape)} and strides {cache.stride()}, in which the {size} bytes "
            f"of a block (one of {count}) are not contiguous; use an attention backend with the KV cache layout LBHNC"
        )
    memory = torch.empty(0, dtype=torch.uint8, device=cache.device).set_(cache.untyped_storage())
    return memory.as_strided((count, size), (step * kernel, 1), cache.storage_offset() * width)


def _dense(block: torch.Tensor) -> bool:
    """Whether its elements fill one range, in whatever order of axes."""
    expect = 1
    for stride, length in sorted(zip(block.stride(), block.shape, strict=True)):
        if length > 1 and stride != expect:
            return False
        expect *= length
    return True


class HostCopier:
    """For a device that is host memory: copied by the core, without the interpreter lock."""

    def __init__(self, device: DeviceBlocks, blocks: BlockLayout, rank: int, slab: MappedSlab) -> None:
        offsets = [part[blocks.slice_of(rank)] for part in blocks.offsets]
        self._slab, self._blocks = slab, blocks
        # Of the first block of a page; the others' bytes follow it in each layer.
        self._layers = np.array(
            [(one.data_ptr(), one.stride(0), offset, one.shape[1]) for one, offset in zip(device.bytes, offsets, strict=True)],
            np.int64,
        )
        self._device = device  # its memory lives as long as these addresses

    def copy(self, what: BlockCopy, up: bool) -> None:
        for part in range(self._blocks.blocks_per_page):
            chosen = what.parts == part
            rows, blocks = np.ascontiguousarray(what.rows[chosen]), np.ascontiguousarray(what.blocks[chosen])
            layers = self._layers.copy()
            layers[:, 2] += part * layers[:, 3]
            # What is loaded is read at once, what is saved is not.
            copy_layers(layers, blocks, self._slab.address, self._slab.stride, rows, up, streaming=not up)


class TorchCopier:
    """For any device of torch's: on the current stream, so after what computed the blocks and before what reads them; waits for
    it."""

    def __init__(self, device: DeviceBlocks, blocks: BlockLayout, rank: int, slab: MappedSlab) -> None:
        self._offsets = [part[blocks.slice_of(rank)] for part in blocks.offsets]
        self._slab, self._device = torch.from_numpy(slab.bytes), device

    def copy(self, what: BlockCopy, up: bool) -> None:
        rows = torch.from_numpy(what.rows.astype(np.int64))
        for one, offset in zip(self._device.bytes, self._offsets, strict=True):
            size = one.shape[1]
            blocks = torch.from_numpy(what.blocks.astype(np.int64)).to(one.device)
            at = torch.from_numpy(what.parts.astype(np.int64)) * size + offset
            columns = at[:, None] + torch.arange(size)[None, :]
            if up:
                one[blocks] = self._slab[rows[:, None], columns].to(one.device)
            else:
                self._slab[rows[:, None], columns] = one[blocks].cpu()


def make_copier(device: DeviceBlocks, blocks: BlockLayout, rank: int, slab: MappedSlab) -> Any:
    """What copies for this device."""
    return (HostCopier if device.on_host else TorchCopier)(device, blocks, rank, slab)
