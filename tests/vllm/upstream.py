"""Runs the parts of vLLM's own test suite that a connector of somebody else's can take, against ours: `python
tests/vllm/upstream.py DIR`.

vLLM's source distribution is fetched by pip into DIR, once. Its tests put a mock in the place of the scheduler's connector; here
the mock wraps a real one of ours, made by vLLM's own helpers, which gets every call the test does not answer itself.
"""

import os
import subprocess
import sys
import tarfile
from pathlib import Path

VERSION = "0.32.0"
UNIT = "tests/v1/kv_connector/unit"
TESTS = [  # docs/vllm.md says what is left out, and why
    "test_kv_load_failure_recovery.py",
    "test_invalid_blocks_correctness.py",
    "test_cache_pollution_prevention.py",
    "test_error_propagation.py",
    "test_output_aggregator.py",
]
LEFT_OUT = [  # a model with two kinds of KV cache, which ours refuses
    "test_kv_load_failure_recovery.py::test_block_level_load_failure_fails_closed_with_multiple_groups",
]


def fetch(folder: Path) -> Path:
    """The source distribution, unpacked. Nothing of it is built."""
    root = folder / f"vllm-{VERSION}"
    if not root.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        # pip asks a source distribution for its name and version before it keeps it; so vLLM's build is told to want no device.
        ours = os.environ | {"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": VERSION}
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "setuptools-rust", "setuptools-scm>=8"], check=True)
        what = ["--no-deps", "--no-build-isolation", "--no-binary", ":all:", f"vllm=={VERSION}", "--dest", str(folder)]
        subprocess.run([*pip, "download", *what], check=True, env=ours)
        with tarfile.open(folder / f"vllm-{VERSION}.tar.gz") as archive:
            archive.extractall(folder, filter="data")
    return root


def arrange(source: Path, folder: Path) -> Path:
    """Its tests without its package, which is installed."""
    home = folder / "upstream"
    for path in [*source.glob(f"{UNIT}/*.py"), source / "tests/v1/kv_connector/__init__.py", source / "tests/v1/__init__.py"]:
        if path.name != "conftest.py" and path.exists():
            target = home / path.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    for part in ("tests", "tests/v1", "tests/v1/kv_connector", UNIT):
        (home / part / "__init__.py").touch()
    return home


def main() -> int:
    folder = Path(sys.argv[1]).absolute()
    home = arrange(fetch(folder), folder)
    here = Path(__file__).parent
    ours = os.environ | {"PYTHONPATH": os.pathsep.join([str(home), str(here), str(here.parent)]), "HF_HUB_OFFLINE": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "upstream_plugin",
        "--rootdir",
        str(home),
        "-c",
        "/dev/null",
    ]
    command += ["--kvstrata-folder", str(folder / "work"), *(f"{UNIT}/{name}" for name in TESTS)]
    command += [*(f"--deselect={UNIT}/{name}" for name in LEFT_OUT), *sys.argv[2:]]
    return subprocess.run(command, cwd=home, env=ours).returncode


if __name__ == "__main__":
    sys.exit(main())
