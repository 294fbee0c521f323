"""Real file systems that are small, lack something or fail: for tests, where this user may mount them."""

import os
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

MIB = 1 << 20


def _mount(*arguments: object) -> None:
    ended = subprocess.run(["mount", *map(str, arguments)], capture_output=True, text=True)
    if ended.returncode != 0:
        pytest.skip(f"needs to mount a file system, which is not allowed here: {ended.stderr.strip()}")


@contextmanager
def _mounted(at: Path, *arguments: object) -> Iterator[Path]:
    at.mkdir()
    _mount(*arguments, at)
    try:
        yield at
    finally:  # lazily: a cache that failed its test may still have files open
        subprocess.run(["umount", "--lazy", at], check=True)


@contextmanager
def tmpfs(at: Path, size: int) -> Iterator[Path]:
    """A file system of so many bytes."""
    with _mounted(at, "-t", "tmpfs", "-o", f"size={size}", "tmpfs") as path:
        yield path


@contextmanager
def ramfs(at: Path) -> Iterator[Path]:
    """A file system without O_DIRECT and without preallocation."""
    with _mounted(at, "-t", "ramfs", "ramfs") as path:
        yield path


def _image(at: Path) -> Path:
    return at.parent / f"{at.name}.img"


@contextmanager
def ext4(at: Path, size: int) -> Iterator[Path]:
    """A file system on a file of so many bytes. `abort()` and `bad_sectors()` make it fail."""
    image = _image(at)
    with image.open("wb") as file:
        file.truncate(size)
    made = subprocess.run(["mkfs.ext4", "-q", "-m", "0", image], capture_output=True, text=True)
    if made.returncode != 0:
        pytest.skip(f"cannot make an ext4 file system: {made.stderr.strip()}")
    with _mounted(at, "-o", "loop", image) as path:
        yield path
    image.unlink()


def abort(path: Path) -> None:
    """What the kernel does to an ext4 whose disk fails: from now on reads work and writes do not (EROFS)."""
    _mount("-o", "remount,abort", path)


@contextmanager
def read_only(path: Path) -> Iterator[None]:
    """Nobody may have a file of it open for writing."""
    _mount("-o", "remount,ro", path)
    try:
        yield
    finally:
        _mount("-o", "remount,rw", path)


def fill_up(path: Path) -> Path:
    """Takes all space that is left, but for less than a page; the file that has it."""
    filler = path / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (MIB, 4096):
            with suppress(OSError):
                while file.write(bytes(size)) == size:
                    pass
    return filler


@contextmanager
def bad_sectors(at: Path, files: Iterable[Path]) -> Iterator[None]:
    """Reads of these files of an ext4 are answered with EIO meanwhile: the file below it is cut in front of the first of them."""
    os.sync()
    image, offset = _image(at), min(map(_place, files))
    whole = image.read_bytes()
    os.truncate(image, offset)
    try:
        yield
    finally:
        with image.open("r+b") as file:
            file.seek(offset)
            file.write(whole[offset:])


def _place(path: Path) -> int:
    """Where the file begins on its disk."""
    ended = subprocess.run(["filefrag", "-b1", "-v", path], capture_output=True, text=True)
    if ended.returncode != 0:
        pytest.skip(f"cannot tell where a file lies: {ended.stderr.strip()}")
    return min(int(line.split(":")[2].split("..")[0]) for line in ended.stdout.splitlines() if line.lstrip()[:1].isdigit())
