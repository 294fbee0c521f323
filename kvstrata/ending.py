"""The end of a cache: by close(), when it is collected, or when the interpreter ends; whichever comes first."""

import atexit
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Protocol

from kvstrata._core import Core

__all__ = ["Ending"]

UNASKED_S = 2.0  # for saving what is on its way, where nobody called close()
JOIN_S = 1.0


class Joined(Protocol):
    """Threads that end when the core is closed."""

    def join(self, timeout: float) -> None: ...


class Ending:
    """Closes the core, then waits for the threads around it, once. Knows these, never the cache, which may go earlier."""

    def __init__(self, cache: object, core: Core, around: Sequence[Joined]) -> None:
        self._core, self._around = core, around
        self._owner = os.getpid()
        self._once = threading.Lock()
        self._begun = self._saved = False
        self._unasked = weakref.finalize(cache, self.close, UNASKED_S)
        self._unasked.atexit = False  # weakref's one hook is as old as the first finalizer of the process; ours runs in its turn
        atexit.register(self._unasked)

    def close(self, timeout: float) -> bool:
        """Saves what is on its way to disk, at most `timeout` seconds. True: everything was saved, also when asked again."""
        if os.getpid() != self._owner:  # a forked child: threads and files are its parent's
            return False
        with self._once:
            if not self._begun:
                self._begun = True
                atexit.unregister(self._unasked)
                self._unasked.detach()
                self._saved = bool(self._core.close(timeout))
                for threads in self._around:
                    threads.join(JOIN_S)
            return self._saved
