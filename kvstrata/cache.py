"""The prefix cache: a request leases what is cached of its tokens, computes the rest, publishes it, and gives the lease back.

    with cache.lease(tokens, reserve=64) as lease:
        hit = lease.wait()                      # tokens whose KV states are in the pool, in the rows lease.rows
        compute(tokens[hit:], lease.rows)       # writes the new KV states into the rows of the lease
        lease.publish(len(tokens), ready=cache.pool.mark_batch())

Everything that decides or moves is in the core; here a lease is a number and arrays. No call but `Lease.wait` and `close` waits for
I/O, and none raises because of the cache: trouble shortens the hit.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kvstrata._core import Core
from kvstrata.arguments import check_request, check_seconds, check_whole, media_arrays, token_array
from kvstrata.ending import Ending
from kvstrata.health import HealthLog
from kvstrata.hits import HitWatch
from kvstrata.identity import Identity, root_secret
from kvstrata.layout import PageLayout
from kvstrata.lease import CacheFull, Lease, MediaItem, PagesLost
from kvstrata.limits import Limits
from kvstrata.observed import Event, Observed
from kvstrata.opening import ACTIVATIONS, Source, open_cache, say_on_stderr
from kvstrata.plan import CopyPlan, GuestMode, SlabPlace
from kvstrata.purging import order_of, purge
from kvstrata.spaces import Spaces

if TYPE_CHECKING:
    from kvstrata.fingerprint import Fingerprint, FingerprintTask
    from kvstrata.gpu import Device, PagePool

__all__ = ["CacheFull", "CopyPlan", "Event", "Lease", "Limits", "MediaItem", "PagesLost", "PrefixCache", "SlabPlace"]

log = logging.getLogger("kvstrata")
MOST_EVENTS = 1 << 24


class PrefixCache(Observed, GuestMode):
    """Pages of one model in up to three tiers. Thread-safe.

    `layout`: what a page row looks like. `identity`: what the pages are of; without one the cache is private to this object and
    keeps nothing on disk. `device`: "cpu", "cuda[:i]" or a gpu.Device. `chunk`: tokens of a prefill chunk; an engine that wants
    results equal to recomputation bit for bit cuts hits to a multiple of it.
    Raises ValueError or RuntimeError, one sentence each, when the limits cannot be met.
    """

    max_batch_size = 8  # requests that an engine on this cache runs at once, unless told otherwise

    def __init__(
        self,
        layout: PageLayout,
        limits: Limits,
        *,
        identity: Identity | None = None,
        device: "str | Device" = "cpu",
        chunk: int | None = None,
        events: int = 65536,
        shared_slab: bool = False,
        poison: bool = False,
    ) -> None:
        if not isinstance(layout, PageLayout) or not isinstance(limits, Limits):
            raise ValueError(f"a cache needs a PageLayout and Limits, not {type(layout).__name__} and {type(limits).__name__}")
        limits.check()
        check_whole("events", events, 0, MOST_EVENTS)
        if chunk is not None:
            check_whole("chunk", chunk, 1, (1 << 31) - 1, "tokens")
        if identity is not None and not isinstance(identity, Identity):
            raise ValueError(f"identity is {identity!r}, but must be an Identity, or None for a private cache")
        if limits.disk_path and not (identity and identity.persistent):
            log.info("no model or identity was given: this cache is private and keeps nothing on disk")
            limits = limits._replace(disk_path="")
        self.layout = layout
        self.limits = limits
        self.page_size = layout.page_size
        self.chunk = max(layout.page_size, chunk or 0)
        if self.chunk % min(layout.page_size, chunk or layout.page_size):
            raise ValueError(f"chunk_size {chunk} and page_size {layout.page_size}: one must divide the other")
        self._spaces = Spaces(identity, limits.disk_path, limits.disk_group)
        self._pool: PagePool | None = None
        self._mover = None
        if limits.gpu_pages:
            from kvstrata import gpu  # torch is needed from here on only

            self._pool = gpu.PagePool(layout, limits.gpu_pages + 1, device)
        self._core = Core(
            page_size=layout.page_size,
            row_bytes=layout.row_bytes,
            row_stride=layout.row_stride,
            planes=[(plane.offset, plane.bytes) for plane in layout.planes],
            space=self._spaces.of(),
            space_json=self._spaces.identity.describe(),
            events=events,
            shared_slab=shared_slab,
            poison=poison,
            **limits.for_core(),
        )
        # Only now: the core found out that the directory answers.
        self._spaces.secret = root_secret(limits.disk_path, limits.disk_group)
        self._spaces.describe = self._core.describe
        if self._pool is not None:
            from kvstrata import mover

            self._mover = mover.Mover(self._core, self._pool)
        self._hits = HitWatch(self._core, limits.disk_path) if limits.disk_path else None
        health = HealthLog(self._core, limits.disk_path, self._hits) if self._hits else None
        if unacknowledged := self._core.stats()["disk"].get("unacknowledged"):
            log.warning(
                "disk_path %s: %d other processes have not given back yet what this one's lower disk_size_GB asks for",
                limits.disk_path,
                unacknowledged,
            )
        self._ending = Ending(self, self._core, [part for part in (self._mover, health) if part])

    @classmethod
    def open(
        cls,
        model: Any,
        settings: Source = None,
        *,
        device: str | None = None,
        dtype: Any = None,
        weights: "Fingerprint | FingerprintTask | str | Path | None" = None,
        activations: int = ACTIVATIONS,
        say: Callable[[str], None] | None = say_on_stderr,
    ) -> "PrefixCache":
        """The cache for a model, as the settings say.

        `model`: a loaded transformers model, or its config. `settings`: Settings, the path of a config.yaml, a dict, or None for
        the defaults. `device`, `dtype`: the model's by default. `weights`: what names the weights on disk: a model folder (hashed
        once, then remembered), a FingerprintTask started before the model was loaded, or a Fingerprint; by default the folder the
        model came from, else its tensors. From a config alone the cache is private and keeps nothing on disk. `activations`: bytes
        of device memory to leave for forward passes (CUDA). `say` is given every setting in effect, line by line; None for
        silence. Raises ConfigError, UnsupportedModel or another ValueError, RuntimeError where the machine does not give what they
        ask for, or OSError for files that cannot be read; one sentence each.
        """
        return open_cache(cls, model, settings, device=device, dtype=dtype, weights=weights, activations=activations, say=say)

    # --- identity

    def namespace(self, adapter: Any = None, tenant: str | None = None) -> bytes:
        """The 32-byte namespace of pages computed with this adapter for this tenant. Raises TypeError for what cannot be either."""
        return self._spaces.of(adapter, tenant)

    # --- requests

    def lease(
        self,
        tokens: Any,
        *,
        reserve: int = 0,
        adapter: Any = None,
        tenant: str | None = None,
        media: Sequence[MediaItem] = (),
        read: bool = True,
        write: bool = True,
        load: bool = True,
        leave: int = 1,
        multiple: int | None = None,
        must: bool = False,
    ) -> "Lease | CacheFull":
        """Finds and pins the longest cached prefix of `tokens`, starts what must be brought to the device, takes rows for the rest.

        `tokens`: integers; an int32 array is not converted. `reserve`: tokens beyond them to hold rows for. `adapter`: content
        digest of a LoRA adapter (32 bytes, or an object with `.digest`). `tenant`: no page is shared with other tenants. `media`:
        what placeholder tokens stand for. `read`, `write`: use what others published; publish to others. `load`: bring pages from
        slower tiers; False ends the hit before the first one. `leave`: tokens that stay
        uncached at least (a model needs one to compute logits). `multiple`: the hit is cut to a multiple of so many tokens.
        Returns at once, a Lease or CacheFull (falsy; raised if `must`). Raises ValueError or TypeError for bad arguments.
        """
        array = token_array(tokens)
        multiple = self.page_size if multiple is None else multiple
        check_request(reserve, leave, multiple, read, write, load, must)
        if multiple < 1 or multiple % self.page_size:
            raise ValueError(f"multiple {multiple} must be a multiple of the page size {self.page_size}")
        offsets, lengths, digests = media_arrays(media)
        lease = Lease(self, self._core, self._mover, self.page_size, self.limits.load_deadline)
        number, never, needed, available, matched = self._core.lease(
            into=lease,
            space=self.namespace(adapter, tenant),
            tokens=array,
            reserve=reserve,
            leave=leave,
            multiple=multiple,
            read=read,
            write=write,
            load=load,
            media_offsets=offsets,
            media_lengths=lengths,
            media_digests=digests,
        )
        lease.matched = matched * self.page_size
        if self._hits is not None and self._hits.asking and read and not matched:
            self._hits.missed(*self._why(array, adapter, tenant, leave, (offsets, lengths, digests)))
        if number == 0:
            full = CacheFull(needed, available, never)
            if must:
                raise full
            return full
        return lease

    @property
    def pool(self) -> "PagePool":
        """The device pool. Raises RuntimeError in guest mode, where the engine owns the device."""
        if self._pool is None:
            raise RuntimeError("this cache is in guest mode: the engine owns the device memory")
        return self._pool

    # --- dropping pages

    def purge(
        self,
        namespace: bytes | None = None,
        *,
        tokens: Any = None,
        unused_for: float | None = None,
        everything: bool = False,
        timeout: float = 5.0,
    ) -> dict[str, Any]:
        """Drops pages from every tier, and overwrites the prompt tokens that files hold of them (docs/disk-tools.md).

        `namespace`: all pages of one, see namespace(). `tokens`: the pages of prompts that begin with these (full pages, without
        media), in `namespace`, else in that of no adapter and no tenant. `unused_for`: pages on disk that were not used for so
        many seconds (to the minute). `everything`: all. What is on its way, other processes, and others who purge are waited for,
        `timeout` seconds at most in all; beside that this does file I/O: not for a serving thread.

        Returns what was dropped: `gpu` and `cpu` copies, `pages` and `bytes` on disk, `leftovers` of pages that had gone before;
        what could not be: `in_use` copies in memory, `used_pages` on disk in shelves of `used_shelves` other processes or in use
        here, `unanswered` shelves whose owners did not say that they did it, `failures` with the first `error`; and `done`,
        whether nothing was left. Raises ValueError for an order that cannot be.
        """
        check_seconds("timeout", timeout)
        order = order_of(self.namespace(), self.page_size, namespace, tokens, unused_for, everything)
        return purge(self._core, self.limits.disk_path, order, timeout)

    def bump_version(self, timeout: float = 5.0) -> dict[str, Any]:
        """Declares all pages computed so far outdated, for example after the weights were changed in place: no later lease finds
        one, in any tier, here or in processes that open the directory from now on. Leases that are open keep theirs, and publish
        to nobody.

        Drops what it can of them and returns what purge() does. A process that opens the directory later does not find the pages
        that this one computes from now on either: it may have loaded other weights. Raises VersionError where the directory cannot
        be written, and nothing was changed.
        """
        check_seconds("timeout", timeout)
        return purge(self._core, self.limits.disk_path, {"spaces": self._spaces.outdate()}, timeout)

    # --- the end

    def flush(self, timeout: float) -> bool:
        """Waits until nothing is moving or waiting to be written; False after `timeout` seconds."""
        check_seconds("timeout", timeout)
        return bool(self._core.flush(timeout))

    def close(self, timeout: float = 10.0) -> bool:
        """Saves what is on its way to disk, at most `timeout` seconds, and ends the threads. True: everything was saved."""
        check_seconds("timeout", timeout)
        return self._ending.close(timeout)

    def __enter__(self) -> "PrefixCache":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
