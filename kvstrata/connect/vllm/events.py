"""KV events for routers: which of vLLM's blocks can be had from the CPU tier or from disk, in vLLM's own terms."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvstrata._core import page_key
from kvstrata.cache import Event

__all__ = ["EventWriter"]

MEDIA = {"cpu": MEDIUM_CPU, "disk": MEDIUM_STORAGE}
MOST_PAGES = 1 << 20  # that are known by name; the oldest are forgotten, and their events are not told


class _Page(NamedTuple):
    hashes: list[Any]  # vLLM's names of its blocks
    parent: Any
    tokens: list[int]
    adapter: str | None


class EventWriter:
    """Translates events of pages into events of blocks. It knows the pages of requests it has seen, without media or embeddings: of
    pages
    that only an earlier process knew, the first event is that of their next load."""

    def __init__(self, page_size: int, block_size: int) -> None:
        self._page_size = page_size
        self._block_size = block_size
        self._known: OrderedDict[bytes, _Page] = OrderedDict()

    def learn(self, request: Any, space: bytes, tokens: npt.NDArray[np.int32]) -> None:
        """The names of a request's full pages. `space`: the namespace they are in."""
        per_page = self._page_size // self._block_size
        parent = space
        hashes = [maybe_convert_block_hash(one) for one in request.block_hashes]
        for page in range(min(len(tokens) // self._page_size, len(hashes) // per_page)):
            own = tokens[page * self._page_size : (page + 1) * self._page_size]
            parent = page_key(space, parent, own)
            if parent in self._known:
                continue
            first = page * per_page
            above = hashes[first - 1] if first else None
            adapter = request.lora_request.lora_name if request.lora_request else None
            self._known[parent] = _Page(hashes[first : first + per_page], above, own.tolist(), adapter)
        while len(self._known) > MOST_PAGES:
            self._known.popitem(last=False)

    def translate(self, events: Iterable[Event]) -> Iterator[Any]:
        """vLLM's events, in the same order."""
        for event in events:
            page, medium = self._known.get(event.key), MEDIA.get(event.tier)
            if page is None or medium is None:
                continue
            if event.kind == "stored":
                yield BlockStored(
                    block_hashes=page.hashes,
                    parent_block_hash=page.parent,
                    token_ids=page.tokens,
                    block_size=self._block_size,
                    lora_id=None,
                    medium=medium,
                    lora_name=page.adapter,
                )
            else:
                yield BlockRemoved(block_hashes=page.hashes, medium=medium)
