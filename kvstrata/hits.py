"""Whether anything of what is stored is ever found again: a disk tier that is only written earns one line in the log, with why."""

import logging
import threading

from kvstrata._core import Core
from kvstrata.explaining import nearest_namespaces
from kvstrata.machine import within

__all__ = ["HitWatch"]

log = logging.getLogger("kvstrata")
LOOK_S = 60.0  # between two looks at the counters
ANSWER_S = 2.0  # that the file system is given
LOOKUPS, STORED = 200, 1000  # prompts and pages that say something


class HitWatch:
    """Looks until there was a hit, or it has warned; then it is `over`. The thread of health.py looks; leases hand in a reason."""

    def __init__(self, core: Core, disk_path: str) -> None:
        self._core = core
        self._path = disk_path
        self._missed: tuple[str, str] | None = None
        self._changing = threading.Lock()
        self.asking = False  # the next prompt that misses is wanted
        self.over = False

    def missed(self, because: str, ours: str) -> None:
        """A prompt found nothing: why, in a sentence, and the description of its namespace. No I/O: this is the serving thread."""
        with self._changing:
            if self.asking:
                self.asking, self._missed = False, (because, ours)

    def look(self) -> None:
        """At the counters; and where a reason was handed in, at the descriptions of other namespaces."""
        if self.over:
            return
        stats = self._core.stats()
        if any(stats[tier]["looked_up"] for tier in ("gpu", "cpu", "disk")):
            self.asking, self.over = False, True
            return
        prompts, stored = min(stats["leases"], stats["missed_pages"]), stats["disk"]["stored"]
        if prompts < LOOKUPS or stored < STORED:
            return
        with self._changing:
            missed, self.asking = self._missed, self._missed is None
        if missed is None:
            return
        self.over = True
        because, ours = missed
        log.warning(
            "disk tier %s: %d pages were stored, and none of %d prompts found anything. The latest: %s%s",
            self._path,
            stored,
            stats["leases"],
            because,
            self._others(ours),
        )

    def _others(self, ours: str) -> str:
        """The namespace on disk that is most like ours, and the first field that differs."""
        try:
            others = within(ANSWER_S, lambda: nearest_namespaces(self._path, ours, most=1))
        except (TimeoutError, OSError):
            return ""
        for other in others:
            if not other["differs"]:
                return "; the nearest other namespace differs in tenant"
            field, (mine, theirs) = next(iter(other["differs"].items()))
            return f"; the nearest other namespace ({other['model'] or 'no name'}) differs in {field}: {mine} here, {theirs} there"
        return ""
