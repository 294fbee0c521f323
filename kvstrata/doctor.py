"""What keeps a cache from working well on this machine: one row per check, with what to do about it.

Nothing waits long for a file system: whoever does not answer is a row of its own.
"""

import platform
import resource
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from kvstrata import __version__, capacity, machine
from kvstrata.config import ConfigError, Settings
from kvstrata.disk_speed import DiskSpeed, measure
from kvstrata.layout import PageLayout
from kvstrata.units import counted, in_bytes, readable

__all__ = ["Row", "Subject", "examine", "exit_code"]

FOLDER_S, SPEED_S, SURVEY_S = 0.9, 4.0, 2.0  # that the file system is given
STATES = ("ok", "warning", "error")


class Row(NamedTuple):
    """`state`: "ok", "warning" or "error". `fix`: what to do, empty where nothing is to be done."""

    check: str
    state: str
    value: str
    fix: str = ""


class Subject(NamedTuple):
    """What is to be served. `layout`: of the model's pages, where one is named; `seq_len` tokens, `sessions` at once."""

    settings: Settings
    layout: PageLayout | None
    seq_len: int
    sessions: int
    device: str = "cpu"


def examine(subject: Subject) -> Iterator[Row]:
    """The rows, one by one as they are found out."""
    rows = []
    for row in _looked_at(subject):
        rows.append(row)
        yield row
    if subject.layout is not None and not any(row.state == "error" and row.check in ("device", "disk_path") for row in rows):
        yield from _start(subject, subject.layout, [row.fix for row in rows])


def _looked_at(subject: Subject) -> Iterator[Row]:
    yield from _software()
    core = _core()
    yield core
    yield from _device(subject)
    yield from _memory(subject)
    root = subject.settings.disk_root
    if root is None:
        yield Row("disk tier", "ok", "off: kvc2.disk_path is not set, or kvc2.gpu_only is true")
        return
    if core.state == "error":
        yield Row("disk_path", "warning", "not looked at: that needs the core")
        return
    yield from _directory(subject, root)


def _start(subject: Subject, layout: PageLayout, told: list[str]) -> Iterator[Row]:
    """What the start itself would stop with, and was not told yet; and what it would pass over."""
    from kvstrata.opening import ACTIVATIONS, device_free

    settings, device = subject.settings, subject.device
    for unused in capacity.unused(settings):
        yield Row("settings", "warning", unused, "remove it, or what makes it useless")
    try:
        settings.resolve(layout, device=device, device_free_bytes=device_free(device, ACTIVATIONS))
    except ConfigError as error:
        for problem in str(error).splitlines():
            if not any(problem in fix for fix in told):
                value, _, fix = problem.partition("; ")
                yield Row("start", "error", value, fix)


def exit_code(rows: list[Row]) -> int:
    """0, 1 where there are warnings, 2 where there are errors."""
    return max((STATES.index(row.state) for row in rows), default=0)


def _software() -> Iterator[Row]:
    found = platform.python_version()
    enough = sys.version_info >= (3, 11)
    yield Row("python", "ok" if enough else "error", found, "" if enough else "use Python 3.11 or newer")
    yield Row("kvstrata", "ok", f"{__version__} on {platform.machine()}")
    for name, needed in (("torch", "the GPU tier and the engine need it"), ("transformers", "the engine needs it")):
        try:
            yield Row(name, "ok", version(name))
        except PackageNotFoundError:
            yield Row(name, "warning", "not installed", f"{needed}: pip install 'kvstrata[engine]'")


def _core() -> Row:
    try:
        core = import_module("kvstrata._core")
    except ImportError as error:
        fix = "install it again for this Python and machine: pip install --force-reinstall --no-deps kvstrata"
        return Row("core", "error", f"cannot be loaded, and there is no cache without it: {error}", fix)
    return Row("core", "ok", Path(core.__file__ or "").name)


