"""The secret of a cache directory, which keeps the namespaces of tenants from being guessed."""

import errno
import os
import secrets
import stat
import time
from contextlib import suppress
from pathlib import Path

NAME = "secret"
SIZE = 32
WRITER_S = 1.0  # how long another process may take from creating its file to writing it

NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


class SecretError(OSError):
    """The secret of a cache directory cannot be used; the text is one sentence that says why and what to do."""


def root_secret(disk_path: str | Path | None, group: bool = False) -> bytes:
    """The 32 random bytes in `<disk_path>/secret`, made on the first call; without a path new ones for the caller alone.

    The file is readable by its owner only, from its first moment; with `group` by the directory's group as well. Several
    processes that make it at once all return the same bytes.
    Does file I/O: call it at start, not while serving. Raises SecretError for a secret that others own or can read, and OSError.
    """
    if not disk_path:
        return secrets.token_bytes(SIZE)
    path = Path(disk_path)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        known = os.fstat(folder)
        shared_by = known.st_gid if group else None
        if known.st_uid != os.geteuid() and not group:
            raise SecretError(f"{path} belongs to another user; use a disk_path of your own")
        try:
            return _read(folder, path, shared_by)
        except FileNotFoundError:
            _make(folder, shared_by)
            return _read(folder, path, shared_by)
    finally:
        os.close(folder)


def _read(folder: int, path: Path, group: int | None) -> bytes:
    deadline = time.monotonic() + WRITER_S
    while True:
        try:
            file = os.open(NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise SecretError(f"{path / NAME} is a link; remove it") from error
            raise
        try:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode):
                raise SecretError(f"{path / NAME} is not a file; remove it")
            if found.st_uid != os.geteuid() and found.st_gid != group:
                raise SecretError(f"{path / NAME} belongs to another user; use a disk_path of your own")
            if found.st_mode & (0o077 if group is None else 0o037):
                raise SecretError(
                    f"{path / NAME} can be read by others: remove it (pages of tenants are then not found again) or chmod 600"
                )
            secret = os.read(file, SIZE + 1)
        finally:
            os.close(file)
        if len(secret) == SIZE:
            return secret
        if len(secret) > SIZE or time.monotonic() > deadline:
            raise SecretError(f"{path / NAME} is damaged: remove it (pages of tenants are then not found again)")
        time.sleep(0.005)  # only where there are no hard links: its writer is between create and write


def _make(folder: int, group: int | None) -> None:
    """Writes a secret unless another process was first. Linked into place complete, so that nobody ever reads a part of it."""
    temporary = f".secret-{secrets.token_hex(8)}"
    _write(folder, temporary, group)
    try:
        os.link(temporary, NAME, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
    except FileExistsError:
        return
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        with suppress(FileExistsError):
            _write(folder, NAME, group)
    finally:
        os.unlink(temporary, dir_fd=folder)
        with suppress(OSError):  # some file systems cannot sync a directory
            os.fsync(folder)


def _write(folder: int, name: str, group: int | None) -> None:
    file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        if group is not None:
            os.fchmod(file, 0o640)
        if os.write(file, secrets.token_bytes(SIZE)) != SIZE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
        os.fsync(file)
    finally:
        os.close(file)
