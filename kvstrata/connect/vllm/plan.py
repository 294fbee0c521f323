"""What passes between the two roles of the connector: a plan of copies for each step, and the report about them. Plain arrays.

A row of the slab holds one page of all ranks; a page is `blocks_per_page` blocks of vLLM. A copy names, block by block, the row,
the block's place in it (`parts`), and the device block; every rank copies its own slice of them.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

__all__ = ["FORMAT", "BlockCopy", "Plan", "Report", "SharedSlab"]

FORMAT = 1  # of a Plan; both roles must speak the same

Ints = npt.NDArray[np.int32]


class SharedSlab(NamedTuple):
    """Where the slab is: descriptor `fd` of process `pid` (a memfd: it ends with the last process that maps it), `rows` rows
    `stride`
    bytes apart, `address` within that process. `tag`: what the scheduler takes the rows to be."""

    pid: int
    fd: int
    address: int
    rows: int
    stride: int
    tag: str


class BlockCopy(NamedTuple):
    """Blocks to copy between the slab and the device, int32 `[blocks]` each. `ticket`: of the core, which keeps the rows until the
    copy
    was reported. `request`: whose blocks they are; what it loads is reported to vLLM by that name. `lost`: the rows could not be
    had after all, and the load has failed before it began."""

    ticket: int
    request: str
    rows: Ints
    parts: Ints
    blocks: Ints
    lost: bool = False


@dataclass
class Plan(KVConnectorMetadata):
    """One step's copies: `loads` into blocks that no forward pass reads or writes yet, `saves` of blocks that this step's
    completes."""

    slab: SharedSlab
    loads: list[BlockCopy] = field(default_factory=list)
    saves: list[BlockCopy] = field(default_factory=list)
    format: int = FORMAT


@dataclass
class Report(KVConnectorWorkerMetadata):
    """Copies that have ended: ticket -> (ranks that carried it out, all of them well)."""

    ended: dict[int, tuple[int, bool]] = field(default_factory=dict)

    def add(self, ticket: int, ok: bool, ranks: int = 1) -> None:
        count, good = self.ended.get(ticket, (0, True))
        self.ended[ticket] = (count + ranks, good and ok)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "Report":
        """Both ranks' reports as one."""
        assert isinstance(other, Report)
        both = Report(dict(self.ended))
        for ticket, (ranks, ok) in other.ended.items():
            both.add(ticket, ok, ranks)
        return both
