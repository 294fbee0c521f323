"""F3: a size is what its unit says, whose it is stands beside it, and what it comes to is printed: bytes, pages and tokens."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from settings_kit import MEMORY, Machine, load, refusal, resolve

from kvstrata import capacity, machine
from kvstrata.config import KEYS
from kvstrata.layout import PageLayout, PlaneSpec
from kvstrata.units import GB, gigabytes, in_bytes, readable


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("10GB", 10 * 10**9),
        ("10GiB", 10 * 2**30),
        ("512MB", 512 * 10**6),
        (10, 10 * 10**9),
        ("10 gb", 10 * 10**9),
        ("10", 10 * 10**9),
        (0.5, 5 * 10**8),
        ("1.5 TiB", 3 * 2**39),
        (" 1e3 mb ", 10**9),
        (".5gib", 2**29),
        ("4096 B", 4096),
        (0, 0),
    ],
)
def test_sizes(written: Any, size: int) -> None:
    assert in_bytes(gigabytes(written)) == size


@pytest.mark.parametrize(
    "written", ["-1", "10TBB", "", "GB", "10 G", "10 20", "ten", -1, -0.1, True, None, float("nan"), float("inf"), [1], "1e400"]
)
def test_what_is_no_size(written: Any) -> None:
    with pytest.raises(ValueError):
        gigabytes(written)
    if written is not None:
        text = refusal({"kvc2.cpu_memory_size_GB": written})
        assert text.startswith(f"kvc2.cpu_memory_size_GB is {written!r}, but must be a size above 0")


@given(st.integers(0, 10**15))
def test_sizes_are_exact_to_the_byte(size: int) -> None:
    assert in_bytes(gigabytes(f"{size}B")) == size


def test_readable_sizes() -> None:
    told = [readable(size) for size in (0, 999, 1000, 11_796_480, 999_960_000, 1_530_000_000, 500 * GB, 2 * 10**15)]
    assert told == ["0 bytes", "999 bytes", "1 kB", "11.8 MB", "1 GB", "1.53 GB", "500 GB", "2 PB"]


def test_banner_tells_bytes_pages_tokens_and_origins() -> None:
    lines = resolve({"kvc2.disk_path": "/x"}).banner()
    assert lines == [
        "attn.page_size               256 tokens, 2.1 MB per page (2 layers, bfloat16, 8,192 bytes per token)  [default]",
        "attn.chunk_size              256 tokens, prefill in chunks of 256: what is reused is a multiple of that  [default]",
        "max_batch_size               8 at once  [default]",
        "kvc2.gpu_only                false  [default]",
        "kvc2.utilization_percentage  0.9 (not used on the CPU)  [default]",
        "kvc2.gpu_memory_size_GB      271 MB, 128 pages, 32,768 tokens (max_batch_size 8 x 4,096 tokens) on cpu  [default]",
        "kvc2.cpu_memory_size_GB      4 GB, 1,907 pages, 488,192 tokens (10% of 40 GB free memory)  [default]",
        "kvc2.disk_path               /x  [given]",
        "kvc2.disk_group              this user's alone  [default]",
        "kvc2.disk_size_GB            30 GB, 14,305 pages, 3,662,080 tokens (10% of 300 GB free space)  [default]",
        "kvc2.disk_reserve_free_GB    1 GB left free  [default]",
        "kvc2.io_threads              4  [default]",
        "kvc2.load_deadline_s         5 s  [default]",
    ]
    assert {line.split()[0] for line in lines} == set(KEYS)
    off = resolve({"kvc2.gpu_only": True}).banner()
    assert sum("off, since kvc2.gpu_only is true" in line for line in off) == 4


def test_the_banner_tells_whose_the_bytes_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row holds the parts of all ranks, so a limit is that of all of them."""
    monkeypatch.setattr(machine, "probe_folder", Machine().probe_folder)
    layout = PageLayout.from_planes(
        [PlaneSpec(0, f"slice{part}", "uint8", (4096,)) for part in range(4)], page_size=256, dtype="bfloat16", tag="test"
    )
    settings = load({"kvc2.cpu_memory_size_GB": "8GB", "kvc2.disk_path": "/x", "kvc2.disk_size_GB": "100GB"})
    lines = capacity.resolve(settings, layout, memory=MEMORY, guest=True).banner(ranks=8, parts=4)
    told = {line.split()[0]: line for line in lines}
    assert "8 GB of all 8 ranks together, 2 GB for each of 4 parts, 1,907 pages, 488,192 tokens" in told["kvc2.cpu_memory_size_GB"]
    assert "100 GB of all 8 ranks together, 25 GB for each of 4 parts, " in told["kvc2.disk_size_GB"]
