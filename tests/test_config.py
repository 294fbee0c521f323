"""Settings: sources and their order, sentences for what is wrong, and what the settings come to on a machine."""

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from settings_kit import LAYOUT, MEMORY, Machine, load, refusal, resolve, unresolved

from kvstrata import capacity, machine
from kvstrata.config import KEYS, ConfigError, Settings
from kvstrata.machine import Memory, Unusable, probe_folder
from kvstrata.units import GB

# --- sources


def test_defaults() -> None:
    settings = load()
    assert settings == Settings()
    assert (settings.attn.page_size, settings.attn.chunk_size, settings.max_batch_size) == (256, 256, 8)
    kvc2 = settings.kvc2
    assert (kvc2.gpu_only, kvc2.utilization_percentage, kvc2.disk_reserve_free_GB) == (False, 0.9, 1.0)
    assert (kvc2.io_threads, kvc2.load_deadline_s) == (4, 5.0)
    assert kvc2.disk_path is kvc2.disk_size_GB is kvc2.cpu_memory_size_GB is kvc2.gpu_memory_size_GB is settings.disk_root is None


def test_s7_every_key_can_be_set_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        """
attn:
  page_size: 16
  chunk_size: 64
kvc2:
  gpu_only: no
  utilization_percentage: 1.0
  gpu_memory_size_GB: 1.5
  cpu_memory_size_GB: 64GiB
  disk_path: /mnt/data/kvc
  disk_group: yes
  disk_size_GB: 500 gb
  disk_reserve_free_GB: 0
  io_threads: 2
  load_deadline_s: 0
max_batch_size: 4
"""
    )
    settings = load(file)
    values = [16, 64, False, 1.0, 1.5, 68.719476736, "/mnt/data/kvc", True, 500.0, 0.0, 2, 0.0, 4]
    assert [settings.value(key) for key in KEYS] == values
    assert {settings.origin(key) for key in KEYS} == {str(file)}
    assert load(str(file)) == settings
    with pytest.raises(ValidationError, match="frozen"):
        settings.max_batch_size = 1  # type: ignore[misc]


def test_later_sources_win_and_origins_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("attn:\n  page_size: 16\n  chunk_size: 64\nkvc2:\n  # all commented out\n")
    settings = load(
        file, {"max_batch_size": 1, "kvc2": {"io_threads": 3}}, KVSTRATA_ATTN_CHUNK_SIZE="32", KVSTRATA_MAX_BATCH_SIZE="2"
    )
    assert (settings.attn.page_size, settings.chunk, settings.max_batch_size, settings.kvc2.io_threads) == (16, 32, 1, 3)
    origins = [settings.origin(key) for key in ("attn.page_size", "attn.chunk_size", "max_batch_size", "kvc2.disk_path")]
    assert origins == [str(file), "KVSTRATA_ATTN_CHUNK_SIZE", "override", "default"]


def test_environment_reaches_every_key() -> None:
    texts = {bool: "true", int: "32", float: "0.5", str: "/x"}
    for key, field in KEYS.items():
        variable = "KVSTRATA_" + key.replace(".", "_").upper()
        kind = next(one for one in (bool, int, float, str) if one.__name__ in str(field.annotation))
        settings = load(**{variable: texts[kind]})
        assert settings.origin(key) == variable
        assert str(settings.value(key)).lower() == texts[kind]
    assert load({"kvc2.disk_path": "/x"}, KVSTRATA_KVC2_DISK_PATH="none").kvc2.disk_path is None
    assert load(KVSTRATA_CACHE_DIR="/x", HOME="/", KVSTRATAX="1") == Settings()
    service = {"KVSTRATA_PORT": "tcp://10.0.0.1:80", "KVSTRATA_SERVICE_HOST": "10.0.0.1", "KVSTRATA_PORT_80_TCP_ADDR": "10.0.0.1"}
    assert load(**service) == Settings()  # what Kubernetes sets beside a service of that name


def test_every_key_says_what_it_does() -> None:
    for field in KEYS.values():
        assert field.description
        assert set(field.json_schema_extra) == {"unit", "allowed", "fix"}


