"""The version of a model's pages: what makes all pages computed before it outdated, in every tier and after a restart.

The cache directory keeps one random word per model, which is part of its namespaces. Declaring pages outdated writes another word
there, for whoever opens the directory from then on. The process that did it goes on under a word of its own: its weights may be
others than those that its model was loaded with, and a process that loads these again must not find pages of the former.
"""

import os
import re
import secrets
import time
from contextlib import suppress
from pathlib import Path

from kvstrata import machine

__all__ = ["VersionError", "new_version", "read_version", "write_version"]

WORD = re.compile(rb"[0-9a-f]{32}")
TRIES = 5


class VersionError(RuntimeError):
    """The version of a model's pages cannot be read or written; the text is one sentence that says why and what to do."""


def new_version() -> str:
    """A word that was never used before."""
    return secrets.token_hex(16)


def read_version(root: str, base: bytes) -> str:
    """The word in the cache directory `root` for the model whose namespace without one is `base` (32 bytes); "" where there is
    none.

    Answers within 1.5 s. Raises VersionError.
    """
    path = _file(root, base)
    try:
        text = machine.within(machine.ANSWER_S, lambda: _read(path))
    except TimeoutError:
        raise VersionError(f"disk_path {root} does not answer: check that its file system is alive") from None
    except OSError as error:
        raise VersionError(
            f"{path} cannot be read ({error.strerror}): give this user permission, or choose another disk_path"
        ) from None
    if text and not WORD.fullmatch(text):
        raise VersionError(f"{path} is damaged: remove it and purge the directory, which may hold outdated pages")
    return text.decode()


def write_version(root: str, base: bytes, version: str, group: bool = False) -> None:
    """Makes `version` the model's, for whoever opens the directory from now on, also after a power loss. Raises VersionError."""
    path = _file(root, base)
    for left in reversed(range(TRIES)):
        try:
            _write(path, version.encode(), group)
            break
        except OSError as error:
            # Whoever describes a namespace just then clears temporary files away.
            if left == 0 or not isinstance(error, FileNotFoundError):
                raise VersionError(f"{path} cannot be written ({error.strerror}): nothing was changed") from None
            time.sleep(0.001)


def _file(root: str, base: bytes) -> Path:
    return Path(root) / "namespaces" / f"{base.hex()}.version"


def _read(path: Path) -> bytes:
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return b""
    try:
        return os.read(file, 64) or b"empty"
    finally:
        os.close(file)


def _write(path: Path, text: bytes, group: bool) -> None:
    temporary = path.with_name(f"{secrets.token_hex(8)}.tmp")
    try:
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            if group:
                os.fchmod(file, 0o660)
            os.write(file, text)
            os.fsync(file)
        finally:
            os.close(file)
        os.rename(temporary, path)
    finally:
        with suppress(OSError):
            temporary.unlink()
    with suppress(OSError):  # some file systems cannot sync a directory
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
