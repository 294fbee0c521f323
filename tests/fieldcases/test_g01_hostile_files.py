"""G1: nothing in a cache directory is executed or believed, or makes a reader allocate much; strange files are left alone."""

import ast
import os
import pickle
import struct
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest
from support import PAGE, prompt, serve, settle

import kvstrata

MEMORY = 1 << 30  # bytes of address space for a reader: interpreter, numpy and the libraries take about a third
HUGE = (0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF, 4 << 30)


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def torch_file(path: Path, bomb: Bomb) -> None:
    import torch

    torch.save({"weights": torch.zeros(3), "bomb": bomb}, path)


def zip_file(path: Path, bomb: Bomb) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("data.pkl", pickle.dumps(bomb))
        archive.writestr("zeros", bytes(50 << 20))


HOSTILE = {
    "pickle bomb": lambda path, bomb: path.write_bytes(pickle.dumps(bomb)),
    "old pickle bomb": lambda path, bomb: path.write_bytes(pickle.dumps(bomb, 0)),
    "zip": zip_file,
    "torch file": torch_file,
    "random bytes": lambda path, _: path.write_bytes(os.urandom(70000)),
    "python": lambda path, bomb: path.write_text(f"import os; os.system('touch {bomb.marker}')"),
    "lengths of 4 GB": lambda path, _: path.write_bytes(
        struct.pack("<8sIIIIQQQIIQQQ", b"KVSTRATA", 1, *[0xFFFFFFFF] * 3, *HUGE, 1, 0, *HUGE)
    ),
    "empty": lambda path, _: path.write_bytes(b""),
    "sparse terabyte": lambda path, _: (path.write_bytes(b"KVSTRATA"), os.truncate(path, 1 << 40)),
}


@pytest.fixture
def directory(open_cache, tmp_path):
    """(root, the shelf's directory, the prompt): ten pages in two segments, and everything hostile beside them."""
    root = tmp_path / "disk"
    cache = open_cache(gpu=12, cpu=24, disk=root)
    tokens = prompt(10, seed=1)
    serve(cache, tokens)
    settle(cache)
    cache.close()
    (shelf,) = (root / "shelves").iterdir()
    return root, shelf, tokens


def plant(folder: Path, names: list[str], marker: Path) -> dict[Path, bytes | int]:
    """Puts one hostile file under each name, by turns; path -> content, or size where it is too large to read."""
    planted: dict[Path, bytes | int] = {}
    for name, (kind, make) in zip(names, list(HOSTILE.items()) * 9, strict=False):
        path = folder / name
        make(path, Bomb(marker))
        planted[path] = path.stat().st_size if kind == "sparse terabyte" else path.read_bytes()
    return planted


def same(path: Path, content: bytes | int) -> bool:
    return path.stat().st_size == content if isinstance(content, int) else path.read_bytes() == content


def read_all(root: Path, *commands: str) -> list[subprocess.CompletedProcess[str]]:
    """Each command in a process that may not allocate much, without torch."""
    code = f"""
    import resource, sys
    resource.setrlimit(resource.RLIMIT_AS, ({MEMORY}, {MEMORY}))
    sys.modules["torch"] = None
    from kvstrata.cli import main
    main()
    """
    run = [sys.executable, "-c", textwrap.dedent(code)]
    return [
        subprocess.run([*run, *command.split(), str(root)], capture_output=True, text=True, timeout=120) for command in commands
    ]


def test_where_segments_belong(open_cache, directory, tmp_path):
    root, shelf, tokens = directory
    marker = tmp_path / "ran"
    planted = plant(shelf, [f"seg-{number:06}.kvs" for number in range(10, 10 + len(HOSTILE))], marker)
    for ended in read_all(root, "inspect", "verify", "inspect --json"):
        assert ended.returncode == 0, ended.stderr
    told = read_all(root, "inspect")[0].stdout
    assert told.count("is no segment") + told.count("no sound header block") == len(planted)
    cache = open_cache(gpu=12, cpu=24, disk=root, disk_bytes=2 << 40)  # the sparse file counts in full
    assert serve(cache, tokens).disk == 9 * PAGE
    settle(cache)
    cache.close()
    read_all(root, "verify --repair", "purge --yes --namespace " + "0" * 64)
    for path, content in planted.items():
        if isinstance(content, bytes) and content[:8] not in (b"KVSTRATA", b""):  # those look like ours, and hold nothing
            assert same(path, content), path
    assert not marker.exists()
    assert serve(open_cache(gpu=12, cpu=24, disk=root, disk_bytes=2 << 40), tokens).disk == 9 * PAGE


