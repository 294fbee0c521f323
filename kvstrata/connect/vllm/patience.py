"""How long a request waits for pages that are still on disk: as long as that can beat computing them, and within the deadline."""

from collections.abc import Callable, Iterable

from kvstrata.cache import Lease, PrefixCache
from kvstrata.connect.vllm.requests import Tracked
from kvstrata.speed import Speed, worth_loading

__all__ = ["Patience"]

PREFILL = 64  # tokens: steps of fewer say nothing about prefill
PROBE_EVERY = 10.0  # seconds between two looks whether a disk that was too slow has become faster


class Patience:
    """Speeds are learned from what the engine does: steps give the speed of prefill, loads that of the disk."""

    def __init__(self, cache: PrefixCache) -> None:
        self.cache = cache
        self.prefill = Speed()  # tokens per second
        self.disk = Speed()  # bytes per second
        self._steps: list[tuple[int, float]] = []  # (tokens, begun at) of steps under way
        self._probe: tuple[Lease, float] | None = None
        self._probed_at: float | None = None  # also when the disk was first found too slow

    @property
    def disk_helps(self) -> bool:
        """Whether reading from disk can beat computing at all, with nobody in the queue."""
        per_token = self.cache.layout.bytes_per_token
        return worth_loading(per_token, 0, self.disk.value, 1, self.prefill.value)

    def probe(self, tracked: Tracked, lease: Callable[[], Lease | None], now: float) -> None:
        """Nobody waits for the disk now, so nobody would learn that it is fast again: now and then a lease that no request needs
        reads what is on disk of this one, and its time is taken."""
        if self._probed_at is None:
            self._probed_at = now
        if self._probe is None and now - self._probed_at >= PROBE_EVERY:
            self._probed_at = now
            if (found := lease()) is not None:
                self._probe = (found, now)

    def watch(self, now: float) -> None:
        """Has the probe ended?"""
        if self._probe is None:
            return
        lease, began = self._probe
        late = now - began > self.cache.limits.load_deadline
        if lease.ready and not late and (tokens := lease.sources["disk"]):
            self.disk.measured(tokens * self.cache.layout.bytes_per_token, now - began)
        if lease.ready or late:
            self.forget_probe()

    def forget_probe(self) -> None:
        if self._probe is not None:
            self._probe[0].release()
            self._probe = None

    def began(self, tokens: int, now: float) -> None:
        """A step with so many tokens was scheduled."""
        if tokens == 0:  # of a step without a forward pass nobody hears that it ended
            return
        self._steps.append((tokens, now))
        del self._steps[:-8]  # the engine has fewer in flight; those it never answered are forgotten

    def ended(self, now: float) -> None:
        """The oldest step under way has ended."""
        if self._steps:
            tokens, began = self._steps.pop(0)
            if tokens >= PREFILL:
                self.prefill.measured(tokens, now - began)

    def seconds(self, tracked: Tracked, others: Iterable[Tracked]) -> float:
        """For a request that has its lease, and pages of it on disk, among `others`."""
        tokens = on_disk(tracked)
        if not tokens:  # another request brings them, or saves them right now
            return self.cache.limits.load_deadline
        per_token = self.cache.layout.bytes_per_token
        queued = self._queued(tracked, others) * per_token
        worth = worth_loading(tokens * per_token, queued, self.disk.value, tokens, self.prefill.value)
        return self.cache.limits.load_deadline if worth else 0.0

    def loaded(self, tracked: Tracked, now: float, step: int) -> None:
        """All pages of the request are there, as was seen at `step`. Seen late, where a step ran meanwhile."""
        tokens = on_disk(tracked)
        if tokens and tracked.wait is not None:
            self.disk.measured(
                tokens * self.cache.layout.bytes_per_token, now - tracked.began_at, at_least=step > tracked.steps + 1
            )

    def _queued(self, tracked: Tracked, others: Iterable[Tracked]) -> int:
        """Tokens on disk that others wait for and this one does not. Who shares its first page waits for the same ones, mostly."""
        own = self._first_page(tracked)
        waiting: dict[object, int] = {}
        for other in others:
            if (
                other is not tracked
                and other.lease is not None
                and not other.lease.ready
                and (key := self._first_page(other)) != own
            ):
                waiting[key] = max(waiting.get(key, 0), on_disk(other))
        return sum(waiting.values())

    def _first_page(self, tracked: Tracked) -> tuple[object, bytes]:
        return tracked.content[:2], tracked.tokens(self.cache.page_size).tobytes()


def on_disk(tracked: Tracked) -> int:
    """Tokens of the hit that were on disk when the lease was made."""
    return tracked.lease.sources["disk"] if tracked.lease is not None else 0
