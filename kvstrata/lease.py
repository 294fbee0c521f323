"""What a request holds of the cache: its matched pages, pinned, and rows for what it will compute."""

from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from kvstrata._core import Core
from kvstrata.arguments import MediaItem, check_seconds, check_tokens, check_whole, token_array
from kvstrata.limits import MOST_PAGES

if TYPE_CHECKING:
    from kvstrata.mover import Mover

__all__ = ["CacheFull", "Lease", "MediaItem", "PagesLost"]

COPY_PATIENCE = 60.0  # seconds; the core gives a device copy up long before


class CacheFull(RuntimeError):
    """The device pool cannot hold the request now: everything else in it is in use. Returned (it is falsy), raised only on request.

    `needed`, `available`: rows of the pool. `never`: waiting will not help, the pool is smaller than the request.
    """

    def __init__(self, needed: int, available: int, never: bool) -> None:
        self.needed = needed
        self.available = available
        self.never = never
        if never:
            text = f"the request needs {needed} pages and the pool has {available}: shorten it or raise kvc2.gpu_memory_size_GB"
        else:
            text = f"the request needs {needed} more pages and {available} can be had now: ask again when a lease was released"
        super().__init__(text)

    def __bool__(self) -> bool:
        return False

    def __enter__(self) -> NoReturn:
        raise self  # `with cache.lease(...)`: there is no lease to work with

    def __exit__(self, *exception: object) -> None:
        return None


class PagesLost(RuntimeError):
    """Pages did not come to the device in time, and no rows are left to compute them in: release the lease and ask again."""


