"""What the tiers of a cache may hold and how long they may take, as its constructor is told."""

from typing import Any, NamedTuple

from kvstrata.arguments import check_flag, check_seconds, check_whole

__all__ = ["MOST_PAGES", "Limits"]

MOST_PAGES = (1 << 31) - 2  # of a memory tier; the device pool has a scratch row besides
MOST_THREADS = 256
READ_HANGS_S = 1.0  # less says nothing about a disk, however impatient requests are


class Limits(NamedTuple):
    """What the tiers may hold.

    `gpu_pages`: pages of the device pool, its scratch row not counted; 0: guest mode, the engine owns the device. `cpu_pages`:
    rows of the CPU tier, 0: none. `disk_path`: "" for no disk tier. `disk_group`: its group shares it. `retry_after`: how long what
    fails is left alone; `look_every`: how often the disk tier looks whether its files are still there. Sizes in bytes, times in
    seconds.
    """

    gpu_pages: int
    cpu_pages: int = 0
    disk_path: str = ""
    disk_bytes: int = 0
    disk_reserve_bytes: int = 0
    io_threads: int = 4
    load_deadline: float = 5.0
    write_deadline: float = 30.0
    retry_after: float = 5.0
    disk_group: bool = False
    look_every: float = 5.0

    def check(self) -> None:
        """Raises ValueError for a number that no tier can have."""
        for name, value in (("gpu_pages", self.gpu_pages), ("cpu_pages", self.cpu_pages)):
            check_whole(f"limits.{name}", value, 0, MOST_PAGES, "pages")
        for name, value in (("disk_bytes", self.disk_bytes), ("disk_reserve_bytes", self.disk_reserve_bytes)):
            check_whole(f"limits.{name}", value, 0, (1 << 63) - 1, "bytes")
        if not isinstance(self.disk_path, str):
            raise ValueError(f"limits.disk_path is {self.disk_path!r}, but must be a string, empty for no disk tier")
        check_flag("limits.disk_group", self.disk_group)
        check_whole("limits.io_threads", self.io_threads, 1, MOST_THREADS)
        for name, seconds in (("load", self.load_deadline), ("write", self.write_deadline)):
            check_seconds(f"limits.{name}_deadline", seconds, 0)
        check_seconds("limits.retry_after", self.retry_after, 0)
        check_seconds("limits.look_every", self.look_every, 0.01)
        if self.disk_path and not self.cpu_pages:
            raise ValueError("the disk tier works through the CPU tier: give it memory (kvc2.cpu_memory_size_GB) or no disk_path")

    def for_core(self) -> dict[str, Any]:
        """What the core is told of them."""
        return {
            "gpu_rows": self.gpu_pages,
            "cpu_rows": self.cpu_pages,
            "disk_path": self.disk_path,
            "disk_group": self.disk_group,
            "disk_bytes": self.disk_bytes,
            "disk_reserve_bytes": self.disk_reserve_bytes,
            "io_threads": self.io_threads,
            "load_deadline": max(self.load_deadline, READ_HANGS_S),
            "write_deadline": self.write_deadline,
            "retry_after": self.retry_after,
            "look_every": self.look_every,
        }