def test_paths_in_settings(monkeypatch: Any) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert load({"kvc2.disk_path": "~/kv"}).disk_root == Path("/home/me/kv")
    assert load({"kvc2.disk_path": Path("kv")}).disk_root == Path.cwd() / "kv"
    assert load({"kvc2.disk_path": "/kv", "kvc2.gpu_only": True}).disk_root is None


# --- what is wrong, in one sentence


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("attn.page_size", 100, "must be a power of two from 16 to 1024; use 256 if in doubt"),
        ("attn.page_size", 8, "must be a power of two from 16 to 1024"),
        ("attn.page_size", 2048, "must be a power of two from 16 to 1024"),
        ("attn.page_size", None, "must be a power of two from 16 to 1024"),
        ("attn.page_size", "many", "must be a power of two from 16 to 1024"),
        ("attn.page_size", [16], "must be a power of two from 16 to 1024"),
        ("attn.chunk_size", 0, "must be from 1 to 1048576 tokens"),
        ("kvc2.gpu_only", "perhaps", "must be true or false"),
        ("kvc2.gpu_only", 2, "must be true or false"),
        ("kvc2.utilization_percentage", 90, "must be above 0 and at most 1; use 0.9 if in doubt"),
        ("kvc2.utilization_percentage", 0, "must be above 0 and at most 1"),
        ("kvc2.utilization_percentage", float("nan"), "must be above 0 and at most 1"),
        ("kvc2.cpu_memory_size_GB", 0, "must be a size above 0"),
        ("kvc2.disk_size_GB", "-1", "must be a size above 0"),
        ("kvc2.disk_reserve_free_GB", -1, "must be a size of 0 or more"),
        ("kvc2.disk_path", "", "must be the path of a directory; leave it out for no disk tier"),
        ("kvc2.disk_path", "a\0b", "must be the path of a directory"),
        ("kvc2.disk_path", "~nobody-of-this-name/kv", "must be the path of a directory"),
        ("kvc2.disk_path", 5, "must be the path of a directory"),
        ("kvc2.io_threads", 0, "must be from 1 to 64"),
        ("kvc2.io_threads", True, "must be from 1 to 64"),
        ("kvc2.load_deadline_s", -1, "must be from 0 to 3600 seconds"),
        ("max_batch_size", 0, "must be from 1 to 4096"),
        ("max_batch_size", 1.5, "must be from 1 to 4096"),
    ],
)
def test_wrong_values_are_told_in_one_sentence(key: str, value: Any, sentence: str) -> None:
    text = refusal({key: value})
    assert text.startswith(f"{key} is {value!r}, but {sentence}")
    assert "\n" not in text


