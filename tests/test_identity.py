"""Identities: what makes two namespaces equal, fingerprints of weights and adapters, the secret of a directory."""

import json
import os
import secrets
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from identity_kit import CONFIG, SECRET, identity, weights_folder

from kvstrata import fingerprint, secret
from kvstrata.identity import (
    FingerprintTask,
    SecretError,
    canonical_json,
    config_digest,
    private_identity,
    root_secret,
    weights_fingerprint,
)


def test_canonical_json() -> None:
    value = {"b": [1, 2.5, None, True], "a": {"é": "\u2028", 3: 1e-06, "inf": float("inf")}, "t": (1,), "s": {"y", "x"}}
    assert canonical_json(value) == (
        '{"a":{"3":1e-06,"inf":Infinity,"\\u00e9":"\\u2028"},"b":[1,2.5,null,true],"s":["x","y"],"t":[1]}'
    )
    for impossible in ({"a": object()}, {1: 0, "1": 0}, {"a": b""}):
        with pytest.raises(TypeError):
            canonical_json(impossible)


@given(st.dictionaries(st.text(max_size=4), st.none() | st.integers() | st.text(max_size=4) | st.lists(st.booleans()), max_size=5))
def test_canonical_json_does_not_depend_on_order_and_reads_back(value: dict[str, Any]) -> None:
    text = canonical_json(value)
    assert canonical_json(dict(reversed(value.items()))) == text
    assert json.loads(text) == value
    assert text.isascii()


# --- what a namespace depends on


def test_config_digest_looks_into_the_parts_of_a_config() -> None:
    def outer(**inner: Any) -> bytes:
        return config_digest({"model_type": "llava", "text_config": CONFIG | inner, "quantization_config": {"dtype": "int8"}})

    assert outer(dtype="float16", _name_or_path="x") == outer()
    assert outer(hidden_act="gelu") != outer()
    assert config_digest({"quantization_config": {"dtype": "int4"}}) != config_digest({"quantization_config": {"dtype": "int8"}})
    assert config_digest({"sliding_window": None}) != config_digest({})  # the default of that model may be another
    for impossible in (None, "llama", {"a": object()}):
        with pytest.raises(TypeError):
            config_digest(impossible)