def test_beside_segments_and_where_descriptions_belong(open_cache, directory, tmp_path):
    root, shelf, tokens = directory
    marker = tmp_path / "ran"
    planted = plant(shelf, ["index.pkl", "changes.pt", "seg-1.kvs", "owner.bak", "model.zip"], marker)
    planted |= plant(root, ["index.pkl", "cache.zip", "weights.pt", "namespaces.bin", "sitecustomize.py"], marker)
    planted |= plant(root / "namespaces", [f"{i:064x}.json" for i in range(len(HOSTILE))], marker)
    before = {path for path in planted if path.parent != root / "namespaces"}
    inspected, verified, told = read_all(root, "inspect", "verify", "inspect --json")
    assert (inspected.returncode, verified.returncode, told.returncode) == (0, 0, 0)
    assert inspected.stdout.count("is not ours") == len(before)
    cache = open_cache(gpu=12, cpu=24, disk=root, disk_bytes=2 << 40)
    assert serve(cache, tokens).disk == 9 * PAGE
    cache.close()
    assert not marker.exists()
    assert all(same(path, content) for path, content in planted.items())


@pytest.mark.parametrize("name", ["lock", "secret", "shelves/{}/owner"])
@pytest.mark.parametrize("kind", ["pickle bomb", "random bytes", "lengths of 4 GB"])
def test_in_the_place_of_our_small_files(open_cache, directory, tmp_path, name, kind):
    root, shelf, tokens = directory
    marker = tmp_path / "ran"
    path = root / name.format(shelf.name)
    HOSTILE[kind](path, Bomb(marker))
    for ended in read_all(root, "inspect", "verify"):
        assert ended.returncode == 0, ended.stderr
    if name == "secret":
        with pytest.raises(OSError, match="secret is damaged"):
            open_cache(gpu=12, cpu=24, disk=root)
    else:
        assert serve(open_cache(gpu=12, cpu=24, disk=root), tokens).disk == 9 * PAGE
    assert not marker.exists()


# --- the source

FORBIDDEN = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle"}
CALLS = {"eval", "exec", "compile", "__import__"}


def findings(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name.partition(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [(node.module or "").partition(".")[0]]
        elif isinstance(node, ast.Call):
            name, options = ast.unparse(node.func), {option.arg: option.value for option in node.keywords}
            safe = options.get("weights_only")
            if name in CALLS:
                names = [name]
            elif name == "torch.load" and not (isinstance(safe, ast.Constant) and safe.value is True):
                names = ["torch.load without weights_only=True"]
            elif name in ("yaml.load", "numpy.load", "np.load"):
                loader = node.args[1] if len(node.args) > 1 else options.get("Loader")
                allowed = (
                    "allow_pickle" not in options
                    if name != "yaml.load"
                    else loader is not None and "_Loader" in ast.unparse(loader)
                )
                names = [] if allowed else [name]
            found += [f"line {node.lineno}: {one}" for one in names]
            continue
        found += [f"line {node.lineno}: {one}" for one in names if one in FORBIDDEN]
    return found


def test_the_source_has_nothing_that_could_run_a_file():
    root = Path(kvstrata.__file__).parent
    files = sorted(root.rglob("*.py"))
    assert len(files) > 20
    found = {str(path.relative_to(root)): findings(ast.parse(path.read_text())) for path in files}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from marshal import loads",
        "eval(text)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "yaml.load(text)",
        "yaml.load(text, yaml.Loader)",
        "np.load(path, allow_pickle=True)",
    ],
)
def test_the_source_check_finds_what_it_looks_for(line):
    assert findings(ast.parse(line))
