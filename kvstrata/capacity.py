"""What the settings come to on this machine for one model: bytes, pages and tokens of each tier, checked against what there is."""

from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvstrata import machine
from kvstrata.config_file import ConfigError
from kvstrata.layout import PageLayout
from kvstrata.units import GB, in_bytes, readable

if TYPE_CHECKING:
    from kvstrata.config import Settings

__all__ = ["Capacity", "Tier", "check", "cpu_bytes", "disk_bytes", "gpu_tier", "resolve", "unused"]

POOL_TOKENS = 4096  # per request of max_batch_size, of the GPU tier's default on the CPU
CPU_SHARE, CPU_MOST = 0.10, 8 * GB
DISK_SHARE, DISK_MOST = 0.10, 50 * GB
DISK_PAGES = 4  # a segment of the disk tier has at least so many
DISK_UNUSED = "kvc2.disk_size_GB: not used, since kvc2.disk_path is not set"
OWNED = "the engine's own block pool"  # guest mode
NOT_GUESTS = ("attn.chunk_size", "max_batch_size", "kvc2.gpu_only", "kvc2.utilization_percentage", "kvc2.gpu_memory_size_GB")


class Tier(NamedTuple):
    """`bytes`: the limit. `pages`, `tokens`: what fits (on disk a little less: slots have headers). `why`: how it came about."""

    bytes: int
    pages: int
    tokens: int
    why: str


@dataclass(frozen=True)
class Capacity:
    """The tiers in effect, None for those that are off. The GPU tier's scratch row is part of its bytes and not of its pages."""

    settings: "Settings"
    layout: PageLayout
    device: str
    gpu: Tier
    cpu: Tier | None
    disk: Tier | None
    disk_path: Path | None
    disk_reserve_bytes: int
    warnings: tuple[str, ...]

    def banner(self, ranks: int = 1, parts: int = 1) -> list[str]:
        """One line per setting: its value, what it comes to, and where it came from; then one line per warning.

        `ranks` share each tier, and a row holds the `parts` that differ between them.
        """
        settings, layout = self.settings, self.layout
        shape = f"{len(layout.layers)} layers, {layout.dtype}, {layout.bytes_per_token:,} bytes per token"
        shared = (ranks, parts)
        off = "off, since kvc2.gpu_only is true" if settings.kvc2.gpu_only else "off, since kvc2.disk_path is not set"
        lines = {
            "attn.page_size": f"{layout.page_size} tokens, {readable(layout.row_bytes)} per page ({shape})",
            "attn.chunk_size": f"{settings.attn.chunk_size} tokens, prefill in chunks of {settings.chunk}: "
            "what is reused is a multiple of that",
            "max_batch_size": f"{settings.max_batch_size} at once",
            "kvc2.gpu_only": str(settings.kvc2.gpu_only).lower(),
            "kvc2.utilization_percentage": f"{settings.kvc2.utilization_percentage:g}"
            + (" (not used on the CPU)" if self.device == "cpu" else ""),
            "kvc2.gpu_memory_size_GB": _told(self.gpu) + f" on {self.device}",
            "kvc2.cpu_memory_size_GB": _told(self.cpu, *shared) if self.cpu else off,
            "kvc2.disk_path": str(self.disk_path) if self.disk_path else off,
            "kvc2.disk_group": ("shared with its group" if settings.kvc2.disk_group else "this user's alone")
            if self.disk_path
            else off,
            "kvc2.disk_size_GB": _told(self.disk, *shared) if self.disk else off,
            "kvc2.disk_reserve_free_GB": f"{readable(self.disk_reserve_bytes)} left free",
            "kvc2.io_threads": str(settings.kvc2.io_threads),
            "kvc2.load_deadline_s": f"{settings.kvc2.load_deadline_s:g} s",
        }
        if self.gpu.why == OWNED:  # what the engine decides is none of ours to tell
            lines = {key: text for key, text in lines.items() if key not in NOT_GUESTS}
        width = max(map(len, lines))
        told = [f"{key:{width}}  {text}  [{settings.origin(key)}]" for key, text in lines.items()]
        return told + [f"warning: {warning}" for warning in self.warnings]


def check(settings: "Settings", memory: machine.Memory | None = None) -> None:
    """What can be checked without a model: that the CPU tier fits in memory, and that the disk tier's directory can be used.

    Answers in under two seconds. Raises ConfigError.
    """
    problems: list[str] = []
    cpu_bytes(settings, memory or machine.memory(), problems)
    _folder(settings, problems)
    if problems:
        raise ConfigError("\n".join(problems))


