"""KV states straight into the CPU and disk tiers and back, past the device pool: raw_insert and raw_read of static_cache.py."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from kvstrata.arguments import token_array
from kvstrata.gpu import Slab, plane_views

if TYPE_CHECKING:
    from kvstrata.cache import PrefixCache

__all__ = ["RawAccess"]

AT_ONCE = 64  # pages that one read keeps in the CPU tier, and never more than a quarter of it
States = Sequence[torch.Tensor] | torch.Tensor | None


class RawAccess:
    """The part of a PoolView that goes past the pool. `k`, `v`: by layer, `[tokens, heads, dim]` or
    `[pages, page_size, heads, dim]`; of MLA models `k` has the latents, and v is None. Autograd does not see the copies."""

    cache: "PrefixCache"

    def raw_insert(self, tokens: Any, k: States, v: States = None, *, adapter: Any = None, tenant: str | None = None) -> int:
        """Puts KV states into the CPU tier, and behind it on disk. Returns how many of the tokens, from the first on, these tiers
        hold then; full pages only. Who came first wins: pages that are there stay as they are. Whoever leases these tokens is
        served what was put: that it is what the model computes is the caller's word.

        Waits for the room that writing to disk makes; where none comes within the load deadline, fewer are held. Raises ValueError
        for other shapes and dtypes, and RuntimeError after close().
        """
        cache, array, space = self.cache, token_array(tokens), self.cache.namespace(adapter, tenant)
        planes = _planes(cache, len(array), k, v)
        full, done, end = len(array) // cache.page_size, 0, _deadline(cache)
        while done < full:
            ticket, pages, rows, after = cache._core.put(space, array, done)
            if ticket:
                written = False
                try:
                    with torch.no_grad():
                        for slab, states in planes:
                            slab[_index(rows)] = states[_index(pages).to(states.device)].to(slab.device)
                    written = True
                finally:
                    cache._core.copied(ticket, written)
            if after > done:
                done, end = after, _deadline(cache)
            elif not cache.limits.disk_path or (left := end - time.monotonic()) <= 0 or not cache._core.wait_room(left):
                break  # without a disk nothing makes room for what is there already
        return int(cache._core.cold_pages(space, array)) * cache.page_size

    def raw_read(self, tokens: Any, k: States, v: States = None, *, adapter: Any = None, tenant: str | None = None) -> int:
        """Writes the KV states that CPU memory and disk hold of these tokens into `k` and `v`. Returns how many tokens that were,
        from the first on; a multiple of the page size. What is only on the device is not read.

        Waits for the disk, until the load deadline. Raises ValueError for other shapes and dtypes, and RuntimeError after close().
        """
        cache, array, space = self.cache, token_array(tokens), self.cache.namespace(adapter, tenant)
        planes = _planes(cache, len(array), k, v)
        full, done = len(array) // cache.page_size, 0
        most = max(1, min(AT_ONCE, cache.limits.cpu_pages // 4))
        while done < full:
            fetch = cache._core.fetch(space, array, done, most)
            if not fetch:
                break
            try:
                rows = cache._core.fetched(fetch, cache.limits.load_deadline)
                with torch.no_grad():
                    for slab, states in planes:
                        states[done : done + len(rows)] = slab[_index(rows)].to(states.device)
            finally:
                cache._core.end_fetch(fetch)
            done += len(rows)
            if len(rows) < most:
                break
        return done * cache.page_size


def _deadline(cache: "PrefixCache") -> float:
    return time.monotonic() + cache.limits.load_deadline


def _index(numbers: npt.NDArray[np.int32]) -> torch.Tensor:
    return torch.from_numpy(numbers).long()


def _planes(cache: "PrefixCache", tokens: int, k: States, v: States) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(the plane in the slab, the caller's states of it), both `[rows or pages, page_size, heads, width]`. Raises ValueError."""
    mla = cache.layout.planes[0].name == "latent"
    given = {"k": _by_layer("k", k), "v": _by_layer("v", v)}
    if mla and given["v"]:
        raise ValueError("v must be None: the model keeps one latent per token, and k is all of it")
    layers = cache.layout.layers
    for name in ("k",) if mla else ("k", "v"):
        if len(given[name]) != len(layers):
            raise ValueError(f"{name} has {len(given[name])} layers, but the model has {len(layers)}")
    address, rows, stride, _ = cache._core.slab()
    empty = torch.empty((0, cache.layout.row_stride), dtype=torch.uint8)
    slab = torch.from_numpy(Slab(address, rows, stride).bytes()) if rows else empty
    planes = []
    for at, layer in enumerate(layers):
        for plane_name, plane in plane_views(slab, cache.layout, layer).items():
            name = "k" if mla else plane_name
            planes.append((plane, _in_pages(f"{name} of layer {layer}", given[name][at], plane, tokens)))
    return planes


def _by_layer(name: str, states: Any) -> list[Any]:
    try:
        return [] if states is None else list(states)
    except TypeError:
        raise ValueError(f"{name} is {type(states).__name__}, but must be a tensor per layer") from None


def _in_pages(what: str, states: Any, plane: torch.Tensor, tokens: int) -> torch.Tensor:
    """The states as `[pages, page_size, heads, width]`, a view. Raises ValueError."""
    if not isinstance(states, torch.Tensor) or states.layout is not torch.strided or states.is_meta:
        raise ValueError(f"{what} is {_kind(states)}, but must be a torch tensor with data")
    _, size, heads, width = plane.shape
    full = tokens // size
    if states.dtype != plane.dtype:
        raise ValueError(f"{what} is {states.dtype}, but the pages are {plane.dtype}")
    if states.dim() == 4 and states.shape[1] != size:
        raise ValueError(f"{what} has pages of {states.shape[1]} tokens, but the cache has {size}")
    positions = states.shape[0] * (size if states.dim() == 4 else 1)
    if states.dim() not in (3, 4) or tuple(states.shape[-2:]) != (heads, width) or positions < full * size:
        wanted = f"[{tokens}, {heads}, {width}] or [{full}, {size}, {heads}, {width}]"
        raise ValueError(f"{what} has the shape {list(states.shape)}, but must be {wanted} for {tokens} tokens")
    return states if states.dim() == 4 else states[: full * size].view(full, size, heads, width)


def _kind(states: Any) -> str:
    if not isinstance(states, torch.Tensor):
        return type(states).__name__
    return "on the device meta" if states.is_meta else str(states.layout)
