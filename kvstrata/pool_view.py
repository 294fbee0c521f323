"""A page pool as somebody sees it who thinks in block tables: the tensors, a session of leases, page ids. See static_cache.py."""

import logging
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from kvstrata.cache import PrefixCache
from kvstrata.families import kv_widths
from kvstrata.identity import Identity
from kvstrata.lease import Lease, PagesLost
from kvstrata.opening import open_view
from kvstrata.page_table import MiniBatch, from_indptr, from_mini_batch
from kvstrata.raw import RawAccess

__all__ = ["IndptrView", "MiniBatchView", "PoolView"]

log = logging.getLogger("kvstrata")
LAST_ID = 1 << 30  # where ids of pages under way begin anew: far below what int32 holds, and no mini-batch lives so long


class PoolView(RawAccess):
    """What all of them share. `k_cache[i]`: K of layer i, or the latent, `[pages, page_size, heads, width]`; `v_cache[i]`: V, or
    None."""

    mla: ClassVar[bool | None] = None  # which family it is for; None: both

    def __init__(
        self,
        config: Any,
        max_batch_size: int = 8,
        page_size: int = 256,
        dtype: Any = torch.bfloat16,
        device: Any = None,
        *,
        model: Any = None,
        identity: Identity | None = None,
        settings: Any = None,
        cache: PrefixCache | None = None,
    ) -> None:
        """`config`: a transformers config. `device`: the model's, else "cuda" where there is one. `model`, `identity`: what names
        the pages on disk; without either they are private to this object. `settings`: as for PrefixCache.open. `cache`: look at the
        pool of this one, and ignore the others. Raises ValueError for a config of another family."""
        if self.mla is not None and (found := "latent" in kv_widths(config)[0]) != self.mla:
            fitting = "KVC2StaticCache or KDeepSeekV3Cache" if found else "KVC2StaticCache, KVC2Qwen3Cache or KGQACache"
            kind = "a compressed latent (MLA)" if found else "K and V per head (GQA)"
            raise ValueError(f"{type(self).__name__}: the model keeps {kind}; use {fitting}")
        self._owned = cache is None
        if cache is None:
            if model is None and identity is None:
                log.info("no model or identity was given: the pages of this cache are private to it and kept off the disk")
            cache = open_view(PrefixCache, config, settings, page_size, max_batch_size, dtype, device, model, identity)
        self.cache = cache
        self.page_size = cache.page_size
        self.dtype, self.device = cache.pool.dtype, cache.pool.device
        self.pages = cache.pool.pages
        self._leases: list[Lease] = []
        self._absent: list[tuple[int, int, int, Lease]] = []  # first id, ids, pages promised: of leases whose pages are under way
        self._next_id = self.pages
        self._length = 0
        self.k_cache: list[torch.Tensor] = []
        self.v_cache: list[torch.Tensor | None] = []
        self.load()

    # --- the pool

    def load(self, context: Any = None) -> None:
        """Binds to the tensors of the pool, or of a context: `context.k_cache[rank][layer]`, `context.v_cache[rank][layer]`. Copies
        nothing; twice does no harm. Raises ValueError where a tensor does not look like the pool's."""
        views = [layer.planes for layer in self.cache.pool.layers]
        keys = [planes["latent"] if "latent" in planes else planes["k"] for planes in views]
        values = [planes.get("v") for planes in views]
        if context is not None:
            rank = torch.distributed.get_rank() if torch.distributed.is_available() and torch.distributed.is_initialized() else 0
            keys = _bound("k_cache", context.k_cache[rank], keys)
            if values[0] is not None:
                values = _bound("v_cache", context.v_cache[rank], values)
        self.k_cache, self.v_cache = list(keys), list(values)

    def get_k_cache(self, layer_idx: int) -> torch.Tensor:
        return self.k_cache[layer_idx]

    def get_v_cache(self, layer_idx: int) -> torch.Tensor | None:
        return self.v_cache[layer_idx]

    @property
    def max_cache_len(self) -> int:
        """Tokens that the pool's rows hold."""
        return self.pages * self.page_size

    def close(self) -> None:
        """Ends the session, and the cache underneath where this object opened it."""
        self.reset()
        if self._owned:
            self.cache.close()

    # --- leases

    def lease(self, tokens: Any, **options: Any) -> Lease:
        """A lease of this session, as PrefixCache.lease gives it. Raises CacheFull where the pool cannot hold it now."""
        lease = self.cache.lease(tokens, must=True, **options)
        assert isinstance(lease, Lease)
        self._leases = [known for known in self._leases if not known.released]
        self._absent = [known for known in self._absent if not known[3].released]
        self._leases.append(lease)
        self._length = lease.hit
        return lease

    def mini_batch(self, prefill: Sequence[tuple[Lease, int, int]] = (), decode: Sequence[tuple[Lease, int]] = ()) -> MiniBatch:
        """`prefill`: (lease, first position, one past the last) of each request; `decode`: (lease, position). Does not wait: pages
        on their way get ids of their own, and get_page_table() waits for them."""
        lengths = [last - first for _, first, last in prefill]
        positions = [position for _, first, last in prefill for position in range(first, last)]
        ends = [last for _, _, last in prefill] + [position + 1 for _, position in decode]
        if ends:
            self._length = ends[-1]
        decoded = self._ints([position for _, position in decode])
        return MiniBatch(
            len(lengths),
            self._ints(lengths),
            self._ints(positions),
            self._tables([lease for lease, _, _ in prefill]),
            len(decode),
            decoded if len(decode) == 1 else decoded.view(-1, 1),
            self._tables([lease for lease, _ in decode]),
            max(lengths, default=0),
        )

    def reset(self, context: Any = None) -> None:
        """Ends the session's leases. Addresses and cached pages stay. With a context, binds to its tensors."""
        for lease in self._leases:
            lease.release()
        self._leases.clear()
        self._absent.clear()
        self._length = 0
        if context is not None:
            self.load(context)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of the current lease that were found or given to a mini-batch; 0 without one."""
        return self._length

    def _ints(self, values: Any) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int32).to(self.device)

    def _tables(self, leases: Sequence[Lease]) -> torch.Tensor:
        rows = [self._ids(lease) for lease in leases]
        table = torch.zeros((len(rows), max(map(len, rows), default=0)), dtype=torch.int32)
        for request, ids in enumerate(rows):
            table[request, : len(ids)] = ids
        return table.to(self.device)

    def _ids(self, lease: Lease) -> torch.Tensor:
        if lease.ready:
            return torch.from_numpy(lease.rows.copy())
        for first, count, _, known in self._absent:
            if known is lease:
                return torch.arange(first, first + count, dtype=torch.int32)
        first = self._new_ids(count := len(lease.rows))
        self._absent.append((first, count, lease.hit, lease))
        return torch.arange(first, first + count, dtype=torch.int32)

    def _new_ids(self, count: int) -> int:
        """The first of so many ids. They are not those of a lease that was released: its mini-batches may still be about."""
        first = self._next_id if self._next_id + count <= LAST_ID else self.pages
        for taken, taken_count, _, _ in sorted(self._absent, key=lambda known: known[0]):
            if taken < first + count and first < taken + taken_count:
                first = taken + taken_count
        self._next_id = first + count
        return first

    def _bring(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows of pages; those that are not on the device are waited for. Raises PagesLost, and ValueError for ids of nobody,
        where the ids are in host memory or something is still under way: else the device is not asked what they are."""
        self._absent = [known for known in self._absent if not known[3].released]
        if ids.device.type != "cpu" and all(self._came(promised, lease) for _, _, promised, lease in self._absent):
            return self._translated(ids)
        here = ids.cpu()
        if not bool((here >= self.pages).any()):
            return ids
        rows = here.clone()
        for first, count, promised, lease in self._absent:
            wanted = (here >= first) & (here < first + count)
            if not bool(wanted.any()):
                continue
            if lease.wait() < promised or lease.lost:
                raise PagesLost(f"of a hit of {promised} tokens only {lease.hit} came to the device: compute again from there")
            rows[wanted] = torch.from_numpy(lease.rows)[(here[wanted] - first).long()]
        if bool((unknown := rows >= self.pages).any()):
            raise ValueError(
                f"page id {int(rows[unknown][0])} is of no lease of this session, and the pool has {self.pages} pages: "
                "use rows below that, or the block tables of mini_batch()"
            )
        return rows.to(ids.device)

    @staticmethod
    def _came(promised: int, lease: Lease) -> bool:
        return lease.ready and lease.hit >= promised and not lease.lost

    def _translated(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows of pages that all came, computed where the ids are: nothing is waited for."""
        for first, count, _, lease in self._absent:
            rows = torch.from_numpy(lease.rows[:count].copy()).to(ids.device, non_blocking=True)
            mine = (ids >= first) & (ids < first + count)
            ids = torch.where(mine, rows[(ids - first).clamp(0, count - 1).long()], ids)
        return ids


class MiniBatchView(PoolView):
    def get_page_table(self, mini_batch: Any, bsz_tensors: torch.Tensor | None = None, is_prefill: bool = True) -> Any:
        """(page_idx, page_offset), int32, of every token: see page_table.from_mini_batch. Pages that are on their way are waited
        for until the deadline; then PagesLost is raised."""
        name, count = ("p_block_tables", "prefill_batch") if is_prefill else ("d_block_tables", "decode_batch")
        if getattr(mini_batch, count):
            mini_batch = _Brought(mini_batch, name, self._bring(getattr(mini_batch, name)))
        return from_mini_batch(mini_batch, self.page_size, bsz_tensors, is_prefill)


class _Brought:
    """A mini-batch, whoever's it is, with one of its fields replaced."""

    def __init__(self, batch: Any, name: str, value: torch.Tensor) -> None:
        self._batch = batch
        setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batch, name)


