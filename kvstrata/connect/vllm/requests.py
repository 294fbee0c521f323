"""What the scheduler's role remembers of a request: its tokens as an array that grows, its lease, and how far it was saved."""

from array import array
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvstrata.connect.vllm.adapters import Digest
from kvstrata.connect.vllm.identity import Content

if TYPE_CHECKING:
    from kvstrata.cache import Lease

__all__ = ["Tracked"]


class Tracked:
    """One request of vLLM's from its arrival to its end.

    `lease`: what is known of it in our tiers, from the arrival until its pages were asked for or it turned out not to need them.
    `asked_at`: when the scheduler first wanted the answer for this admission, None before. `offered`: (tokens vLLM holds, tokens we
    promised beyond them). `saved`: pages that are saved, or were handed out to be. `void`: its blocks were computed from weights
    that are outdated now.
    """

    __slots__ = (
        "_buffer",
        "adapter",
        "asked_at",
        "began_at",
        "content",
        "lease",
        "limit",
        "load",
        "offered",
        "read",
        "request",
        "saved",
        "steps",
        "void",
        "wait",
    )

    def __init__(self, request: Any, content: Content, adapter: Digest, read: bool, limit: int | None) -> None:
        self.request = request
        self.content = content
        self.adapter = adapter
        self.read = read
        self.limit = limit  # tokens that may be saved; None: all
        self.lease: Lease | None = None
        self.asked_at: float | None = None
        self.began_at = 0.0  # when the lease was made
        self.steps = 0  # of the engine, at that time
        self.wait: float | None = None  # seconds to wait for the disk, once that was decided
        self.offered = (0, 0)
        self.load = (0, 0)  # (tokens from the CPU tier, from disk) of the latest load
        self.saved = 0
        self.void = False
        self._buffer = array("i")

    def tokens(self, count: int | None = None) -> npt.NDArray[np.int32]:
        """The first `count` of its tokens that are known, int32; a copy, converted once per token."""
        known = self.request._all_token_ids
        if len(known) > len(self._buffer):
            self._buffer.extend(known[len(self._buffer) :])
        return np.array(self._buffer[:count] if count is not None else self._buffer, np.int32)

    def drop_lease(self) -> None:
        if self.lease is not None:
            self.lease.release()
            self.lease = None
        self.asked_at = self.wait = None
