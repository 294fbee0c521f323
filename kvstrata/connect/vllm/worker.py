"""A worker's role: it maps the slab and copies. It decides nothing, and has nothing that must be saved when it is killed."""

import logging
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

from kvstrata.connect.vllm.blocks import BlockLayout
from kvstrata.connect.vllm.copier import DeviceBlocks, MappedSlab, make_copier
from kvstrata.connect.vllm.plan import FORMAT, BlockCopy, Plan, Report, SharedSlab

__all__ = ["Handshake", "Worker", "layout_of"]

log = logging.getLogger("kvstrata")


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """What only a worker knows of how its blocks look inside: see layout_of."""

    layout: str


def layout_of(vllm_config: Any, caches: dict[str, torch.Tensor], count: int) -> str:
    """How the attention backends lay out a block: backend, instruction set (CPU blocks are tiled for it), dtype, shape, order of
    axes."""
    layers = vllm_config.compilation_config.static_forward_context
    found = []
    for name, cache in caches.items():
        layer = layers.get(name)
        backend = getattr(layer, "attn_backend", None)
        strides: tuple[int, ...] = cache.stride()
        axes = sorted(range(1, cache.dim()), key=lambda axis: (-strides[axis], axis))
        shape = (cache.shape[0] // max(count, 1), *cache.shape[1:])
        kind = backend.get_name() if backend is not None else "unknown"
        found.append(f"{kind}/{getattr(layer, 'isa', '-')}/{cache.device.type}/{cache.dtype}/{shape}/{axes}")
    return ";".join(dict.fromkeys(found))


class Worker:
    """One rank's. Copies are over when a call returns, so blocks are free for whatever vLLM does with them in the next step."""

    def __init__(self, vllm_config: Any, blocks: BlockLayout, count: int, rank: int) -> None:
        self._vllm_config = vllm_config
        self._blocks = blocks
        self._count = count
        self._rank = rank
        self._device: DeviceBlocks | None = None
        self._copier: Any = None
        self._slab: SharedSlab | None = None
        self._loaded: set[str] = set()
        self._bad: set[int] = set()
        self._report = Report()
        self.layout = ""

    def register(self, caches: dict[str, torch.Tensor]) -> None:
        """Told once where the blocks are. Raises ValueError where they cannot be copied as they are."""
        known = {name: caches[name] for name in self._blocks.layers}
        self._device = DeviceBlocks(known, self._blocks, self._count)
        self.layout = layout_of(self._vllm_config, known, self._count)

    def load(self, plan: Plan) -> None:
        for copy in plan.loads:
            ok = not copy.lost and self._copy(plan, copy, up=True)
            if not ok:
                self._bad.update(copy.blocks.tolist())
            self._loaded.add(copy.request)
            if copy.ticket:
                self._report.add(copy.ticket, ok)

    def save(self, plan: Plan) -> None:
        for copy in plan.saves:
            ok = not self._blocks.writes(self._rank) or self._copy(plan, copy, up=False)
            self._report.add(copy.ticket, ok)

    def _copy(self, plan: Plan, copy: BlockCopy, up: bool) -> bool:
        try:
            self._attach(plan)
            self._copier.copy(copy, up)
        except Exception:  # a request must be recomputed for it, and nothing more
            log.exception("rank %d could not copy %d blocks of request %s", self._rank, len(copy.blocks), copy.request)
            return False
        return True

    def _attach(self, plan: Plan) -> None:
        """Maps the slab when it is first used: the scheduler's role is made after the workers'."""
        if plan.slab == self._slab:
            return
        if plan.format != FORMAT:
            raise RuntimeError(f"the scheduler sends plans of format {plan.format}, and this worker reads format {FORMAT}")
        assert self._device is not None, "register() comes first"
        self._copier = make_copier(self._device, self._blocks, self._rank, MappedSlab(plan.slab))
        self._slab = plan.slab

    def take_loaded(self) -> set[str]:
        """Requests whose loads have ended since the last call, well or not."""
        loaded, self._loaded = self._loaded, set()
        return loaded

    def take_bad_blocks(self) -> set[int]:
        """Blocks that were not filled by a load that ended since the last call."""
        bad, self._bad = self._bad, set()
        return bad

    def take_report(self) -> Report | None:
        report, self._report = self._report, Report()
        return report if report.ended else None
