"""One forward pass of a model over pages: how the loop sees a model, whichever way its attention reads the pages."""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Sequence as Several
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from kvstrata.engine.attention import NAME, DecodePages, Pages, PrefillPages, Rows, Unsupported, register
from kvstrata.engine.gather import DevicePages, paged_flash_kernel
from kvstrata.engine.past import PastPages
from kvstrata.engine.sequence import Sequence
from kvstrata.layout import PageLayout

if TYPE_CHECKING:
    from kvstrata.cache import PrefixCache
    from kvstrata.lease import Lease

log = logging.getLogger("kvstrata")


class Runner(Protocol):
    """Both calls write the KV states of the tokens they compute and return the logits of the last one of each request."""

    together: bool  # whether several requests may be in flight

    def wait(self, lease: Lease) -> int:
        """Settle a lease before its first prefill: give up what is not on its way to the device yet. Returns the hit in tokens."""
        ...

    def prefill(self, sequence: Sequence, start: int, stop: int) -> Tensor:
        """Compute prompt tokens `start..stop`, within one chunk of the grid; returns `[1, vocabulary]`. Raises PrefixLost."""
        ...

    def decode(self, sequences: Several[Sequence]) -> Tensor:
        """Compute the newest token of each; returns `[requests, vocabulary]`."""
        ...


def runner_for(model: Any, cache: PrefixCache) -> Runner:
    """The runner that fits the model. Raises Unsupported or another ValueError, with one sentence, where none does."""
    if model.dtype != cache.pool.dtype or model.device != cache.pool.device:
        ours, theirs = f"{model.dtype} on {model.device}", f"{cache.pool.dtype} on {cache.pool.device}"
        raise ValueError(f"the model is {ours} and the cache {theirs}: make the cache with the model's dtype and device")
    states = PageLayout.from_config(model.config, page_size=cache.page_size, dtype=model.dtype)
    if states.planes != cache.layout.planes:
        raise ValueError(
            f"the model's states ({states.bytes_per_token:,} bytes per token in {len(states.layers)} layers) are not those "
            f"of the cache ({cache.layout.bytes_per_token:,} in {len(cache.layout.layers)}): open a cache for this model"
        )
    if attends_on_pages(model, cache):
        try:
            return PagedRunner(model, cache)
        except Exception as error:  # whatever a model's own code says when it meets an attention function it was not made for
            log.info("%s gets its states as past_key_values, since it does not attend on pages: %s", type(model).__name__, error)
    return PastRunner(model, cache)


def attends_on_pages(model: Any, cache: PrefixCache) -> bool:
    """Whether the model calls the attention function it is told to, as transformers knows, with the K and V that the pages hold."""
    layers = cache.pool.layers
    return model.is_backend_compatible() and all(set(one.planes) == {"k", "v"} and one.k.shape == one.v.shape for one in layers)


class PagedRunner:
    """The model's attention reads the pages itself. A model that does not work so is refused as it was, with any exception."""

    together = True

    def __init__(self, model: Any, cache: PrefixCache) -> None:
        self.model, self.cache = model, cache
        self.layers, self.page_size, self.device = cache.pool.layers, cache.page_size, model.device
        self.kernel = paged_flash_kernel(cache.page_size, model.dtype, self.device)
        register()
        before = attention_of(model)
        model.set_attn_implementation(NAME)
        try:
            self._check()
        except BaseException:
            model.set_attn_implementation(before)
            raise

    @torch.inference_mode()
    def _check(self) -> None:
        """One token, written to the scratch row: whether every layer attends once, with the K and V that its pages hold."""
        token = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        witness = Witness(self._pages([np.zeros(1, np.int32)], [0]))
        last_logits(self.model, token, position_ids=token, use_cache=False, kv_pages=witness)
        if wrong := [layer for layer in range(len(self.layers)) if witness.calls[layer] != 1]:
            raise Unsupported(f"layers {wrong} call the attention function {[witness.calls[layer] for layer in wrong]} times")

    def wait(self, lease: Lease) -> int:
        # Where copies run beside the computation, the first chunk is computed while pages arrive, layer by layer.
        return lease.wait(timeout=0, layer=0 if self.cache.pool.backend.asynchronous else None)

    def prefill(self, sequence: Sequence, start: int, stop: int) -> Tensor:
        assert sequence.lease is not None
        rows = sequence.lease.rows
        pages: Pages
        if self.device.type == "cpu":
            pages = PrefillPages(self.layers, rows, start, stop, self.page_size, self.cache.chunk)
        else:
            pages = DevicePages(self.layers, [rows], [start], [stop], self.page_size, self.kernel)
        pages.arriving = None if sequence.lease.ready else sequence.lease
        positions = torch.arange(start, stop, device=self.device)[None]
        logits = last_logits(self.model, sequence.ids[None, start:stop], position_ids=positions, use_cache=False, kv_pages=pages)
        if sequence.lease.wait() < sequence.hit:  # a copy failed: nothing that was computed from it may be used
            raise PrefixLost
        return logits

    def decode(self, sequences: Several[Sequence]) -> Tensor:
        # Sorted by their page tables, requests that share pages are neighbours.
        tables = [sequence.lease.rows for sequence in sequences if sequence.lease]
        order = sorted(range(len(tables)), key=lambda at: tables[at].tobytes())
        lengths = [sequences[at].length - 1 for at in order]
        ids = torch.stack([sequences[at].ids[length] for at, length in zip(order, lengths, strict=True)])[:, None]
        logits = self._newest(ids, [tables[at] for at in order], lengths)
        return logits[[order.index(at) for at in range(len(order))]]

    def _newest(self, ids: Tensor, tables: Several[Rows], lengths: Several[int]) -> Tensor:
        """One token `ids[b]` after `lengths[b]` others of each request."""
        positions = torch.tensor(lengths, device=self.device)[:, None]
        return last_logits(self.model, ids, position_ids=positions, use_cache=False, kv_pages=self._pages(tables, lengths))

    def _pages(self, tables: Several[Rows], lengths: Several[int]) -> Pages:
        """Of one token after `lengths[b]` others of each request."""
        if self.device.type == "cpu":
            return DecodePages(self.layers, tables, lengths, self.page_size, self.cache.chunk)
        return DevicePages(self.layers, tables, lengths, [n + 1 for n in lengths], self.page_size, self.kernel)


