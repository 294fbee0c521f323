"""Running the commands for a cache directory, and directories for them to look at."""

import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from support import PAGE, fingerprint, prompt, serve, settle

from kvstrata.cache import PrefixCache
from kvstrata.cli import main

SLOTS_AT = 8192  # of a small segment: its header and its table of records lie before
ROW_AT = 4096  # of a slot: its header lies before
KV = Path("shelves/*/*.kvs")


class Ended(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.out)
        return found


def kvstrata(*arguments: object) -> Ended:
    """The command line, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["kvstrata", *map(str, arguments)]),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            main()
            status = 0
        except SystemExit as end:
            status = int(end.code or 0)
    return Ended(status, out.getvalue(), err.getvalue())


def fill_disk(cache: PrefixCache, pages: int = 10, seed: int = 5, **options: Any) -> np.ndarray:
    """One prompt, saved to disk."""
    tokens = prompt(pages, seed=seed)
    serve(cache, tokens, **options)
    settle(cache)
    return tokens


def segments(root: Path) -> list[Path]:
    return sorted(root.glob(str(KV)))


def slot_of(root: Path, cache: PrefixCache, tokens: np.ndarray, page: int) -> tuple[Path, int]:
    """(file, offset of the slot) of a page of the prompt."""
    content = fingerprint(cache.layout, cache.namespace(), tokens[: (page + 1) * PAGE]).tobytes()
    for path in segments(root):
        at = path.read_bytes().find(content)
        if at >= 0:
            return path, at - ROW_AT
    raise AssertionError(f"page {page} is not on disk")


def traces(root: Path, tokens: np.ndarray) -> int:
    """How many pages of the prompt have their tokens in clear in some file, at a multiple of four bytes."""
    pages = {tokens[at : at + PAGE].astype(np.int32).tobytes() for at in range(0, len(tokens) - PAGE + 1, PAGE)}
    heads = np.array([int.from_bytes(page[:8], "little", signed=True) for page in pages])
    found = set()
    for file in (path.read_bytes() for path in root.rglob("*") if path.is_file()):
        for shift in (0, 4):
            words = np.frombuffer(file, "<i8", offset=min(shift, len(file)), count=max(0, len(file) - shift) // 8)
            for at in np.flatnonzero(np.isin(words, heads)) * 8 + shift:
                found.add(file[at : at + 4 * PAGE])
    return len(found & pages)


def snapshot(root: Path) -> dict[str, tuple[int, int, bytes]]:
    """Everything below a directory: mode, time of the last change, content."""
    return {
        str(path.relative_to(root)): (path.lstat().st_mode, path.lstat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in sorted(root.rglob("*"))
    }