def resolve(
    settings: "Settings",
    layout: PageLayout,
    *,
    device: str = "cpu",
    device_free_bytes: int | None = None,
    memory: machine.Memory | None = None,
    guest: bool = False,
) -> Capacity:
    """The tiers that `settings` come to for pages of `layout`.

    `device_free_bytes`: device memory left after the model and its activations, needed unless `device` is "cpu". `memory`: of this
    machine by default. `guest`: another engine owns the device, so there is no GPU tier of ours. Raises ConfigError where something
    does not fit or the directory cannot be used, in under two seconds.
    """
    if layout.page_size != settings.attn.page_size:
        raise ValueError(f"the layout has pages of {layout.page_size} tokens, the settings of {settings.attn.page_size}")
    memory = memory or machine.memory()
    problems: list[str] = []
    warnings = unused(settings, guest)
    if settings.others:
        warnings.insert(0, f"{', '.join(settings.others)}: not used, these sections are KTransformers' own")
    cpu = disk = None
    if guest:
        gpu = Tier(0, 0, 0, OWNED)
        if settings.kvc2.gpu_only:
            problems.append("kvc2.gpu_only is true, but the GPU tier is the engine's own here, so no tier would be left; remove it")
    else:
        gpu = gpu_tier(settings, layout, device, memory.usable if device == "cpu" else device_free_bytes, problems)
    if not settings.kvc2.gpu_only:
        cpu = _tier(settings, layout, "kvc2.cpu_memory_size_GB", *cpu_bytes(settings, memory, problems), 1, problems)
        if device == "cpu" and not problems and gpu.bytes + cpu.bytes > memory.usable:
            problems.append(
                f"kvc2.gpu_memory_size_GB of {readable(gpu.bytes)} and kvc2.cpu_memory_size_GB of {readable(cpu.bytes)} together "
                f"are more than the {readable(memory.usable)} of memory that is free; make one of them smaller"
            )
    folder = _folder(settings, problems)
    if folder is not None:
        disk = _disk(settings, layout, folder, problems, warnings)
    if problems:
        raise ConfigError("\n".join(problems))
    reserve = in_bytes(settings.kvc2.disk_reserve_free_GB)
    return Capacity(settings, layout, device, gpu, cpu, disk, folder and folder.path, reserve, tuple(warnings))


def gpu_tier(settings: "Settings", layout: PageLayout, device: str, free: int | None, problems: list[str]) -> Tier:
    """The GPU tier in `free` bytes of the device; what is wrong with it is added to `problems`."""
    key = "kvc2.gpu_memory_size_GB"
    if free is None:
        raise ValueError(f"device_free_bytes is needed on {device}: the memory left after the model and its activations")
    if settings.kvc2.gpu_memory_size_GB is not None:
        size, why = in_bytes(settings.kvc2.gpu_memory_size_GB), ""
        fix = "make it smaller or leave it out for the default"
    elif device == "cpu":
        size = layout.bytes_for(settings.max_batch_size * POOL_TOKENS) + layout.row_stride
        why = f"max_batch_size {settings.max_batch_size} x {POOL_TOKENS:,} tokens"
        fix = f"set {key} or a smaller max_batch_size"
    else:
        share = settings.kvc2.utilization_percentage
        size, why = int(free * share), f"kvc2.utilization_percentage {share:g} of {readable(free)}"
        fix = "use a smaller model or a device with more memory"
    if size > free:
        told = f" ({why})" if why else ""
        problems.append(f"{key} of {readable(size)}{told} is more than the {readable(free)} that are free on {device}; {fix}")
    tier = _tier(settings, layout, key, size, why, 2, problems)
    return tier._replace(pages=tier.pages - 1, tokens=tier.tokens - layout.page_size)  # one row is the scratch row


def cpu_bytes(settings: "Settings", memory: machine.Memory, problems: list[str]) -> tuple[int, str]:
    """(size of the CPU tier, how it came about); what is wrong with it is added to `problems`."""
    most = memory.available if memory.cgroup_limit is None else min(memory.available, memory.cgroup_limit)
    default = min(int(most * CPU_SHARE), CPU_MOST)
    if settings.kvc2.gpu_only or settings.kvc2.cpu_memory_size_GB is None:
        limit = "free memory" if most == memory.available else "the cgroup limit"
        return default, f"{CPU_SHARE:.0%} of {readable(most)} {limit}" if default < CPU_MOST else f"at most {readable(CPU_MOST)}"
    size = in_bytes(settings.kvc2.cpu_memory_size_GB)
    if size > memory.usable:
        within = "" if memory.cgroup_limit is None else f" within the cgroup limit of {readable(memory.cgroup_limit)}"
        problems.append(
            f"kvc2.cpu_memory_size_GB of {readable(size)} is more than the {readable(memory.usable)} of memory that is free"
            f"{within}; make it smaller or leave it out for {readable(default)}"
        )
    return size, ""


