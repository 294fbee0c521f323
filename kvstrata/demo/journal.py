"""The cache's event log, read as proof: where the pages of the text were before a request, and by which moves they came."""

from collections import Counter
from collections.abc import Iterable

from kvstrata.cache import Event
from kvstrata.demo.spec import TIERS

# Where the pages of the text must be, and must not be, when the request of a case is submitted.
HOME = {"gpu": "gpu", "cpu": "cpu", "disk": "disk", "restart": "disk"}
# The moves that bring each of them: (tier, where its bytes came from).
MOVES = {
    "gpu": (),
    "cpu": (("gpu", "cpu"),),
    "disk": (("cpu", "disk"), ("gpu", "cpu")),
    "restart": (("cpu", "disk"), ("gpu", "cpu")),
}


class Journal:
    """Replays events. `pages` are the keys of the text's full pages, in order, once they are known."""

    def __init__(self, pages: Iterable[bytes] = ()) -> None:
        self.pages = list(pages)
        self._tiers: dict[bytes, set[str]] = {}
        self._moves: Counter[tuple[bytes, str, str]] = Counter()  # since begin()

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            tiers = self._tiers.setdefault(event.key, set())
            if event.kind == "stored":
                tiers.add(event.tier)
                self._moves[event.key, event.tier, event.source] += 1
            else:
                tiers.discard(event.tier)

    def learn(self, events: Iterable[Event], pages: int) -> None:
        """The first `pages` pages that the cold request computed are the text's."""
        found = {event.depth: event.key for event in events if (event.kind, event.tier, event.source) == ("stored", "gpu", "gpu")}
        self.pages = [found[depth] for depth in range(1, pages + 1) if depth in found]

    def begin(self) -> None:
        """A request is about to be submitted: moves are counted from here."""
        self._moves.clear()

    def moved(self, tier: str, source: str) -> int:
        """Pages of the text that came into `tier` from `source` since begin()."""
        return sum(self._moves[key, tier, source] > 0 for key in self.pages)

    def faults_before(self, case: str) -> list[str]:
        """Why the request of this case would not be served from its tier alone; empty: all pages are where they must be."""
        home = HOME[case]
        faster = TIERS[: TIERS.index(home)]
        known = case != "restart"  # what lies on disk from an earlier process is in no event
        missing = sum(home not in self._tiers.get(key, ()) for key in self.pages) if known else 0
        faults = [f"{missing} of {len(self.pages)} pages are not in {home}"] if missing else []
        for tier in faster:
            left = sum(tier in self._tiers.get(key, ()) for key in self.pages)
            faults += [f"{left} of {len(self.pages)} pages are still in {tier}"] if left else []
        return faults

    def faults_after(self, case: str) -> list[str]:
        """Why the request of this case was not served from its tier alone; empty: every page came the way it must."""
        faults = []
        for tier in ("gpu", "cpu"):
            for source in TIERS:
                came, wanted = self.moved(tier, source), len(self.pages) if (tier, source) in MOVES[case] else 0
                if came != wanted:
                    faults.append(f"{came} pages came to {tier} from {source}, not {wanted}")
        return faults