def attention_of(model: Any) -> dict[str, Any]:
    """What set_attn_implementation takes to make the model and its parts attend as they do now."""
    parts = {name: getattr(model.config, name, None) for name in model.config.sub_configs}
    return {"": model.config._attn_implementation} | {
        name: part._attn_implementation for name, part in parts.items() if part is not None
    }


class Witness:
    """Stands before the pages of one pass, and counts the calls of each layer. Raises Unsupported for other K and V than the pages
    hold, which would be written all the same where they can be repeated to fit.
    """

    arriving = None

    def __init__(self, pages: Pages) -> None:
        self.pages = pages
        self.calls: Counter[int] = Counter()

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        self.calls[layer] += 1
        views = self.pages.layers[layer]
        for name, plane, states in (("K", views.k, key), ("V", views.v, value)):
            if tuple(plane.shape[-2:]) != (states.shape[1], states.shape[-1]):
                raise Unsupported(f"layer {layer} brings {name} of shape {tuple(states.shape)} to pages {tuple(plane.shape)}")
        return self.pages.attend(layer, query, key, value, scale)


class PastRunner:
    """The model gets a request's states as `past_key_values`; one request at a time."""

    together = False

    def __init__(self, model: Any, cache: PrefixCache) -> None:
        self.model, self.cache = model, cache
        self.planes = [list(layer.planes.values()) for layer in cache.pool.layers]
        self._check()

    @torch.inference_mode()
    def _check(self) -> None:
        """One token, written to the scratch row: whether the model caches the states of every layer as the pages hold them."""
        token = torch.zeros(1, 1, dtype=torch.int64, device=self.model.device)
        past = PastPages(self.planes, np.zeros(1, np.int32), 0, 1, self.cache.page_size)
        past.expect(0, 1)
        last_logits(self.model, token, position_ids=token, past_key_values=past.cache, use_cache=True)
        missing = [number for number, layer in enumerate(past.layers) if layer.length != 1]
        if missing:
            raise Unsupported(f"{type(self.model).__name__} does not cache the states of layers {missing} in past_key_values")

    def wait(self, lease: Lease) -> int:
        return lease.wait(timeout=0)

    def prefill(self, sequence: Sequence, start: int, stop: int) -> Tensor:
        assert sequence.lease is not None
        if sequence.past is None:
            sequence.past = PastPages(self.planes, sequence.lease.rows, start, sequence.limit, self.cache.page_size)
        return self._forward(sequence, start, stop)

    def decode(self, sequences: Several[Sequence]) -> Tensor:
        return torch.cat([self._forward(sequence, sequence.length - 1, sequence.length) for sequence in sequences])

    def _forward(self, sequence: Sequence, start: int, stop: int) -> Tensor:
        sequence.past.expect(start, stop)
        positions = torch.arange(start, stop, device=self.model.device)[None]
        return last_logits(
            self.model, sequence.ids[None, start:stop], position_ids=positions, past_key_values=sequence.past.cache, use_cache=True
        )


class PrefixLost(Exception):
    """Pages did not arrive after all; the request is to begin again."""


def last_logits(model: Any, ids: Tensor, **arguments: Any) -> Tensor:
    """`[batch, vocabulary]` of the last position; where the model can, only that one is computed."""
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        arguments["logits_to_keep"] = 1
    logits: Tensor = model(ids, **arguments).logits
    return logits[:, -1]
