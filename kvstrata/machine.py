"""What the machine has: free memory within its limits, and whether a directory can hold a cache."""

import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

ANSWER_S = 1.5  # a file system that takes longer counts as hung
LOOK_S = 0.1  # for a first look whether it is there
COUNTING_S = 0.5  # for adding up what a cache directory holds already
UNLIMITED = 1 << 60  # cgroup v1 writes a number as large as this for no limit

T = TypeVar("T")


class Memory(NamedTuple):
    """RAM in bytes. `cgroup_limit`: the smallest limit on this process, None without one; `cgroup_free`: what is left of it."""

    total: int
    available: int
    cgroup_limit: int | None = None
    cgroup_free: int | None = None

    @property
    def usable(self) -> int:
        """What this process can still allocate."""
        return self.available if self.cgroup_free is None else min(self.available, self.cgroup_free)


class Folder(NamedTuple):
    """A directory that can be written. Bytes of its file system, free there for this user, held by the directory itself. `made`: it
    was not there before."""

    path: Path
    total: int
    free: int
    used: int
    made: bool = False


class Unusable(Exception):
    """A directory cannot be used; the text is the cause."""


def memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> Memory:
    """The RAM of this machine and of the control groups that this process is in."""
    sizes = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines() if ":" in line)
    total, available = (int(sizes[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    limits = list(_cgroup_limits(proc, cgroups))
    if not limits:
        return Memory(total, available)
    return Memory(total, available, min(limit for limit, _ in limits), min(free for _, free in limits))


def _cgroup_limits(proc: Path, cgroups: Path) -> Iterator[tuple[int, int]]:
    """(limit, free) of every group with a memory limit from ours up to the root, for version 1 and 2."""
    with suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                root, names = cgroups, ("memory.max", "memory.current", "inactive_file")
            elif "memory" in controllers.split(","):
                root, names = cgroups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            else:
                continue
            group = root if ".." in path else root / path.strip("/")  # above what this namespace shows
            while True:
                with suppress(OSError, ValueError):
                    limit = int((group / names[0]).read_text())  # "max": ValueError
                    if limit < UNLIMITED:
                        yield limit, max(limit - _working_set(group, names[1], names[2]), 0)
                if group == root:
                    break
                group = group.parent


def _working_set(group: Path, usage: str, inactive: str) -> int:
    """Bytes in use that cannot be reclaimed at once."""
    used = int((group / usage).read_text())
    with suppress(OSError, KeyError, ValueError):
        used -= int(dict(line.split() for line in (group / "memory.stat").read_text().splitlines())[inactive])
    return used


def probe_folder(path: Path, deadline: float | None = None, *, group: bool = False) -> Folder:
    """Makes the directory where it is missing (mode 0700), writes and removes a small file in it, and measures it.

    `group`: others of its group may own it. Answers within `deadline` seconds (1.5) even where the file system hangs. Raises
    Unusable.
    """
    deadline = ANSWER_S if deadline is None else deadline
    try:
        return within(deadline, lambda: _probe(path, group))
    except TimeoutError:
        raise Unusable(f"it did not answer within {deadline:g} s (a mount that hangs?)") from None
    except FileExistsError:
        raise Unusable("it is not a directory") from None
    except NotADirectoryError as error:
        raise Unusable(f"part of it is a file, not a directory ({error.filename})") from None
    except PermissionError as error:
        raise Unusable(f"this user may not write to {error.filename}") from None
    except OSError as error:
        raise Unusable(f"{error.strerror or error} ({error.filename or path})") from None


def _probe(path: Path, group: bool) -> Folder:
    made = not os.path.lexists(path)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    owner = path.stat().st_uid
    if owner != os.geteuid() and not group:  # whether a group shares it, the core looks at
        raise Unusable(f"it belongs to user {owner}, and this is user {os.geteuid()}")
    name = path / f".probe-{secrets.token_hex(8)}"
    file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.write(file, bytes(4096))
    finally:
        os.close(file)
        os.unlink(name)
    system = os.statvfs(path)
    return Folder(path, system.f_blocks * system.f_frsize, system.f_bavail * system.f_frsize, _held(path), made)


@contextmanager
def only_looking(path: Path | None) -> Iterator[None]:
    """Leaves a directory as it was, where nobody puts anything into it meanwhile: what is made of it inside, its parents included,
    is removed again, and an empty one gets back its mode."""
    missing: list[Path] = []
    mode: int | None = None

    def look() -> None:
        nonlocal mode
        if path is not None:
            missing.extend(one for one in (path, *path.parents) if not os.path.lexists(one))
            mode = None if missing else path.stat().st_mode

    def restore() -> None:
        for one in missing:  # from the deepest up
            one.rmdir()
        if path is not None and mode is not None and path.stat().st_mode != mode and not os.listdir(path):
            path.chmod(stat.S_IMODE(mode))

    with suppress(TimeoutError, OSError):  # what hangs is told of by others, and soon
        within(LOOK_S, look)
    try:
        yield
    finally:
        with suppress(TimeoutError, OSError):
            within(ANSWER_S, restore)


def file_system(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """The kind of file system that holds a path: "ext4", "nfs4", ...; "unknown" where the system does not tell."""
    best, kind = -1, "unknown"
    with suppress(OSError):
        where = path.resolve()
        for line in mounts.read_text().splitlines():
            fields = line.split()
            point = Path(fields[4].encode().decode("unicode_escape"))  # spaces are written as octal escapes
            if (where == point or point in where.parents) and len(point.parts) > best:
                best, kind = len(point.parts), fields[fields.index("-") + 1]
    return kind


def _held(path: Path) -> int:
    """Disk bytes of the files below a directory, as far as they can be counted in time."""
    until = time.monotonic() + COUNTING_S
    held, folders = 0, [path]
    while folders and time.monotonic() < until:
        with suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                with suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(Path(entry.path))
                    elif stat.S_ISREG((found := entry.stat(follow_symlinks=False)).st_mode):
                        held += found.st_blocks * 512
    return held


def within(deadline: float, work: Callable[[], T]) -> T:
    """The result of `work`, or TimeoutError. It runs in a daemon thread, which is left behind where it hangs."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="kvstrata-probe", daemon=True)
    thread.start()
    thread.join(deadline)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError
    return results[0]
