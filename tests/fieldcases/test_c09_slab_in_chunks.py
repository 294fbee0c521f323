"""C9: RAM for the warm tier is filled and pinned in chunks, in the background; what cannot be pinned stays pageable."""

import logging
import os
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest
import torch
from support import PAGE, crowd, prompt, serve, settle, tiny_layout, until

import kvstrata.cuda
from kvstrata.cuda import CudaDevice
from kvstrata.gpu import HostDevice

BIG = tiny_layout(page_size=256, layers=4, width=64)  # 512 KiB a page
CHUNK = 64 << 20  # of the slab


class Cudart:
    """The two calls of the CUDA runtime that pin memory, as strict, wasteful or slow as a test wants them."""

    def __init__(self, largest=1 << 62, budget=1 << 62, gate=None):
        self.largest, self.budget, self.gate = largest, budget, gate
        self.pinned = {}
        self.calls = 0

    def cudaHostRegister(self, address, size, flags):
        self.calls += 1
        if self.gate:
            self.gate.wait(60)
        if size > self.largest or sum(self.pinned.values()) + size > self.budget:
            return 2  # cudaErrorMemoryAllocation
        self.pinned[address] = size
        return 0

    def cudaHostUnregister(self, address):
        del self.pinned[address]
        return 0


class FakeStream:
    def __init__(self, device):
        pass

    def query(self):
        return True


class FakeCuda(CudaDevice):
    """The real pinning over made-up CUDA calls; pool and copies are ordinary memory's."""

    asynchronous = False
    allocate = HostDevice.allocate
    mark_batch = HostDevice.mark_batch
    start = HostDevice.start


@pytest.fixture
def cuda(monkeypatch):
    """cuda(cudart, pin_chunk_bytes): a device whose CUDA runtime is `cudart`. Ask for it before open_cache, which closes it."""

    def make(cudart, pin_chunk_bytes):
        monkeypatch.setattr(
            kvstrata.cuda, "_cuda", types.SimpleNamespace(Stream=FakeStream, cudart=lambda: cudart, set_device=lambda _: None)
        )
        return FakeCuda(torch.device("cuda:0"), pin_chunk_bytes)

    return make


def tiles(cudart, slab_address, size):
    """Whether what is pinned covers the slab once, without gaps."""
    at = slab_address
    for address in sorted(cudart.pinned):
        if address != at:
            return False
        at += cudart.pinned[address]
    return at == slab_address + size


@pytest.mark.parametrize("rows", [1, 4, 5, 31, 32, 33])
def test_single_calls_are_limited(cuda, open_cache, rows):
    """A runtime that refuses more than 32 KiB at once: the slab is pinned all the same, in whole rows, and exactly once."""
    cudart = Cudart(largest=32 << 10)
    device = cuda(cudart, 32 << 10)
    cache = open_cache(gpu=8, cpu=rows, device=device)
    address, _, stride, _ = cache._core.slab()
    until(lambda: tiles(cudart, address, rows * stride), "the slab to be pinned")
    assert cudart.calls == -(-rows * stride // (32 << 10))
    assert all(size % stride == 0 for size in cudart.pinned.values())
    assert device.pin_error == ""
    assert cache.close()
    assert not cudart.pinned


def test_pages_larger_than_a_chunk(cuda, open_cache):
    cudart = Cudart()
    cache = open_cache(gpu=2, cpu=3, device=cuda(cudart, 4096), layout=BIG)
    until(lambda: tiles(cudart, cache._core.slab()[0], 3 << 19), "the slab to be pinned")
    assert cudart.calls == 3


def test_start_does_not_wait_for_pinning(cuda, open_cache):
    """The first call of the runtime hangs: the cache serves from pageable memory meanwhile, and closes within its bound."""
    gate = threading.Event()
    cudart = Cudart(gate=gate)
    cache = open_cache(gpu=8, cpu=24, device=cuda(cudart, 16 << 10))
    tokens = prompt(6, seed=1)
    serve(cache, tokens)
    settle(cache)
    crowd(cache)
    assert serve(cache, tokens).cpu == 5 * PAGE
    until(lambda: cudart.calls == 1, "the call that hangs")
    assert not cudart.pinned
    gate.set()
    until(lambda: len(cudart.pinned) == 6, "the rest")


def test_closing_while_a_call_hangs(cuda, open_cache, monkeypatch, caplog):
    monkeypatch.setattr(kvstrata.cuda, "PIN_PATIENCE", 0.05)
    gate = threading.Event()
    cudart = Cudart(gate=gate)
    cache = open_cache(gpu=8, cpu=24, device=cuda(cudart, 16 << 10))
    until(lambda: cudart.calls == 1, "the call that hangs")
    assert cache.close(1.0)
    assert "does not return" in caplog.text
    gate.set()


@pytest.mark.parametrize("budget", [0, 40 << 10])
def test_what_cannot_be_pinned_stays_pageable(cuda, open_cache, caplog, budget):
    caplog.set_level(logging.WARNING, "kvstrata")
    device = cuda(Cudart(budget=budget), 16 << 10)
    cache = open_cache(gpu=8, cpu=24, device=device)
    until(lambda: device.pin_error, "the reason")
    pinned = budget // (16 << 10) * (16 << 10)
    assert device.pin_error == (
        f"cudaHostRegister of 16,384 bytes returned 2: {24 * 4096 - pinned:,} of 98,304 bytes of the CPU tier stay pageable, "
        "so copies of them are slower"
    )
    until(lambda: caplog.messages, "a line in the log")
    assert caplog.messages == [device.pin_error]
    tokens = prompt(6, seed=1)
    serve(cache, tokens)
    settle(cache)
    crowd(cache)
    assert serve(cache, tokens).cpu == 5 * PAGE


def test_filled_in_the_background(open_cache):
    """Two gigabytes: the constructor returns, and pages are served, before they are filled; closing does not wait for the rest."""
    rows = 4096
    cache = open_cache(gpu=4, cpu=rows, layout=BIG)
    at_start = cache._core.prefaulted_bytes()
    tokens = prompt(3, seed=1, page_size=256)
    serve(cache, tokens)
    settle(cache)
    cache.lease(prompt(4, 2, 256), read=False, write=False, must=True).release()
    assert serve(cache, tokens).cpu == 512
    assert cache.close(1.0)
    stopped = cache._core.prefaulted_bytes()
    assert at_start <= stopped < rows << 19
    assert at_start % CHUNK == stopped % CHUNK == 0


RESIDENT = """
import time
from support import prompt, tiny_identity, tiny_layout
from kvstrata.cache import Limits, PrefixCache

def resident():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS")) * 1024

layout = tiny_layout(page_size=256, layers=4, width=64)
with PrefixCache(tiny_layout(), Limits(4, 4)) as warm:
    warm.lease(prompt(2)).release()
before = resident()
cache = PrefixCache(layout, Limits(1, 384), identity=tiny_identity(layout))
steps = set()
end = time.monotonic() + 60
while cache._core.prefaulted_bytes() < 384 << 19:
    steps.add(cache._core.prefaulted_bytes())
    assert time.monotonic() < end
assert all(step % (64 << 20) == 0 for step in steps)
cache.pool.data.zero_()
print(resident() - before - cache.pool.data.nbytes)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.slow
def test_takes_what_was_asked_for():
    """192 MiB of slab are 192 MiB of memory: nothing is rounded up or held twice."""
    run = subprocess.run(
        [sys.executable, "-c", RESIDENT],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert 0.95 * (384 << 19) <= int(run.stdout) <= 1.05 * (384 << 19)