def _folder(settings: "Settings", problems: list[str]) -> machine.Folder | None:
    if settings.disk_root is None:
        return None
    try:
        return machine.probe_folder(settings.disk_root, group=settings.kvc2.disk_group)
    except machine.Unusable as cause:
        problems.append(
            f"kvc2.disk_path {settings.disk_root} cannot be used: {cause}; give a directory that this user can write, "
            "or leave it out for no disk tier"
        )
    return None


def _disk(settings: "Settings", layout: PageLayout, folder: machine.Folder, problems: list[str], warnings: list[str]) -> Tier:
    key = "kvc2.disk_size_GB"
    reserve = in_bytes(settings.kvc2.disk_reserve_free_GB)
    space = max(folder.free + folder.used - reserve, 0)
    told = f"{readable(folder.free)} free at {folder.path}, {readable(folder.used)} held by the cache, {readable(reserve)} reserved"
    size, why = disk_bytes(settings, folder)
    if settings.kvc2.disk_size_GB is not None:
        if size > folder.total:
            problems.append(
                f"{key} of {readable(size)} is more than the whole file system ({readable(folder.total)}); make it smaller"
            )
        elif size > space:
            warnings.append(f"{key} of {readable(size)} will not be reached: {told}")
    if space < DISK_PAGES * layout.row_stride:
        problems.append(
            f"kvc2.disk_path has no space for {DISK_PAGES} pages of {readable(layout.row_stride)}: {told}; "
            "make space or choose another directory"
        )
        return Tier(size, 0, 0, why)
    return _tier(settings, layout, key, size, why, DISK_PAGES, problems)


def disk_bytes(settings: "Settings", folder: machine.Folder) -> tuple[int, str]:
    """(limit of the disk tier, how it came about)."""
    if settings.kvc2.disk_size_GB is not None:
        return in_bytes(settings.kvc2.disk_size_GB), ""
    # Of what would be free without the cache: else every start with a full cache would shrink it.
    whole = folder.free + folder.used
    size, why = int(whole * DISK_SHARE), f"{DISK_SHARE:.0%} of {readable(whole)} free space"
    if size > DISK_MOST:
        size, why = DISK_MOST, f"at most {readable(DISK_MOST)}"
    return min(size, max(whole - in_bytes(settings.kvc2.disk_reserve_free_GB), 0)), why


def _tier(settings: "Settings", layout: PageLayout, key: str, size: int, why: str, least: int, problems: list[str]) -> Tier:
    """A tier of `size` bytes, a problem where fewer than `least` pages fit."""
    if layout.pages_in(size) < least:
        needed = ceil(least * layout.row_stride / GB * 1000) / 1000
        problems.append(
            f"{key} of {readable(size)} holds {layout.pages_in(size)} pages of {readable(layout.row_stride)} and needs {least}; "
            f"set it to {needed:g} or more, or attn.page_size (now {settings.attn.page_size}) to less"
        )
    return Tier(size, layout.pages_in(size), layout.tokens_in(size), why)


def unused(settings: "Settings", guest: bool = False) -> list[str]:
    """Settings that somebody made and that have no effect."""
    kvc2 = settings.kvc2
    if guest:
        told = [key for key in NOT_GUESTS if key != "kvc2.gpu_only" and settings.origin(key) != "default"]
        disk = kvc2.disk_size_GB is not None and kvc2.disk_path is None
        return [f"{key}: not used, since the engine decides it here" for key in told] + [DISK_UNUSED] * disk
    others = {
        "kvc2.cpu_memory_size_GB": kvc2.cpu_memory_size_GB,
        "kvc2.disk_path": kvc2.disk_path,
        "kvc2.disk_size_GB": kvc2.disk_size_GB,
    }
    made = [key for key, value in others.items() if value is not None]
    if kvc2.gpu_only:
        return [f"{', '.join(made)}: not used, since kvc2.gpu_only is true"] if made else []
    if kvc2.disk_size_GB is not None and kvc2.disk_path is None:
        return [DISK_UNUSED]
    return []


def _told(tier: Tier, ranks: int = 1, parts: int = 1) -> str:
    whose = "" if ranks == 1 else f" of all {ranks} ranks together, {readable(tier.bytes // parts)} for each of {parts} parts"
    why = f" ({tier.why})" if tier.why else ""
    return f"{readable(tier.bytes)}{whose}, {tier.pages:,} pages, {tier.tokens:,} tokens{why}"
