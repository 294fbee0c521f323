"""Fingerprints of weights and adapters: SHA-256 over their content, remembered per file, in the background for large models."""

import hashlib
import json
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

__all__ = ["Fingerprint", "FingerprintTask", "adapter_digest", "weights_fingerprint"]

# What decides the states that a model computes, beside its config: the weights, code that comes with them, quantisation settings.
WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth")
CODE = (".py",)
SETTINGS = {"quantize_config.json", "quant_config.json", "hf_quant_config.json"}
NOT_WEIGHTS = ("training_args", "optimizer", "scheduler", "rng_state", "scaler")  # left behind by training

READ_BYTES = 8 << 20
HASH_THREADS = 4
SAMPLES, SAMPLE_BYTES = 64, 64 << 10
SETTLED_NS = 2_000_000_000  # a file changed later than that before its hash may change again without its times showing it


@dataclass(frozen=True)
class Fingerprint:
    """What weights are, by content. Fingerprints of different kinds are never equal.

    `kind`: "full" (all bytes of the files), "sampled" (some of them, only on request), "memory" (the tensors of a loaded model),
    "private" (random: no weights known). `digest`: 32 bytes.
    """

    kind: str
    digest: bytes

    def __post_init__(self) -> None:
        if len(self.digest) != 32:
            raise ValueError(f"a fingerprint has 32 bytes, not {len(self.digest)}")


class Cancelled(Exception):
    """The task was cancelled before its result was there."""


def weights_fingerprint(path_or_model: Any, *, sampled: bool = False, cache_dir: Path | None = None) -> Fingerprint:
    """The fingerprint of a model folder, of one file of weights, or of a loaded torch model.

    Folder: SHA-256 of every weights file in it, with names relative to it; digests are remembered in `cache_dir` (default: the
    user's cache directory) for as long as inode, size and times of a file stay the same. `sampled` reads about 4 MiB per file
    instead. Model: the names, dtypes, shapes and bytes of its state dict; `sampled` does not apply.
    Takes as long as reading all of it and SHA-256 (0.5-2 GB/s per file, four files at once): see FingerprintTask. Raises
    FileNotFoundError without weights, OSError.
    """
    return _fingerprint(path_or_model, sampled, cache_dir, lambda: False)


class FingerprintTask:
    """A weights fingerprint that is computed in a thread of its own."""

    def __init__(self, path_or_model: Any, *, sampled: bool = False, cache_dir: Path | None = None) -> None:
        self._found: Fingerprint | None = None
        self._error: BaseException | None = None
        self._cancel = threading.Event()
        self._over = threading.Event()
        arguments = (path_or_model, sampled, cache_dir)
        self._thread = threading.Thread(target=self._run, args=arguments, name="kvstrata-fingerprint", daemon=True)
        self._thread.start()

    def _run(self, path_or_model: Any, sampled: bool, cache_dir: Path | None) -> None:
        try:
            self._found = _fingerprint(path_or_model, sampled, cache_dir, self._cancel.is_set)
        except BaseException as error:  # handed to whoever asks for the result
            self._error = error
        finally:
            self._over.set()

    @property
    def done(self) -> bool:
        """Whether `result` answers at once."""
        return self._over.is_set()

    def result(self, timeout: float | None = None) -> Fingerprint:
        """Waits up to `timeout` seconds. Raises TimeoutError, Cancelled, and what weights_fingerprint raises."""
        if not self._over.wait(timeout):
            raise TimeoutError(f"the weights are not hashed after {timeout} s")
        if self._error is not None:
            raise self._error
        assert self._found is not None
        return self._found

    def cancel(self) -> None:
        """Stops reading at the next 8 MiB. Without effect when it is done."""
        self._cancel.set()


