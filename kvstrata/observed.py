"""What a cache tells of itself: counters, events, why a prompt hits as far as it does, and whether its books are right."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvstrata._core import Core
from kvstrata.arguments import MediaItem, check_tokens, media_arrays, token_array
from kvstrata.explaining import explained, look_on_disk, nearest_namespaces
from kvstrata.limits import Limits
from kvstrata.spaces import Spaces

__all__ = ["Event", "Observed"]


class Event(NamedTuple):
    """What happened to a page in a tier.

    "stored": it became findable; its bytes came from `source`, or were computed where source == tier. "removed": it ceased to be.
    "damaged": it was found corrupt and dropped. `depth`: pages from the start of the prompt, itself included; 0: not known.
    """

    sequence: int
    time: float
    kind: str
    tier: str
    source: str
    depth: int
    key: bytes


class Observed:
    """The part of a PrefixCache that tells what is going on."""

    page_size: int
    limits: Limits
    _core: Core
    _spaces: Spaces

    def stats(self) -> dict[str, Any]:
        """Counters by tier ("gpu", "cpu", "disk") and in total, as docs/stats.md lists them. Pages are counted in pages, the three
        numbers of a hit apart: looked_up >= loaded >= used. `["disk"]["health"]` is "ok", or one sentence."""
        stats: dict[str, Any] = self._core.stats()
        return stats

    def explain(
        self,
        tokens: Any,
        *,
        adapter: Any = None,
        tenant: str | None = None,
        media: Sequence[MediaItem] = (),
        leave: int = 1,
    ) -> dict[str, Any]:
        """Why a request with these tokens hits as far as it does; nothing is changed by asking. Arguments as for lease(). Without
        media it looks on disk, too: not for a serving thread.

        "hit": tokens that it would reuse. "pages": of the first pages that are anywhere, by tier: "there", "coming", or "left
        alone" (it could not be read just now). "differs": where the closest cached prompt goes on otherwise: "position", and the
        token "asked" and "cached" there; None: no such is known. "because": one sentence. "namespaces": where nothing is found and
        there is a disk tier, other namespaces in its directory, the most alike first, and the fields that differ, each with [ours,
        theirs].
        """
        array = token_array(tokens)
        check_tokens("leave", leave)
        found = self._core.explain(self._spaces.of(adapter, tenant), array, *media_arrays(media))
        told = explained(array, self.page_size, leave, found)
        told["namespaces"] = []
        if self.limits.disk_path and not media:
            look_on_disk(told, self.limits.disk_path, self._spaces.of(adapter, tenant), array, leave)
        if not told["pages"] and self.limits.disk_path:
            ours = self._spaces.identity.describe(adapter, tenant, self._spaces.secret)
            told["namespaces"] = nearest_namespaces(self.limits.disk_path, ours)
        return told

    def _why(self, tokens: Any, adapter: Any, tenant: str | None, leave: int, media: tuple[Any, Any, bytes]) -> tuple[str, str]:
        """Why a prompt hits as far as it does, and the description of its namespace, without I/O."""
        found = self._core.explain(self._spaces.of(adapter, tenant), tokens, *media)
        told: str = explained(tokens, self.page_size, leave, found)["because"]
        return told, self._spaces.identity.describe(adapter, tenant, self._spaces.secret)

    def drain_events(self) -> list[Event]:
        """What happened to pages since the last call, oldest first; at most `events` of them, older ones are counted as lost."""
        return [Event(*event) for event in self._core.events()]

    def check_integrity(self) -> None:
        """Proves everything provable about the ledger. Raises RuntimeError with the first fault."""
        fault = self._core.check_integrity()
        if fault:
            raise RuntimeError(f"the ledger is damaged: {fault}")