def _device(subject: Subject) -> Iterator[Row]:
    settings, layout = subject.settings, subject.layout
    free: int | None = None
    if subject.device != "cpu":
        from kvstrata.opening import ACTIVATIONS, device_free

        try:
            free = device_free(subject.device, ACTIVATIONS)
        except (ValueError, RuntimeError) as error:
            yield Row("device", "error", str(error), "use --device cpu, or a machine with CUDA")
            return
    if layout is None:
        yield Row("GPU tier", "ok", "not looked at: name a model (--model) for the size of its pages")
        return
    problems: list[str] = []
    tier = capacity.gpu_tier(settings, layout, subject.device, machine.memory().usable if free is None else free, problems)
    told = f"{readable(tier.bytes)}, {tier.pages:,} pages, {tier.tokens:,} tokens on {subject.device}"
    yield Row("GPU tier", "error" if problems else "ok", told, "; ".join(problems))
    if subject.seq_len > tier.tokens and not problems:
        yield Row(
            "GPU tier for a request",
            "error",
            f"a request of {subject.seq_len:,} tokens does not fit into {tier.tokens:,}",
            "raise kvc2.gpu_memory_size_GB, or serve shorter requests (--seq-len)",
        )
    if settings.attn.page_size > subject.seq_len:
        yield Row(
            "page size",
            "warning",
            f"a page of {settings.attn.page_size} tokens is larger than a prompt of {subject.seq_len}: nothing would be shared",
            "set attn.page_size to less",
        )


def _memory(subject: Subject) -> Iterator[Row]:
    settings, layout = subject.settings, subject.layout
    if settings.kvc2.gpu_only:
        yield Row("CPU tier", "ok", "off: kvc2.gpu_only is true")
        return
    known = machine.memory()
    problems: list[str] = []
    size, _ = capacity.cpu_bytes(settings, known, problems)
    group = "no cgroup limit" if known.cgroup_limit is None else f"cgroup limit {readable(known.cgroup_limit)}"
    told = f"{readable(size)} of {readable(known.available)} free memory, {group}"
    yield Row("CPU tier", "error" if problems else "ok", told, "; ".join(problems))
    if subject.device != "cpu":
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        locked = soft == resource.RLIM_INFINITY or soft >= size
        limit = "no limit" if soft == resource.RLIM_INFINITY else readable(soft)
        fix = "" if locked else "raise it (ulimit -l) where pinning fails: copies from memory that is not pinned are slow"
        yield Row("locked memory", "ok" if locked else "warning", f"{limit} for {readable(size)} that are pinned", fix)
    if layout is None:
        return
    gpu = capacity.gpu_tier(settings, layout, "cpu", sys.maxsize, []) if subject.device == "cpu" else None
    if gpu is not None and size < gpu.bytes:
        yield Row(
            "CPU tier against GPU tier",
            "warning",
            f"{readable(size)} of CPU memory behind a pool of {readable(gpu.bytes)}: what leaves the pool is soon gone",
            "make kvc2.cpu_memory_size_GB larger than the GPU tier",
        )