def test_every_problem_has_a_line_that_says_where_it_is(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("attn: {page_size: 100}\nmax_batch_size: 0\n")
    assert refusal(file, KVSTRATA_KVC2_IO_THREADS="x").splitlines() == [
        f"attn.page_size is 100 (from {file}), but must be a power of two from 16 to 1024; use 256 if in doubt",
        "kvc2.io_threads is 'x' (from KVSTRATA_KVC2_IO_THREADS), but must be from 1 to 64; use 4 if in doubt",
        f"max_batch_size is 0 (from {file}), but must be from 1 to 4096; use 8 if in doubt",
    ]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"attn: [1\n", "not valid YAML at line 2, column 1"),
        (b"attn:\n  page_size: 16\n  page_size: 32\n", "not valid YAML at line 3, column 3: the key 'page_size' is there twice"),
        (b"? [1]\n: 2\n", "not valid YAML at line 1"),
        (b"a: !!python/object:os.system x\n", "not valid YAML at line 1"),
        (b"- 1\n", "holds list, but must hold sections"),
        (b"attn: 16\n", "attn is 16 (from {file}), but must be a section with the keys page_size, chunk_size"),
        (b"\xff\xfe", "not text in UTF-8"),
        (b"a: \x00\n", "not valid YAML"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, content: bytes, problem: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_bytes(content)
    text = refusal(file)
    assert problem.replace("{file}", str(file)) in text
    assert str(file) in text
    assert "\n" not in text


def test_files_that_are_missing_or_empty(tmp_path: Path) -> None:
    assert "cannot be read: No such file" in refusal(tmp_path / "missing.yaml")
    assert "cannot be read: Is a directory" in refusal(tmp_path)
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert load(tmp_path / "empty.yaml") == Settings()


# --- what the settings come to


def test_gpu_tier_on_the_cpu_has_a_size_of_its_own() -> None:
    gpu = resolve({}).gpu
    assert (gpu.pages, gpu.tokens) == (8 * 4096 // 256, 8 * 4096)
    assert gpu.bytes == (gpu.pages + 1) * LAYOUT.row_stride  # and the scratch row
    assert resolve({"max_batch_size": 1}).gpu.tokens == 4096
    gpu = resolve({"kvc2.gpu_memory_size_GB": 1}).gpu
    assert (gpu.bytes, gpu.pages) == (GB, GB // LAYOUT.row_stride - 1)


def test_gpu_tier_on_a_gpu_takes_its_share() -> None:
    gpu = resolve({"kvc2.utilization_percentage": 0.5}, device="cuda:0", device_free_bytes=20 * GB).gpu
    assert gpu.bytes == 10 * GB
    assert resolve({"kvc2.gpu_memory_size_GB": 3}, device="cuda:0", device_free_bytes=20 * GB).gpu.bytes == 3 * GB
    text = unresolved({"kvc2.gpu_memory_size_GB": 30}, device="cuda:0", device_free_bytes=20 * GB)
    assert text.startswith("kvc2.gpu_memory_size_GB of 30 GB is more than the 20 GB that are free on cuda:0")
    with pytest.raises(ValueError, match="device_free_bytes"):
        resolve({}, device="cuda:0")


def test_cpu_tier_defaults_to_a_tenth_and_at_most_8_gb() -> None:
    def default(**sizes: int) -> int:
        tier = resolve({}, memory=MEMORY._replace(**sizes)).cpu
        assert tier is not None
        return tier.bytes

    assert default() == 4 * GB
    assert default(available=200 * GB) == 8 * GB
    assert default(cgroup_limit=10 * GB, cgroup_free=9 * GB) == 1 * GB
    assert default(cgroup_limit=100 * GB, cgroup_free=90 * GB) == 4 * GB


def test_more_memory_than_there_is_names_both_numbers() -> None:
    text = unresolved({"kvc2.cpu_memory_size_GB": 500})
    assert text == (
        "kvc2.cpu_memory_size_GB of 500 GB is more than the 40 GB of memory that is free; make it smaller or leave it out for 4 GB"
    )
    limited = MEMORY._replace(cgroup_limit=8 * GB, cgroup_free=6 * GB)
    assert "7 GB is more than the 6 GB of memory that is free within the cgroup limit of 8 GB" in unresolved(
        {"kvc2.cpu_memory_size_GB": 7}, memory=limited
    )
    assert "30 GB and kvc2.cpu_memory_size_GB of 20 GB together are more than the 40 GB" in unresolved(
        {"kvc2.gpu_memory_size_GB": 30, "kvc2.cpu_memory_size_GB": 20}
    )
    assert resolve({"kvc2.cpu_memory_size_GB": 39}, device="cuda:0", device_free_bytes=20 * GB).cpu is not None
    assert "(max_batch_size 4096 x 4,096 tokens) is more than the 40 GB" in unresolved({"max_batch_size": 4096})
    with pytest.raises(ConfigError, match="more than the 40 GB"):
        capacity.check(load({"kvc2.cpu_memory_size_GB": 41}), MEMORY)


def test_a_tier_holds_at_least_a_page() -> None:
    for key, least in (("gpu_memory_size_GB", 2), ("cpu_memory_size_GB", 1), ("disk_size_GB", 4)):
        text = unresolved({f"kvc2.{key}": "1MiB", "kvc2.disk_path": "/x"})
        assert text.startswith(f"kvc2.{key} of 1.05 MB holds 0 pages of 2.1 MB and needs {least}; set it to ")
        fixed = float(text.partition("set it to ")[2].split()[0])
        resolve({f"kvc2.{key}": fixed, "kvc2.disk_path": "/x"})


def test_disk_tier_defaults_to_a_share_that_does_not_shrink_as_it_fills() -> None:
    def default(free: int, used: int, **settings: Any) -> int:
        tier = resolve({"kvc2.disk_path": "/x", **settings}, Machine(free, used)).disk
        assert tier is not None
        return tier.bytes

    assert default(300 * GB, 0) == default(270 * GB, 30 * GB) == 30 * GB
    assert default(900 * GB, 0) == 50 * GB
    assert default(10 * GB, 0) == GB
    assert default(10 * GB, 0, **{"kvc2.disk_reserve_free_GB": 9.5}) == GB // 2
    assert default(300 * GB, 0, **{"kvc2.disk_size_GB": "100GiB"}) == 100 * 2**30


def test_disk_sizes_that_cannot_be() -> None:
    assert "2 TB is more than the whole file system (1 TB)" in unresolved({"kvc2.disk_path": "/x", "kvc2.disk_size_GB": 2000})
    warned = resolve({"kvc2.disk_path": "/x", "kvc2.disk_size_GB": 400})
    assert warned.warnings == (
        "kvc2.disk_size_GB of 400 GB will not be reached: 300 GB free at /x, 0 bytes held by the cache, 1 GB reserved",
    )
    for settings in ({}, {"kvc2.disk_size_GB": 1}):
        text = unresolved({"kvc2.disk_path": "/x", **settings}, Machine(free=GB // 2))
        assert text.startswith("kvc2.disk_path has no space for 4 pages of 2.1 MB: 500 MB free at /x")


def test_s8_gpu_only_turns_the_other_tiers_off() -> None:
    settings = {"kvc2.gpu_only": True, "kvc2.cpu_memory_size_GB": 500, "kvc2.disk_path": "/x"}
    found = resolve(settings)
    assert found.cpu is found.disk is found.disk_path is None
    assert found.gpu.pages == 128
    assert found.warnings == ("kvc2.cpu_memory_size_GB, kvc2.disk_path: not used, since kvc2.gpu_only is true",)
    found = resolve({})
    assert (found.cpu is None, found.disk) == (False, None)
    assert resolve({"kvc2.disk_size_GB": 5}).warnings == ("kvc2.disk_size_GB: not used, since kvc2.disk_path is not set",)


def test_layout_and_settings_must_agree() -> None:
    with pytest.raises(ValueError, match="256 tokens, the settings of 64"):
        resolve({"attn.page_size": 64})


# --- the directory of the disk tier


def file_in_the_way(root: Path) -> Path:
    (root / "file").write_text("")
    return root / "file"


def below_a_file(root: Path) -> Path:
    return file_in_the_way(root) / "kv"


def link_to_nothing(root: Path) -> Path:
    (root / "link").symlink_to(root / "nothing")
    return root / "link"


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (file_in_the_way, "it is not a directory"),
        (below_a_file, "part of it is a file"),
        (link_to_nothing, "it is not a directory"),
        (lambda root: Path("/proc/nothing"), "No such file or directory"),
        (lambda root: root / ("n" * 300), "File name too long"),
    ],
)
def test_b11_bad_directories_stop_with_key_path_and_cause(tmp_path: Path, make: Any, cause: str) -> None:
    path = make(tmp_path)
    for call in (lambda: load({"kvc2.disk_path": path}).check(), lambda: load({"kvc2.disk_path": path}).resolve(LAYOUT)):
        with pytest.raises(ConfigError) as caught:
            call()
        text = str(caught.value)
        assert text.startswith(f"kvc2.disk_path {path} cannot be used: {cause}")
        assert text.endswith("give a directory that this user can write, or leave it out for no disk tier")
        assert "\n" not in text


def test_b11_foreign_owner(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(Unusable, match=r"belongs to user .* this is user 12345"):
        probe_folder(tmp_path)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_b11_read_only_full_and_failing_disks(tmp_path: Path, monkeypatch: Any, number: int) -> None:
    def fails(path: Any, *_: Any, **__: Any) -> int:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(os, "open", fails)
    with pytest.raises(Unusable) as caught:
        probe_folder(tmp_path)
    expected = "this user may not write to" if number == errno.EACCES else os.strerror(number)
    assert expected in str(caught.value)


def test_b11_a_file_system_that_hangs_is_an_error(tmp_path: Path, monkeypatch: Any) -> None:
    free = threading.Event()

    def hangs(*_: Any) -> Any:
        free.wait(60)
        raise OSError(errno.EIO, "gone")

    monkeypatch.setattr(os, "statvfs", hangs)
    monkeypatch.setattr(machine, "ANSWER_S", 0.01)
    try:
        with pytest.raises(ConfigError, match=r"cannot be used: it did not answer within 0\.01 s"):
            load({"kvc2.disk_path": tmp_path}).check()
    finally:
        free.set()


def test_b11_missing_parents_are_made_and_nothing_else_is_left(tmp_path: Path) -> None:
    root = tmp_path / "a" / "b"
    (tmp_path / "a").mkdir()
    load({"kvc2.disk_path": root}).check()
    assert root.stat().st_mode & 0o777 == 0o700
    assert list(root.iterdir()) == []
    (root / "shelf").mkdir()
    (root / "shelf" / "data").write_bytes(bytes(100_000))
    (root / "link").symlink_to("/usr")
    found = probe_folder(root)
    assert found.path == root
    assert 100_000 <= found.used <= 200_000
    assert 0 < found.free <= found.total


# --- memory of the machine


def cgroup_files(root: Path, **files: str) -> None:
    for name, content in files.items():
        path = root / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


MEMINFO = "MemTotal:       64000 kB\nMemFree:  1000 kB\nMemAvailable:   40000 kB\n"


def test_memory_without_limits(tmp_path: Path) -> None:
    cgroup_files(tmp_path, meminfo=MEMINFO)
    assert machine.memory(tmp_path, tmp_path) == Memory(64000 * 1024, 40000 * 1024)
    assert machine.memory(tmp_path, tmp_path).usable == 40000 * 1024
    assert machine.memory().usable > 0


def test_memory_in_cgroups_of_version_2(tmp_path: Path) -> None:
    cgroup_files(
        tmp_path,
        meminfo=MEMINFO,
        self__cgroup="0::/jobs/mine\n",
        cg__memory_DOT_max="max\n",
        cg__jobs__memory_DOT_max="20000000\n",
        cg__jobs__memory_DOT_current="6000000\n",
        cg__jobs__memory_DOT_stat="anon 1\ninactive_file 1000000\n",
        cg__jobs__mine__memory_DOT_max="30000000\n",
        cg__jobs__mine__memory_DOT_current="1000000\n",
    )
    found = machine.memory(tmp_path, tmp_path / "cg")
    assert (found.cgroup_limit, found.cgroup_free, found.usable) == (20_000_000, 15_000_000, 15_000_000)


def test_memory_in_cgroups_of_version_1(tmp_path: Path) -> None:
    cgroup_files(
        tmp_path,
        meminfo=MEMINFO,
        self__cgroup="5:cpu,cpuacct:/x\n4:memory:/gone/from/view\n0::/\n",
        cg__memory__memory_DOT_limit_in_bytes="30000000\n",
        cg__memory__memory_DOT_usage_in_bytes="10000000\n",
        cg__memory__memory_DOT_stat="total_inactive_file 4000000\n",
    )
    found = machine.memory(tmp_path, tmp_path / "cg")
    assert (found.cgroup_limit, found.cgroup_free) == (30_000_000, 24_000_000)
    cgroup_files(tmp_path, cg__memory__memory_DOT_limit_in_bytes=f"{(1 << 63) - 4096}\n", self__cgroup="4:memory:/../..\n")
    assert machine.memory(tmp_path, tmp_path / "cg").cgroup_limit is None