def adapter_digest(folder: str | Path, *, scale: float = 1.0, cache_dir: Path | None = None) -> bytes:
    """32 bytes for the content of an adapter: its weights, its config, and the `scale` it is applied with beyond that.

    `folder` as PEFT writes it: adapter_config.json and adapter_model.*. Raises FileNotFoundError and OSError.
    """
    folder = Path(folder)
    config = json.loads((folder / "adapter_config.json").read_bytes())
    config.pop("base_model_name_or_path", None)  # the base has its own fingerprint
    weights = _fingerprint(folder, False, cache_dir, lambda: False)
    text = json.dumps([config, float(scale)], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(b"kvstrata/adapter/1\0" + weights.digest + text.encode()).digest()


def _fingerprint(path_or_model: Any, sampled: bool, cache_dir: Path | None, cancelled: Callable[[], bool]) -> Fingerprint:
    if not isinstance(path_or_model, str | os.PathLike):
        return Fingerprint("memory", _hash_model(path_or_model, cancelled))
    kind = "sampled" if sampled else "full"
    root = Path(path_or_model)
    files = _files_of(root)
    total = hashlib.sha256(f"kvstrata/weights-{kind}/1\0".encode())
    digests = _in_threads(lambda file: _file_digest(file, sampled, cache_dir, cancelled), files)
    for file, digest in zip(files, digests, strict=True):
        _add(total, os.fsencode(file.name) if file != root else b"")
        _add(total, digest)
    return Fingerprint(kind, total.digest())


def _in_threads(work: Callable[[Path], bytes], files: list[Path]) -> list[bytes]:
    """The results in order, or the first error. Daemon threads: those of an executor would hold up the end of the interpreter."""
    results: list[bytes | BaseException] = [b""] * len(files)
    todo = iter(range(len(files)))
    taking = threading.Lock()

    def run() -> None:
        while True:
            with taking:
                index = next(todo, None)
            if index is None:
                return
            try:
                results[index] = work(files[index])
            except BaseException as error:
                results[index] = error

    threads = [threading.Thread(target=run, name="kvstrata-hash", daemon=True) for _ in range(min(HASH_THREADS, len(files)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    digests = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        digests.append(result)
    return digests


def _files_of(root: Path) -> list[Path]:
    """The files that count, by name. A name that is a link counts with what it points to."""
    if root.is_file():
        return [root]
    found = [
        path
        for path in root.iterdir()
        if path.name in SETTINGS or (path.suffix in (*WEIGHTS, *CODE) and not path.name.startswith(NOT_WEIGHTS) and path.is_file())
    ]
    if not any(path.suffix in WEIGHTS for path in found):
        raise FileNotFoundError(
            f"{root} has no weights ({', '.join('*' + suffix for suffix in WEIGHTS)}), so it has no fingerprint"
        )
    return sorted(found, key=lambda path: path.name)


def _file_digest(path: Path, sampled: bool, cache_dir: Path | None, cancelled: Callable[[], bool]) -> bytes:
    with open(path, "rb", buffering=0) as file:
        started = time.time_ns()
        before = _state(file.fileno())
        memory = None if sampled else _memory_of(before, cache_dir)
        if memory is not None and (known := _recall(memory, before)) is not None:
            return known
        total = hashlib.sha256()
        if sampled:
            _add_samples(total, file, before[2])
        else:
            _add_file(total, file, cancelled)
        if _state(file.fileno()) != before:
            raise OSError(f"{path} changed while it was hashed; start again when it is complete")
    if memory is not None and started - max(before[3:]) >= SETTLED_NS:
        _remember(memory, before, total.digest())
    return total.digest()


def _add_file(total: Any, file: FileIO, cancelled: Callable[[], bool]) -> None:
    buffer = memoryview(bytearray(READ_BYTES))
    while count := file.readinto(buffer):
        if cancelled():
            raise Cancelled(f"cancelled while hashing {file.name!r}")
        total.update(buffer[:count])


def _add_samples(total: Any, file: FileIO, size: int) -> None:
    _add(total, str(size).encode())
    last = max(size - SAMPLE_BYTES, 0)
    for offset in sorted({last * sample // (SAMPLES - 1) for sample in range(SAMPLES)}):
        _add(total, os.pread(file.fileno(), SAMPLE_BYTES, offset))


def _hash_model(model: Any, cancelled: Callable[[], bool]) -> bytes:
    import torch

    total = hashlib.sha256(b"kvstrata/weights-memory/1\0")
    for name, tensor in sorted(model.state_dict().items()):
        if cancelled():
            raise Cancelled("cancelled while hashing a model")
        if tensor.is_meta:
            raise ValueError(f"{name} has no data (it is on the meta device), so the model has no fingerprint")
        for text in (name, str(tensor.dtype), str(tuple(tensor.shape))):
            _add(total, text.encode())
        _add(total, memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))
    return total.digest()


def _add(total: Any, part: bytes | memoryview) -> None:
    total.update(len(part).to_bytes(8, "little"))
    total.update(part)


def _state(file: int) -> tuple[int, int, int, int, int]:
    found = os.fstat(file)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


# Digests of files are remembered in one small file per inode. What is there is used only if all of its state is the same, and
# anything wrong with it means that the file is hashed again.


def _memory_of(state: Iterable[int], cache_dir: Path | None) -> Path:
    from kvstrata.models import user_cache_dir

    device, inode, *_ = state
    return (cache_dir or user_cache_dir()) / "fingerprints" / f"{device:x}-{inode:x}.json"


def _recall(memory: Path, state: tuple[int, ...]) -> bytes | None:
    try:
        file = os.open(memory, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(file, "rb") as opened:
            found = os.fstat(file)
            if found.st_uid != os.geteuid() or not stat.S_ISREG(found.st_mode) or found.st_mode & 0o022:
                return None
            known = json.loads(opened.read(4096))
        digest = bytes.fromhex(known["sha256"])
        return digest if known["state"] == list(state) and len(digest) == 32 else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remember(memory: Path, state: tuple[int, ...], digest: bytes) -> None:
    temporary = memory.with_name(f".{memory.name}-{os.getpid()}-{threading.get_ident()}")
    with suppress(OSError):
        memory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(file, "w") as opened:
            json.dump({"state": state, "sha256": digest.hex()}, opened)
        os.replace(temporary, memory)
