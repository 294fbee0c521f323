"""Processes beside the test's own, told what to do (neighbour.py)."""

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from processes import python

Open = Callable[..., "Neighbour"]


class Neighbour:
    """One of them, and what it answers."""

    def __init__(self, root: Path, cap: int) -> None:
        self.process = python("neighbour.py", root, cap)
        self.opened = self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        return json.loads(line)

    def tell(self, *words: object) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def serve(self, pages: int, seed: int) -> int:
        """Pages found, every byte of which was right."""
        answer = self.tell("serve", pages, seed)
        assert answer["wrong"] == 0
        assert self.tell("flush")
        return int(answer["hit"])

    @property
    def disk(self) -> dict[str, Any]:
        disk: dict[str, Any] = self.tell("stats")["disk"]
        return disk

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()

    def close(self) -> bool:
        """Ends as one should; whether everything was saved."""
        saved = bool(self.tell("close"))
        self.process.communicate()
        return saved


@contextmanager
def moving_in(root: Path, cap: int = 4 << 20) -> Iterator[Open]:
    """move_in(cap): a process in the directory. All are killed at the end."""
    there = []

    def one_more(cap: int = cap) -> Neighbour:
        there.append(Neighbour(root, cap))
        return there[-1]

    yield one_more
    for neighbour in there:
        neighbour.kill()
