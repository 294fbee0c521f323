"""C7: something far larger than a tier is kept in part or refused; memory and disk stay under what was configured."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import PAGE, disk_usage, prompt, serve, settle, tiny_layout

from kvstrata import machine
from kvstrata.cache import CacheFull, PrefixCache
from kvstrata.machine import Memory

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


def test_ten_times_as_many_requests_as_may_run(open_cache):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from kvstrata.engine import Engine, Request, Sampling

    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=30000, eos_token_id=None
    )
    model = transformers.LlamaForCausalLM(config)
    settings = {"attn.page_size": PAGE, "attn.chunk_size": PAGE, "max_batch_size": 2, "kvc2.cpu_memory_size_GB": "1MiB"}
    with PrefixCache.open(model, settings, say=None) as cache:
        engine = Engine(model.eval(), None, cache)
        sequences = [engine.submit(Request(prompt(2, seed).tolist(), Sampling(max_new_tokens=3))) for seed in range(20)]
        while not all(sequence.finished for sequence in sequences):
            engine.step()
            assert len(engine.scheduler.running) <= 2
            assert cache.stats()["open_leases"] <= 4  # and as many that load while these run
        assert [sequence.reason for sequence in sequences] == ["length"] * 20


@pytest.mark.parametrize(("free", "cap"), [(40_000_000, 4_000_000), (120_000_000, 12_000_000)])
def test_the_default_is_a_share_of_free_memory_and_is_told(monkeypatch, capsys, free, cap):
    monkeypatch.setattr(machine, "memory", lambda: Memory(total=64 * 10**9, available=free))
    model = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 16}
    with PrefixCache.open(model, {"attn.page_size": PAGE, "max_batch_size": 1}) as cache:
        rows = cap // cache.layout.row_stride
        assert cache.limits.cpu_pages == cache.stats()["cpu"]["capacity"] == rows
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "kvc2.cpu_memory_size_GB" in line)
    assert f"{cap // 10**6} MB, {rows:,} pages" in line
    assert f"(10% of {free // 10**6} MB free memory)  [default]" in line
