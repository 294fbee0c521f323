"""The health of the disk tier, told in the log: one line when it becomes ill, and one when it is well again."""

import logging
import threading
import time

from kvstrata import hits
from kvstrata._core import Core

__all__ = ["HealthLog"]

log = logging.getLogger("kvstrata")
QUIET = 60.0  # seconds in which the same trouble is not told again


class HealthLog:
    """A thread that waits for changes, and now and then looks whether there are hits; it ends when the core is closed."""

    def __init__(self, core: Core, disk_path: str, watch: hits.HitWatch) -> None:
        self._watch = watch
        self._core = core
        self._path = disk_path
        self._told: dict[str, float] = {}  # when each trouble was told last
        self._ill = False  # as far as the log tells
        self._since = 0.0
        self._thread = threading.Thread(target=self._run, name="kvstrata-health", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        changes, closed = 0, False
        while not closed:
            known, patience = changes, float("inf") if self._watch.over else hits.LOOK_S
            changes, sentence, since, closed = self._core.wait_health(known, patience)
            if not closed and changes != known:
                self.tell(sentence, since)
            elif not closed:
                self._watch.look()

    def tell(self, sentence: str, since: float) -> None:
        """`sentence`: "ok", or what does not work and why; `since`: seconds since 1970."""
        now = time.monotonic()
        if sentence == "ok":
            if self._ill:
                log.warning("disk tier %s: works again after %.0f s", self._path, max(time.time() - self._since, 0))
            self._ill = False
        elif now - self._told.get(sentence, -QUIET) >= QUIET:
            clock = time.strftime("%H:%M:%S", time.localtime(since))
            log.warning("disk tier %s: %s (since %s; it is tried again by itself)", self._path, sentence, clock)
            self._told[sentence] = now
            self._ill, self._since = True, since

    def join(self, timeout: float) -> None:
        self._thread.join(timeout)
