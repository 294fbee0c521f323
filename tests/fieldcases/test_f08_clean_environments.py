"""F8: the wheel, installed where nothing else is: without torch, with the pinned one, without a compiler, with a core that cannot
be loaded.

The wheel is made of the objects that `make build` left. Its dependencies are linked from this environment, so nothing is fetched.
"""

import fcntl
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from email import message_from_bytes
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "editable"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (BUILD / "build.ninja").exists(), reason="needs the objects of make build"),
]
NAME = re.compile(r"[A-Za-z0-9._-]+")


def needs(package: Distribution) -> set[str]:
    """The distributions that one needs, of those that are here, itself included."""
    found: set[str] = set()
    todo = [package]
    while todo:
        one = todo.pop()
        if one.name in found:
            continue
        found.add(one.name)
        for line in one.requires or ():
            if "extra ==" in line or not (name := NAME.match(line)):
                continue
            try:
                todo.append(distribution(name[0]))
            except PackageNotFoundError:  # for other platforms
                continue
    return found


class Environment:
    """A virtual environment with this wheel, and of the distributions here only what is named and what these need."""

    def __init__(self, root: Path, wheel: Path, *packages: str) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", root], check=True)
        self.root = root
        (self.site,) = root.glob("lib/python*/site-packages")
        for name in set().union(*(needs(distribution(package)) for package in packages)):
            one = distribution(name)
            for top in {file.parts[0] for file in one.files or () if file.parts[0] != ".."}:
                link, target = self.site / top, Path(str(one.locate_file(top)))
                if not link.exists() and target.exists():
                    link.symlink_to(target)
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(self.site)

    def python(self, script: str, *arguments: object) -> "subprocess.CompletedProcess[str]":
        """Runs a script with nothing of this process's environment: no compiler is found."""
        environ = {"PATH": str(self.root / "bin"), "HOME": str(self.root), "OMP_NUM_THREADS": "1"}
        command = [self.root / "bin" / "python", "-c", script, *map(str, arguments)]
        return subprocess.run(command, env=environ, cwd=self.root, capture_output=True, text=True, timeout=300)

    def kvstrata(self, *arguments: object) -> "subprocess.CompletedProcess[str]":
        return self.python("from kvstrata.cli import main; main()", *arguments)

    def rows(self, *arguments: object) -> dict[str, dict[str, str]]:
        ended = self.kvstrata("doctor", "--json", *arguments)
        assert ended.stdout, ended.stderr
        return {row["check"]: row for row in json.loads(ended.stdout)["rows"]}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation"]
    options = [f"-Cbuild-dir={BUILD}", "-Ccmake.define.KVSTRATA_WERROR=ON", "-w", str(folder), str(ROOT)]
    with open(ROOT / "build" / ".lock", "w") as lock:  # as the Makefile does: one build at a time
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run(command + options, check=True, timeout=600)
    (found,) = folder.glob("kvstrata-*.whl")
    return found


NEEDED = ("numpy", "pydantic", "pyyaml", "typer", "rich")


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Without torch."""
    return Environment(tmp_path_factory.mktemp("bare") / "venv", wheel, *NEEDED)


def test_the_wheel_neither_pins_nor_brings_torch(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        (name,) = (name for name in packed.namelist() if name.endswith(".dist-info/METADATA"))
        said = message_from_bytes(packed.read(name)).get_all("Requires-Dist") or []
        (core,) = (name for name in packed.namelist() if "/_core." in name and name.endswith(".so"))
        native = packed.read(core)
        assert {name.split("/")[0] for name in packed.namelist()} == {"kvstrata", name.split("/")[0]}
    assert {NAME.match(line)[0] for line in said if "extra" not in line} == set(NEEDED)  # type: ignore[index]
    assert [line for line in said if line.startswith("torch")] == ['torch>=2.6; extra == "engine"']
    for library in (b"libtorch", b"libc10", b"_ZN3c10", b"_ZN2at"):  # nothing that is another one's after an upgrade
        assert library not in native


GUEST = """
import sys
sys.path.insert(0, sys.argv[1])
from guest import Guest
from pages import prompt
assert "torch" not in sys.modules
for hit in (0, 5):
    guest = Guest(sys.argv[2], 4 << 20)
    assert guest.serve(prompt(5)) == (hit, 0, 5 - hit)
    assert guest.cache.flush(30)
    assert guest.close()
