"""What the file system of a directory reads and writes per second: a short measurement that leaves nothing behind."""

import mmap
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

__all__ = ["DiskSpeed", "measure"]

REQUEST = 2 << 20  # as large as the disk tier's own
REQUESTS = 16
ENOUGH_S = 0.5


class DiskSpeed(NamedTuple):
    """Bytes per second, one request after the other."""

    read: float
    write: float


def measure(folder: Path, direct: bool) -> DiskSpeed:
    """Writes and reads a file that has no name, up to 32 MiB of it. `direct`: with O_DIRECT. Raises OSError."""
    name = folder / f".speed-{secrets.token_hex(8)}"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
    file = os.open(name, flags, 0o600)
    try:
        os.unlink(name)
        with mmap.mmap(-1, REQUEST) as buffer:
            buffer.write(os.urandom(1 << 16) * (REQUEST >> 16))  # what compresses is no measure
            written, write_s = _timed(lambda at: os.pwritev(file, [buffer], at), REQUESTS, lambda: os.fsync(file))
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            read, read_s = _timed(lambda at: os.preadv(file, [buffer], at), written // REQUEST)
            return DiskSpeed(read / read_s, written / write_s)
    finally:
        os.close(file)


def _timed(request: Callable[[int], int], count: int, end: Callable[[], None] | None = None) -> tuple[int, float]:
    began = time.perf_counter()
    done = 0
    while done < count * REQUEST and (done == 0 or time.perf_counter() - began < ENOUGH_S):
        if request(done) != REQUEST:
            raise OSError(5, "a request was cut short")
        done += REQUEST
    if end is not None:
        end()
    return done, max(time.perf_counter() - began, 1e-9)