class IndptrView(PoolView):
    def __init__(self, config: Any, page_size: int = 256, dtype: Any = torch.bfloat16, device: Any = None, **options: Any) -> None:
        super().__init__(config, options.pop("max_batch_size", 8), page_size, dtype, device, **options)

    def get_page_table(
        self,
        cache_position: torch.Tensor,
        q_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        bsz_tensors: torch.Tensor,
    ) -> Any:
        """(page_idx, page_offset), int32 `[N]`: see page_table.from_indptr. Waits as the other form does."""
        return from_indptr(cache_position, q_indptr, kv_indptr, self._bring(kv_indices), bsz_tensors, self.page_size)


def _bound(name: str, given: Sequence[torch.Tensor], ours: Sequence[Any]) -> list[Any]:
    if len(given) != len(ours):
        raise ValueError(f"{name} has {len(given)} layers, but the model has {len(ours)}")
    for layer, (theirs, pool) in enumerate(zip(given, ours, strict=True)):
        if theirs.dtype != pool.dtype or theirs.shape[1:] != pool.shape[1:] or theirs.device != pool.device:
            told = [f"{one.dtype} {list(one.shape)} on {one.device}" for one in (theirs, pool)]
            raise ValueError(
                f"{name} of layer {layer} is {told[0]}, but must be {told[1]} (any number of pages): it is never copied"
            )
    return list(given)
