"""Guest mode: whoever owns the device is told where the CPU tier lies and which rows to copy, and copies them."""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstrata._core import Core
from kvstrata.arguments import check_flag, check_seconds, check_whole

if TYPE_CHECKING:
    from kvstrata.mover import Mover

__all__ = ["CopyPlan", "GuestMode", "SlabPlace"]


class SlabPlace(NamedTuple):
    """The CPU tier's memory: `rows` rows, `stride` bytes apart, from `address` on in this process; `fd`: a descriptor that other
    processes can map (shared_slab), -1 for none."""

    address: int
    rows: int
    stride: int
    fd: int


class CopyPlan(NamedTuple):
    """Rows to copy, one by one: `slab[i]` to `blocks[i]` (`up`) or back.

    The copy must come after batch `fence` of the engine: up, the last one that may read the blocks' former content; down, the one
    that writes them.
    """

    ticket: int
    up: bool
    slab: npt.NDArray[np.int32]
    blocks: npt.NDArray[np.int32]
    fence: int


class GuestMode:
    """The part of a PrefixCache that belongs to guest mode."""

    _core: Core
    _mover: "Mover | None"

    @property
    def slab(self) -> SlabPlace:
        """Where the CPU tier lies, for whoever copies to and from it."""
        return SlabPlace(*self._core.slab())

    def take_copies(self, timeout: float = 0.0) -> list[CopyPlan]:
        """Guest mode: the copies that leases asked for since the last call, waiting at most `timeout` seconds for one. Each must be
        reported by copied(), also when it failed. Raises RuntimeError where the cache owns the device and copies itself."""
        check_seconds("timeout", timeout)
        if self._mover is not None:
            raise RuntimeError("this cache owns the device and carries out its copies itself: take_copies() is for guest mode")
        return [CopyPlan(*batch) for batch in self._core.take_copies(timeout)]

    def copied(self, ticket: int, ok: bool) -> None:
        """Guest mode: a copy has ended, `ok` or not. What a down brought well is found from now on. Tickets that are not known (any
        more) are ignored."""
        check_whole("ticket", ticket, 0, (1 << 63) - 1)
        check_flag("ok", ok)
        self._core.copied(ticket, ok)