def test_config_digest_of_a_transformers_config(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(hidden_size=64, num_attention_heads=8, num_hidden_layers=2)
    digest = config_digest(config)
    config.save_pretrained(tmp_path)
    loaded = transformers.AutoConfig.from_pretrained(tmp_path)
    loaded.dtype, loaded.use_cache = "bfloat16", False
    assert config_digest(loaded) == digest
    loaded.a_new_setting = None
    assert config_digest(loaded) == digest
    loaded.rope_parameters = dict(loaded.rope_parameters, rope_theta=5.0)
    assert config_digest(loaded) != digest


# --- tenants


def test_tenants_are_kept_apart_and_cannot_be_guessed() -> None:
    one = identity()
    spaces = [one.namespace(), *(one.namespace(tenant=tenant, secret=SECRET) for tenant in ("", "a", "b", "a\0", "\ud800"))]
    spaces.append(one.namespace(tenant="a", secret=secrets.token_bytes(32)))
    spaces.append(one.namespace(adapter=bytes(32), tenant="a", secret=SECRET))
    assert len(set(spaces)) == len(spaces)
    with pytest.raises(ValueError, match="secret"):
        one.namespace(tenant="a")
    with pytest.raises(TypeError, match="string"):
        one.namespace(tenant=7, secret=SECRET)  # type: ignore[arg-type]


@given(
    st.lists(st.tuples(st.none() | st.binary(min_size=32, max_size=32), st.none() | st.text(max_size=3)), unique=True, max_size=8)
)
def test_no_two_pairs_of_adapter_and_tenant_share_a_namespace(pairs: list[tuple[bytes | None, str | None]]) -> None:
    one = identity()
    assert len({one.namespace(adapter, tenant, SECRET) for adapter, tenant in pairs}) == len(pairs)


def test_describe_tells_the_model_and_never_the_tenant() -> None:
    one = identity()
    text = one.describe(bytes(32), "tenant-name", SECRET)
    assert "tenant-name" not in text
    assert SECRET.hex() not in text
    assert "\n" not in text
    told = json.loads(text)
    assert told["namespace"] == one.namespace(bytes(32), "tenant-name", SECRET).hex()
    assert told["tenant"] is True
    told = json.loads(one.describe())
    expected = {"model": "tiny", "dtype": "bfloat16", "page_size": 16, "layout": "kvstrata-rows-1", "layers": 2, "tenant": False}
    assert {key: told[key] for key in expected} == expected
    assert told["planes"] == ["k bfloat16 [2, 8]", "v bfloat16 [2, 8]"]
    assert told["bytes_per_token"] == 2 * 2 * 2 * 8 * 2


def test_private_identities_are_equal_to_no_other() -> None:
    one, other = private_identity(), private_identity()
    assert one.namespace() != other.namespace()
    assert not one.persistent
    assert identity().persistent
    json.loads(one.describe())


# --- fingerprints of weights


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return weights_folder(tmp_path / "model")


def test_links_count_with_what_they_point_to(model: Path, tmp_path: Path) -> None:
    hub = tmp_path / "snapshot"
    hub.mkdir()
    for file in model.iterdir():
        (hub / file.name).symlink_to(file)
    assert weights_fingerprint(hub, cache_dir=tmp_path / "c") == weights_fingerprint(model, cache_dir=tmp_path / "c")


def test_one_file_of_weights(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"weights")
    first, second = (weights_fingerprint(tmp_path / name, cache_dir=tmp_path / "c") for name in ("a.gguf", "b.gguf"))
    assert first == second


def test_a_folder_without_weights_has_no_fingerprint(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(FileNotFoundError):
            weights_fingerprint(path, cache_dir=tmp_path / "c")


def test_sampled_is_another_kind_and_sees_the_size(model: Path, tmp_path: Path) -> None:
    big = model / "model-00003.safetensors"
    big.write_bytes(bytes(9 << 20))
    full, sampled = (weights_fingerprint(model, sampled=flag, cache_dir=tmp_path / "c") for flag in (False, True))
    assert sampled.kind == "sampled"
    assert sampled.digest != full.digest
    with open(big, "ab") as file:
        file.write(b"\0")
    assert weights_fingerprint(model, sampled=True, cache_dir=tmp_path / "c") != sampled


def test_digests_are_remembered_only_for_files_that_are_settled(model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    cache = tmp_path / "cache"
    one = weights_fingerprint(model, cache_dir=cache)
    assert not cache.exists()  # written just now: they may change again within one tick of their times
    monkeypatch.setattr(fingerprint, "SETTLED_NS", -1 << 62)
    assert weights_fingerprint(model, cache_dir=cache) == one
    remembered = sorted((cache / "fingerprints").iterdir())
    assert len(remembered) == 2
    assert stat.S_IMODE(remembered[0].stat().st_mode) == 0o600
    assert stat.S_IMODE(remembered[0].parent.stat().st_mode) == 0o700

    def unread(*_: Any) -> bytes:
        raise AssertionError("read again")

    with monkeypatch.context() as patch:
        patch.setattr(fingerprint, "_add_file", unread)
        assert weights_fingerprint(model, cache_dir=cache) == one

    # The same size and modification time, set back by hand: the change time tells.
    file = model / "model-00001.safetensors"
    times = file.stat()
    file.write_bytes(b"eno" * 1000)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert weights_fingerprint(model, cache_dir=cache) != one


@pytest.mark.parametrize("content", ["", "{", "[]", '{"sha256": "00", "state": []}', '{"sha256": 5, "state": 5}'])
def test_a_damaged_memory_is_no_memory(model: Path, tmp_path: Path, monkeypatch: Any, content: str) -> None:
    monkeypatch.setattr(fingerprint, "SETTLED_NS", -1 << 62)
    one = weights_fingerprint(model, cache_dir=tmp_path)
    for file in (tmp_path / "fingerprints").iterdir():
        file.write_text(content)
    assert weights_fingerprint(model, cache_dir=tmp_path) == one


def test_a_cache_folder_that_cannot_be_made_is_no_error(model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(fingerprint, "SETTLED_NS", -1 << 62)
    (tmp_path / "file").write_text("")
    assert weights_fingerprint(model, cache_dir=tmp_path / "file") == weights_fingerprint(model, cache_dir=tmp_path / "c")


def test_a_file_that_changes_while_it_is_hashed_is_an_error(model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    inner = fingerprint._add_file

    def grows(total: Any, file: Any, *rest: Any) -> None:
        inner(total, file, *rest)
        with open(file.name, "ab") as other:
            other.write(b"more")

    monkeypatch.setattr(fingerprint, "_add_file", grows)
    with pytest.raises(OSError, match="changed while it was hashed"):
        weights_fingerprint(model, cache_dir=tmp_path / "c")


def test_background_task(model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    go, inner = threading.Event(), fingerprint._add_file

    def waits(*arguments: Any) -> None:
        go.wait(30)
        inner(*arguments)

    monkeypatch.setattr(fingerprint, "_add_file", waits)
    task, cancelled = (FingerprintTask(model, cache_dir=tmp_path / "c") for _ in range(2))
    assert not task.done
    with pytest.raises(TimeoutError):
        task.result(0)
    cancelled.cancel()
    go.set()
    assert task.result(30) == weights_fingerprint(model, cache_dir=tmp_path / "c")
    assert task.done
    with pytest.raises(fingerprint.Cancelled):
        cancelled.result(30)
    with pytest.raises(FileNotFoundError):
        FingerprintTask(tmp_path / "missing").result(30)


def test_fingerprint_of_a_loaded_model() -> None:
    torch = pytest.importorskip("torch")

    def linear(value: float = 0.5, dtype: Any = torch.bfloat16, bias: bool = True) -> Any:
        made = torch.nn.Linear(3, 2, bias=bias).to(dtype)
        for parameter in made.parameters():
            torch.nn.init.constant_(parameter, value)
        return made

    one = weights_fingerprint(linear())
    assert one.kind == "memory"
    assert weights_fingerprint(linear()) == one
    others = [linear(0.25), linear(dtype=torch.float16), linear(bias=False), torch.nn.Sequential(linear())]
    assert len({one, *map(weights_fingerprint, others)}) == 5
    with pytest.raises(ValueError, match="meta device"):
        weights_fingerprint(torch.nn.Linear(3, 2, device="meta"))


# --- the secret of a directory


def test_secret_is_made_once_and_private(tmp_path: Path) -> None:
    root = tmp_path / "new" / "root"
    one = root_secret(root)
    assert len(one) == 32
    assert root_secret(str(root)) == one
    assert root_secret(tmp_path / "other") != one
    assert [file.name for file in root.iterdir()] == ["secret"]
    assert stat.S_IMODE((root / "secret").stat().st_mode) == 0o600
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert len({root_secret(None), root_secret("")}) == 2  # no directory, nobody to share it with


def damaged(path: Path) -> None:
    path.write_bytes(bytes(31))
    path.chmod(0o600)


def readable(path: Path) -> None:
    path.write_bytes(bytes(32))
    path.chmod(0o640)


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (damaged, "damaged"),
        (readable, "read by others"),
        (lambda path: path.symlink_to("/etc/passwd"), "link"),
        (lambda path: os.mkfifo(path, 0o600), "not a file"),
        (lambda path: path.mkdir(0o700), "not a file"),
    ],
)
def test_secrets_that_cannot_be_trusted(tmp_path: Path, monkeypatch: Any, make: Callable[[Path], None], cause: str) -> None:
    monkeypatch.setattr(secret, "WRITER_S", 0)
    make(tmp_path / "secret")
    with pytest.raises(SecretError, match=cause) as caught:
        root_secret(tmp_path)
    assert str(tmp_path / "secret") in str(caught.value)


def test_a_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    root_secret(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(SecretError, match="another user"):
        root_secret(tmp_path)


@pytest.mark.parametrize("links", [True, False])
def test_makers_of_a_secret_agree(tmp_path: Path, monkeypatch: Any, links: bool) -> None:
    if not links:

        def no_links(*_: Any, **__: Any) -> None:
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr(os, "link", no_links)
    for attempt in range(5):
        root, found, start = tmp_path / str(attempt), list[bytes](), threading.Barrier(8)

        def make(root: Path = root, found: list[bytes] = found, start: threading.Barrier = start) -> None:
            start.wait(30)
            found.append(root_secret(root))

        threads = [threading.Thread(target=make) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 8
        assert len(set(found)) == 1
        assert [file.name for file in root.iterdir()] == ["secret"]


def test_makers_in_several_processes_agree(tmp_path: Path) -> None:
    code = f"from kvstrata.secret import root_secret; print(root_secret({str(tmp_path)!r}).hex())"
    runs = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert len({run.communicate()[0] for run in runs}) == 1
    assert all(run.returncode == 0 for run in runs)
