"""C7: something far larger than a tier is kept in part or refused; memory and disk stay under what was configured."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import PAGE, disk_usage, prompt, serve, settle, tiny_layout

from kvstrata.cache import CacheFull

# The growth of a process's resident memory, by the kernel's own high-water mark, so in a process of its own. Prints: pages asked
# for, pages in RAM, high-water mark in bytes beyond what the process had before.
MEASURE = """
import sys
import numpy as np
from support import device_row, prompt, tiny_identity, tiny_layout
from kvstrata.cache import Limits, PrefixCache

def resident(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field)) * 1024

layout = tiny_layout(page_size=256, layers=4, width=64)  # 512 KiB a page
assert layout.row_stride == 1 << 19
gpu, cpu = int(sys.argv[1]), int(sys.argv[2])
with PrefixCache(tiny_layout(), Limits(4, 4)) as warm:
    warm.lease(prompt(2)).release()
before = resident("VmRSS")
cache = PrefixCache(layout, Limits(gpu, cpu), identity=tiny_identity(layout))
cache.pool.data.zero_()
tokens = prompt(gpu, page_size=256)
for round in range(3):
    with cache.lease(tokens, leave=0, must=True) as lease:
        hit = lease.wait() // 256
        for row in lease.rows[hit:]:
            device_row(cache, row)[:] = round + 1
        lease.publish(len(tokens), ready=cache.pool.mark_batch())
    assert cache.flush(60)
    kept = cache.stats()["cpu"]["pages"]
    cache.lease(prompt(gpu, 1, 256), read=False, write=False, must=True).release()
cache.check_integrity()
print(gpu, kept, resident("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.slow
def test_memory_stays_under_the_limits_of_pool_and_ram():
    """RAM may take 64 pages; the prefix has 192. Measured with another 192 pages in the pool, which are its own limit."""
    gpu, cpu, page = 192, 64, 1 << 19
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(gpu), str(cpu)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    asked, kept, growth = (int(word) for word in run.stdout.split())
    assert asked == 192
    assert 0 < kept <= cpu
    pool = (gpu + 1) * page
    assert growth - pool <= 1.1 * cpu * page, f"{growth - pool:,} bytes beside the pool, for a limit of {cpu * page:,}"


@pytest.mark.parametrize("cpu", [1, 4, 7])
def test_a_prefix_ten_times_as_large_as_ram(open_cache, tmp_path, cpu):
    cache = open_cache(gpu=10 * cpu + 2, cpu=cpu)
    tokens = prompt(10 * cpu, seed=1)
    serve(cache, tokens)
    settle(cache)
    assert cache.stats()["cpu"]["pages"] == cpu
    cache.lease(prompt(10 * cpu + 2, seed=2), read=False, write=False, must=True).release()  # empties the device
    kept = serve(cache, tokens)
    assert kept.cpu in (0, cpu * PAGE), "the first part, or nothing"
    assert kept.hit == kept.cpu


def test_a_prefix_ten_times_as_large_as_ram_passes_to_disk_and_back(open_cache, tmp_path):
    """RAM is a passage here: 40 pages through four rows, both ways."""
    cache = open_cache(gpu=42, cpu=4, disk=tmp_path / "disk")
    tokens = prompt(40, seed=1)
    serve(cache, tokens)
    settle(cache)
    assert cache.stats()["cpu"]["pages"] <= 4
    assert cache.stats()["disk"]["pages"] == 40
    cache.close()
    cache = open_cache(gpu=42, cpu=4, disk=tmp_path / "disk")
    assert serve(cache, tokens, leave=0).disk == 40 * PAGE
    assert cache.stats()["cpu"]["pages"] <= 4


def test_a_request_ten_times_as_large_as_the_pool(open_cache):
    cache = open_cache(gpu=8, cpu=8)
    known = prompt(6, seed=1)
    serve(cache, known)
    settle(cache)
    for options in ({}, {"reserve": 1000 * PAGE}):
        answer = cache.lease(prompt(80 if not options else 1, seed=2), **options)
        assert isinstance(answer, CacheFull)
        assert answer.never
        assert "raise kvc2.gpu_memory_size_GB" in str(answer)
    live = cache.lease(prompt(1, seed=3))
    assert not live.grow(80 * PAGE)
    live.release()
    assert cache.pool.data.shape == (9, 4096)
    assert cache.stats()["gpu"]["pages"] == 6
    assert serve(cache, known).gpu == 5 * PAGE


@pytest.mark.parametrize(
    "layout", [tiny_layout(), tiny_layout(width=48), tiny_layout(page_size=64)], ids=lambda x: str(x.row_stride)
)
def test_ten_times_the_limit_of_the_disk(open_cache, tmp_path, layout):
    """All files count, at every moment, also over restarts; the latest prompts are those that are kept."""
    root = tmp_path / "disk"
    cap = 1 << 20
    pages = 10 * cap // layout.row_stride
    done = 0
    for run in range(3):
        cache = open_cache(gpu=16, cpu=16, disk=root, disk_bytes=cap, layout=layout)
        assert disk_usage(root) <= cap
        while done < pages * (run + 1) // 3:
            tokens = prompt(8, seed=done, page_size=layout.page_size)
            serve(cache, tokens)
            settle(cache)
            done += 8
            assert disk_usage(root) <= cap
        assert cache.stats()["disk_bytes"] <= cap
        cache.close()
    cache = open_cache(gpu=16, cpu=16, disk=root, disk_bytes=cap, layout=layout)
    assert serve(cache, tokens).disk == 7 * layout.page_size
    assert disk_usage(root) > cap // 2, "the limit is also used"
    cache.close()

    cache = open_cache(gpu=16, cpu=16, disk=root, disk_bytes=cap // 4, layout=layout)  # lowered: holds before open() returns
    assert disk_usage(root) <= cap // 4