def _directory(subject: Subject, root: Path) -> Iterator[Row]:
    from kvstrata._core import abilities

    group = subject.settings.kvc2.disk_group
    try:
        folder = machine.probe_folder(root, FOLDER_S, group=group)
        mode = root.stat().st_mode & 0o7777
        direct, ring = abilities(str(root), group)
    except machine.Unusable as cause:
        yield Row("disk_path", "error", f"{root} cannot be used: {cause}", "name a directory that this user can write")
        return
    except RuntimeError as error:
        yield Row("disk_path", "error", str(error))
        return
    then = root.stat().st_mode & 0o7777
    system = machine.file_system(root)
    state = ", not there yet: it can be made" if folder.made else f", and {then:04o} once a cache opens it" if then != mode else ""
    yield Row("disk_path", "ok", f"{root}, {system}, mode {mode:04o}{state}")
    yield Row("O_DIRECT", "ok" if direct else "warning", "yes" if direct else "no", "" if direct else _cached(system))
    yield Row("io_uring", "ok", "yes" if ring else "not allowed here: threads make the requests instead")
    yield from _space(subject, folder)
    try:
        speed = machine.within(SPEED_S, lambda: measure(root, direct))
    except TimeoutError:
        yield Row("disk speed", "warning", f"not measured within {SPEED_S:g} s", "look whether the disk is busy or ill")
    except OSError as error:
        yield Row("disk speed", "warning", f"not measured: {error.strerror}", "make space, or look at the disk")
    else:
        yield Row("disk speed", "ok", f"reads {readable(int(speed.read))}/s, writes {readable(int(speed.write))}/s")
        yield from _break_even(subject, speed)
    yield from _shelves(root)


def _cached(system: str) -> str:
    return f"reads and writes go through the page cache of {system}, which takes memory from others; a local ext4 or xfs does not"


def _space(subject: Subject, folder: machine.Folder) -> Iterator[Row]:
    kvc2 = subject.settings.kvc2
    reserve = in_bytes(kvc2.disk_reserve_free_GB)
    limit, why = capacity.disk_bytes(subject.settings, folder)
    there = max(min(limit, folder.free + folder.used - reserve), 0)
    told = (
        f"limit {readable(limit)}{f' ({why})' if why else ''}; {readable(folder.free)} free, {readable(folder.used)} held, "
        f"{readable(reserve)} reserved: {readable(there)} can be used"
    )
    short = there < limit
    yield Row("disk space", "warning" if short else "ok", told, "lower kvc2.disk_size_GB or make space" if short else "")
    layout = subject.layout
    if layout is None:
        return
    pages = layout.pages_for(subject.seq_len) * subject.sessions
    slot = layout.slot_bytes
    needed = pages * slot
    sum_of_it = (
        f"{subject.sessions} sessions x {layout.pages_for(subject.seq_len):,} pages of {layout.page_size} tokens "
        f"({subject.seq_len:,} tokens each) x {readable(slot)} = {readable(needed)}; {readable(there)} can be used"
    )
    enough = needed <= there
    fix = "" if enough else f"give kvc2.disk_size_GB at least {readable(needed)} on a file system that has it, or fewer sessions"
    yield Row("disk space for the sessions", "ok" if enough else "error", sum_of_it, fix)


def _break_even(subject: Subject, speed: DiskSpeed) -> Iterator[Row]:
    layout = subject.layout
    if layout is None:
        return
    seconds = layout.slot_bytes / speed.read
    yield Row(
        "load or recompute",
        "ok",
        f"a page of {layout.page_size} tokens is read in {seconds * 1000:.3g} ms: worth it where prefill makes fewer than "
        f"{layout.page_size / seconds:,.0f} tokens per second (kvstrata measures both and decides)",
    )


def _shelves(root: Path) -> Iterator[Row]:
    from kvstrata.survey import survey

    try:
        found: dict[str, Any] = machine.within(SURVEY_S, lambda: survey(root))
    except TimeoutError:
        yield Row("shelves", "warning", f"not looked at within {SURVEY_S:g} s", "run kvstrata inspect")
        return
    except RuntimeError as error:
        yield Row("shelves", "error", str(error))
        return
    alive = sum(shelf["alive"] for shelf in found["shelves"])
    pages = sum(space["pages"] for space in found["namespaces"])
    told = f"{counted(pages, 'page')} in {len(found['shelves'])} shelves, {alive} of processes that live"
    yield Row("shelves", "ok", told)
    for problem in found["problems"]:
        yield Row("shelves", "warning", problem, "run kvstrata verify --repair")
    for file in found["unknown"]:
        yield Row("shelves", "warning", f"{file['path']} is not ours", "remove it, if nobody needs it: it counts against the limit")
