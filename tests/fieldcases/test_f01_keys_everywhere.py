"""F1: keys are the same in every process, for every kind of integers, under every Python: no hash of the interpreter's is in them.

A change of these vectors makes every page on every disk unfindable. core/tests/keys.cpp has those of single pages.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import PAGE, serve, settle

GOLDEN = [
    "bea340e45038c2e5359d3bf1bc9bdb87abdb935ae6e59da6fb094d28bc308e57",
    "c8a411afb9875a62be1683e766850331634fbe1214a27052ab37550ba397cff3",
    "731659080d50b06ad5649898b311306c36a127140c1ed9aaa64e5a7f4cbb457c",
    "3f681ab1b68cba5b316ace2ffa50e781a56ef5f12dabacd45b219feda9d28f71",
    "7246365669ec97f07889b976409cc4c61d57ff53dbad4516b982c251476593e0",
]
SCRIPT = """
import hashlib
from kvstrata.identity import *
from kvstrata.layout import PageLayout
config = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64,
          "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}
one = Identity.of(config, PageLayout.from_config(config, page_size=16, dtype="bfloat16"),
                  Fingerprint("full", hashlib.sha256(b"weights").digest()))
print(one.namespace().hex(), one.namespace(adapter=bytes(32)).hex())
print(one.namespace(tenant="", secret=bytes(range(32))).hex(), one.namespace(tenant="a", secret=bytes(range(32))).hex())
print(one.config.hex())
"""
KEYS = """
import numpy as np
from kvstrata.arguments import token_array
from kvstrata.explaining import page_keys
for tokens in (list(range(40)), tuple(range(40)), np.arange(40, dtype=np.int32), np.arange(40), range(40)):
    print(*(key.hex() for key in page_keys(bytes.fromhex("%s"), token_array(tokens), 16)))
"""
PAGE_KEYS = [
    "a08e6f82a1de9c7e9ed1c7c803317e7a0949d9cc66999862d24b871e17fa426c",
    "214b9aab07ae9f4c50a28268a5788d5858257bac2bdfa9e6acba2aedfb6d691c",
]  # of tokens 0 to 39 in the first namespace of GOLDEN


def run(script: str, seed: str, python: str = sys.executable) -> list[str]:
    environ = os.environ | {"PYTHONHASHSEED": seed}
    return subprocess.run([python, "-c", script], capture_output=True, text=True, check=True, env=environ).stdout.split()


@pytest.mark.parametrize("seed", ["1", "random"])
def test_in_a_process_with_another_hash_seed(seed: str) -> None:
    assert run(SCRIPT, seed) == GOLDEN
    assert run(KEYS % GOLDEN[0], seed) == PAGE_KEYS * 5


@pytest.mark.parametrize("kind", ["list", "tuple", "int32", "int64", "uint16", "big-endian", "strided", "torch"])
def test_all_kinds_of_integers_find_the_same_pages(open_cache: Any, tmp_path: Path, kind: str) -> None:
    ids = np.arange(4 * PAGE)
    given: Any = {
        "list": ids.tolist,
        "tuple": lambda: tuple(ids.tolist()),
        "int32": lambda: ids.astype(np.int32),
        "int64": lambda: ids.astype(np.int64),
        "uint16": lambda: ids.astype(np.uint16),
        "big-endian": lambda: ids.astype(">i4"),
        "strided": lambda: np.stack([ids, ids], 1)[:, 0],
        "torch": lambda: __import__("torch").from_numpy(ids),
    }[kind]()
    cache = open_cache(gpu=8, cpu=8, disk=tmp_path / "disk")
    serve(cache, ids.astype(np.int32))
    settle(cache)
    stored = {event.key for event in cache.drain_events()}
    with cache.lease(given) as lease:
        assert lease.matched == 3 * PAGE
    with cache.lease(given, read=False, must=True) as lease:  # and stores them under the same keys
        lease.publish(len(ids))
    settle(cache)
    assert {event.key for event in cache.drain_events()} <= stored
    cache.close()
    cache = open_cache(gpu=8, cpu=8, disk=tmp_path / "disk")
    with cache.lease(given) as lease:
        assert (lease.matched, lease.wait()) == (3 * PAGE, 3 * PAGE)


OTHERS = [name for name in ("python3.11", "python3.12", "python3.13") if name != f"python3.{sys.version_info[1]}"]


@pytest.mark.parametrize("name", OTHERS)
def test_another_python_computes_the_same_namespaces(name: str) -> None:
    """Without its extension, which is built for one Python: what of a key is Python's is in these modules."""
    python = shutil.which(name)
    if python is None or subprocess.run([python, "-c", "0"], capture_output=True).returncode:
        pytest.skip(f"{name} is not here")
    script = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n" + SCRIPT
    assert run(script, "random", python) == GOLDEN