class Lease:
    """Made by PrefixCache.lease. One thread uses it at a time. Give it back with release() or `with`; twice does no harm.

    `matched`: tokens found at the lookup. They may still be on their way: wait() tells what arrived.
    """

    def __init__(self, cache: object, core: Core, mover: "Mover | None", page_size: int, patience: float) -> None:
        self._cache = cache  # lives as long as its leases
        self._core = core
        self._mover = mover
        self._id = 0  # set by the core itself, see Core.lease; 0: it holds nothing
        self._page_size = page_size
        self._patience = patience
        self._rows: npt.NDArray[np.int32] | None = None
        self._released = False
        self._gone = False  # the cache was closed before the pages came
        self._continued = 0  # what wait() returned last: the caller computes from there
        self.matched = 0

    # --- what was found

    def _state(self) -> tuple[bool, int, bool, tuple[int, int, int]]:
        state: tuple[bool, int, bool, tuple[int, int, int]] = self._core.state(self._id)
        return state

    @property
    def ready(self) -> bool:
        """Every page of the hit is on the device. Never blocks."""
        return self._state()[0]

    @property
    def hit(self) -> int:
        """Tokens that need not be computed: what wait() returned, or what it can still become. A multiple of the page size."""
        return self._state()[1] * self._page_size

    @property
    def lost(self) -> bool:
        """A failed load cost rows that nothing could replace, or the cache was closed: release the lease and ask again."""
        return self._gone or self._state()[2]

    @property
    def released(self) -> bool:
        """It was given back."""
        return self._released

    @property
    def sources(self) -> dict[str, int]:
        """Tokens of the hit by the tier they were found in."""
        pages = self._state()[3]
        return {tier: count * self._page_size for tier, count in zip(("gpu", "cpu", "disk"), pages, strict=True)}

    @property
    def rows(self) -> npt.NDArray[np.int32]:
        """The row of the device pool for every page of tokens + reserve, int32 `[pages]`; final once the lease is ready.

        Raises PagesLost where `lost`: there is nothing to compute in.
        """
        if self._rows is None:
            if self.lost:
                raise PagesLost(f"rows of a lease of {self.matched} matched tokens were lost: release it and ask again")
            final = self.ready  # asked first: until then a page that fails to come changes rows
            rows: npt.NDArray[np.int32] = self._core.rows(self._id)
            if not final:
                return rows
            self._rows = rows
        return self._rows

    def wait(self, timeout: float | None = None, layer: int | None = None) -> int:
        """Waits until the hit is on the device and returns it in tokens. After `timeout` seconds (None: the configured deadline)
        what is not at least on its way from the CPU tier is given up, and the hit is shorter.

        With `layer`, waits only until that layer is usable by work submitted from now on; call it again before each further layer.
        Raises ValueError for a layer or a time that cannot be.
        """
        if timeout is not None:
            check_seconds("timeout", timeout)
        if layer is not None and self._mover is not None:
            check_whole("layer", layer, 0, self._mover.layers - 1)
            self._continued = self._wait_layer(layer, timeout)
        else:
            self._continued = self._wait(timeout)
        return self._continued

    def _wait(self, timeout: float | None) -> int:
        if not self._core.wait(self._id, self._patience if timeout is None else timeout):
            self._core.settle(self._id)
            self._gone = not self._core.wait(self._id, COPY_PATIENCE)
        return 0 if self._gone else self.hit

    def _wait_layer(self, layer: int, timeout: float | None) -> int:
        assert self._mover is not None
        if not self._core.wait_started(self._id, self._patience if timeout is None else timeout):
            self._core.settle(self._id)
            self._gone = not self._core.wait_started(self._id, COPY_PATIENCE)
        _, tickets = self._core.copies_of(self._id)
        for ticket in tickets:
            self._gone |= not self._mover.wait_layer(ticket, layer, COPY_PATIENCE)
        return 0 if self._gone else self.hit

    # --- what is computed

    def append(self, tokens: Any) -> None:
        """Tokens generated after the prompt, in order; publish() counts them."""
        self._core.append(self._id, token_array(tokens))

    def grow(self, tokens: int) -> bool:
        """Rows for so many more tokens at the end. False: the pool has none to give now, and nothing changed. Raises ValueError."""
        check_tokens("tokens", tokens)
        self._rows = None
        return bool(self._core.grow(self._id, tokens))

    def publish(self, tokens: int, ready: int | None = None) -> int:
        """The KV states of the first `tokens` tokens are written by batch `ready`, a fence of pool.mark_batch(); 0: they are there
        already, which is the default where the device computes synchronously.

        Full pages become findable; a page that somebody published first stays his, and this lease goes on with its own copy.
        Returns the tokens of this request that are findable now. What was waited for only by layer is waited for; raises PagesLost,
        once, where a page of the hit did not come after all: what was computed from it is void, and the hit is shorter. Raises
        ValueError for a fence that was never given out, and for none at all on an asynchronous device: pages would be copied before
        they are written.
        """
        if ready is None:
            if self._mover is not None and self._mover.device.asynchronous:
                raise ValueError("publish(n) needs ready=pool.mark_batch() here: the device may not have written the pages yet")
            ready = 0
        check_tokens("tokens", tokens)
        self._check_fence("ready", ready)
        if self._continued > (now := self.hit if self.ready else self._wait(None)):
            told, self._continued = self._continued, now
            raise PagesLost(f"of a hit of {told} tokens only {now} came to the device: compute again from there")
        return int(self._core.publish(self._id, tokens, ready)) * self._page_size

    def _check_fence(self, name: str, fence: int) -> None:
        if self._mover is None:
            check_whole(name, fence, 0, (1 << 63) - 1)
        elif isinstance(fence, bool) or not isinstance(fence, int | np.integer) or not 0 <= fence <= self._mover.device.marked:
            raise ValueError(f"{name}={fence!r} is no batch: the latest of pool.mark_batch() is {self._mover.device.marked}")

    # --- guest mode: the engine owns the device blocks, and carries copies out: PrefixCache.take_copies

    def load(self, first_page: int, blocks: Any) -> int:
        """Asks for pages of the hit, from `first_page` on, to be copied into these device blocks (integers). Returns the ticket of
        the copy, 0 when none of the hit lies there or it is not settled (wait() first). The pages stay until it was reported."""
        check_whole("first_page", first_page, 0, MOST_PAGES)
        return int(self._core.load(self._id, first_page, token_array(blocks)))

    def save(self, first_page: int, blocks: Any, ready: int) -> int:
        """Asks for device blocks, written by the engine's batch `ready`, to be copied into the CPU tier as the pages from
        `first_page` on. The engine must not reuse them before the copy was reported. Returns its ticket, 0: nothing to save, or
        no room."""
        check_whole("first_page", first_page, 0, MOST_PAGES)
        self._check_fence("ready", ready)
        return int(self._core.save(self._id, first_page, token_array(blocks), ready))

    def wait_copy(self, ticket: int, timeout: float = COPY_PATIENCE) -> bool:
        """Whether the copy was reported, or given up, within `timeout` seconds."""
        check_seconds("timeout", timeout)
        check_whole("ticket", ticket, 0, (1 << 63) - 1)
        return ticket == 0 or bool(self._core.wait_copy(ticket, timeout))

    # --- the end

    def release(self, fence: int | None = None) -> None:
        """Gives everything back. `fence`: the last batch that reads or writes rows of this lease; 0: none does any more; None:
        whatever was submitted until now may. Raises ValueError for a fence that was never given out."""
        if self._released:
            return
        if fence is None:
            fence = self._mover.device.mark_batch() if self._mover is not None and self._mover.device.asynchronous else 0
        self._check_fence("fence", fence)
        self._core.release(self._id, fence)  # twice does no harm
        self._released = True

    cancel = release

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()

    def __del__(self) -> None:
        if not self.__dict__.get("_id"):  # it never held anything
            return
        try:
            self._abandon()
        except KeyboardInterrupt:  # just here, where it cannot be raised on
            self._abandon()
        except Exception:  # the interpreter is ending, or this is a forked child
            return

    def _abandon(self) -> None:
        # On any thread, whatever stream is current there: no new fence. Work submitted since the last one is its owner's to mark.
        self.release(self._mover.device.marked if self._mover is not None else 0)