print("fine")
"""


def test_without_torch(bare: Environment, tmp_path: Path) -> None:
    """The core, its tiers and the tools work; who asks for a device pool is told."""
    assert bare.python("import torch").returncode == 1
    assert bare.python("import kvstrata; from kvstrata import PrefixCache, Settings").stderr == ""
    ended = bare.python(GUEST, ROOT / "tests", tmp_path / "disk")
    assert ended.stdout == "fine\n", ended.stderr
    (space,) = json.loads(bare.kvstrata("inspect", tmp_path / "disk", "--json").stdout)["namespaces"]
    assert space["pages"] == 5
    assert bare.kvstrata("verify", tmp_path / "disk").returncode == 0
    rows = bare.rows()
    assert rows["core"]["state"] == "ok"
    assert (rows["torch"]["state"], rows["torch"]["value"]) == ("warning", "not installed")
    assert "pip install 'kvstrata[engine]'" in rows["torch"]["fix"]


OWN = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from support import prompt, serve, settle, tiny_identity, tiny_layout
from kvstrata.cache import Limits, PrefixCache
layout = tiny_layout()
for hit in (0, 64):
    with PrefixCache(layout, Limits(8, 8, sys.argv[2], 4 << 20), identity=tiny_identity(layout)) as cache:
        assert serve(cache, prompt(5)).disk == hit
        settle(cache)
print(torch.__version__.partition("+")[0])
"""


def test_with_the_pinned_torch(wheel: Path, tmp_path: Path) -> None:
    pinned = re.search(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    venv = Environment(tmp_path / "venv", wheel, *NEEDED, "torch")
    ended = venv.python(OWN, ROOT / "tests", tmp_path / "disk")
    assert ended.stdout == f"{pinned[1]}\n", ended.stderr
    rows = venv.rows("--selftest")
    assert rows["torch"]["value"].partition("+")[0] == pinned[1]
    tested = {check: row["value"] for check, row in rows.items() if check.startswith("self-test")}
    assert tested == {f"self-test: {tier}": "pages came back as they were" for tier in ("gpu", "cpu")}


def other_library(core: Path) -> None:
    """As if it had been built against another version of a library than the one that is here."""
    content = core.read_bytes()
    assert b"\0EVP_" in content
    core.write_bytes(content.replace(b"\0EVP_", b"\0EVQ_"))


def other_file(core: Path) -> None:
    core.write_text("not a library")


@pytest.mark.parametrize(
    ("harm", "cause"),
    [
        (Path.unlink, "No module named 'kvstrata._core'"),
        (other_file, "invalid ELF header|file too short"),
        (other_library, "undefined symbol: EVQ_"),
    ],
)
def test_doctor_says_why_the_core_is_off(wheel: Path, tmp_path: Path, harm: Callable[[Path], Any], cause: str) -> None:
    venv = Environment(tmp_path / "venv", wheel, *NEEDED)
    (core,) = venv.site.glob("kvstrata/_core.*.so")
    harm(core)
    assert venv.python("import kvstrata, kvstrata.layout, kvstrata.identity, kvstrata.config").returncode == 0
    (tmp_path / "config.yaml").write_text(json.dumps({"kvc2": {"disk_path": str(tmp_path / "disk")}}))
    ended = venv.kvstrata("doctor", "--json", "--selftest", "--config", tmp_path / "config.yaml")
    assert ended.returncode == 2, ended.stderr
    rows = {row["check"]: row for row in json.loads(ended.stdout)["rows"]}
    assert rows["core"]["state"] == "error"
    assert rows["core"]["value"].startswith("cannot be loaded, and there is no cache without it: ")
    assert re.search(cause, rows["core"]["value"])
    assert "pip install --force-reinstall" in rows["core"]["fix"]
    assert rows["disk_path"]["value"] == "not looked at: that needs the core"
    for command in ("inspect", "verify"):
        ended = venv.kvstrata(command, tmp_path)
        assert (ended.returncode, ended.stderr.count("\n")) == (2, 1), ended.stderr
        assert "kvstrata doctor says what to do" in ended.stderr
    assert not os.path.exists(tmp_path / "disk")
