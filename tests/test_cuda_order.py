"""What CudaDevice asks of its streams, and in which order: over streams that only write down what they are asked for."""

import threading
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from support import tiny_layout  # noqa: E402

import kvstrata.cuda  # noqa: E402
from kvstrata.cuda import CudaDevice  # noqa: E402
from kvstrata.gpu import Copy, PagePool, Slab  # noqa: E402

LAYERS = 8


class Streams:
    """The log of everything that was asked for, as (stream, what, event)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[tuple[str, str, int]] = []
        self.events = 0
        self.now = self.compute = self.stream("compute")
        streams = iter([self.stream("copies")])
        monkeypatch.setattr(
            kvstrata.cuda,
            "_cuda",
            SimpleNamespace(Stream=lambda device: next(streams), Event=self.event, cudart=lambda: None),
        )
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.now)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "stream", self.use)

    def stream(self, name: str) -> Any:
        stream = SimpleNamespace(name=name)
        stream.wait_event = lambda event: self.log.append((name, "wait", event.number))
        stream.wait_stream = lambda other: self.log.append((name, f"wait for stream {other.name}", 0))
        stream.synchronize = lambda: self.log.append((name, "synchronize", 0))
        return stream

    def event(self) -> Any:
        self.events += 1
        event = SimpleNamespace(number=self.events)
        event.record = lambda stream: self.log.append((stream.name, "record", event.number))
        event.synchronize = lambda: self.log.append(("host", "wait", event.number))
        return event

    @contextmanager
    def use(self, stream: Any) -> Any:
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Any:
    streams = Streams(monkeypatch)
    device = CudaDevice(torch.device("cuda:0"))
    monkeypatch.setattr(CudaDevice, "allocate", lambda self, rows, stride: torch.zeros((rows, stride), dtype=torch.uint8))
    layout = tiny_layout(layers=LAYERS, width=8)
    pool = PagePool(layout, 6, device)
    memory = np.arange(4 * layout.row_stride, dtype=np.int64).astype(np.uint8)
    device._slab = torch.from_numpy(memory.reshape(4, layout.row_stride))
    copy_ = torch.Tensor.copy_

    def noted(target: Any, source: Any, non_blocking: bool = False) -> Any:
        streams.log.append((streams.now.name, "copy" if non_blocking else "blocking copy", 0))
        return copy_(target, source)

    monkeypatch.setattr(torch.Tensor, "copy_", noted)
    return SimpleNamespace(streams=streams, device=device, pool=pool, slab=Slab(memory.ctypes.data, 4, layout.row_stride))


def test_the_copy_stream_begins_behind_what_used_the_pools_memory_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator hands memory on while kernels that were submitted before still write to it."""
    streams = Streams(monkeypatch)
    device = CudaDevice(torch.device("cuda:0"))
    empty = torch.empty

    def allocated(size: Any, *, dtype: Any, device: Any) -> Any:
        assert str(device) == "cuda:0"
        streams.log.append((streams.now.name, "allocate", 0))
        return empty(size, dtype=dtype)

    monkeypatch.setattr(torch, "empty", allocated)
    device.allocate(2, 64)
    assert streams.log == [("compute", "allocate", 0), ("copies", "wait for stream compute", 0)]


def test_memory_is_pinned_for_the_device_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread is on the first device: a call there would make a context on it, and take its memory."""
    current = threading.local()
    calls: list[tuple[str, int]] = []  # each with the device of the thread that makes it

    def call(name: str) -> Any:
        return lambda *arguments: calls.append((name, getattr(current, "device", 0))) or 0

    cudart = SimpleNamespace(cudaHostRegister=call("register"), cudaHostUnregister=call("unregister"))
    Streams(monkeypatch)
    monkeypatch.setattr(kvstrata.cuda._cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(kvstrata.cuda._cuda, "set_device", lambda device: setattr(current, "device", device.index), raising=False)
    device = CudaDevice(torch.device("cuda:1"), pin_chunk_bytes=8192)
    memory = np.zeros(4 * 4096, np.uint8)
    device.attach(Slab(memory.ctypes.data, 4, 4096))
    assert device._pinner is not None
    device._pinner.join(60)
    assert calls == [("register", 1), ("register", 1)]
    assert not hasattr(current, "device"), "this thread stays on the device that it had chosen"


def rows(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


@pytest.mark.parametrize("up", [True, False])
def test_copies_wait_for_the_batch_and_go_on_a_stream_of_their_own(scene: Any, up: bool) -> None:
    first, second = scene.device.mark_batch(), scene.device.mark_batch()
    scene.streams.log.clear()
    transfer = scene.device.start(Copy(1, up, rows(0, 2), rows(3, 5), second), scene.pool, scene.slab)
    assert {name for name, _, _ in scene.streams.log} == {"copies"}
    assert scene.streams.log[0] == ("copies", "wait", second)  # before any byte moves
    assert first != second
    groups = len(scene.pool.groups)
    moves = [what for _, what, _ in scene.streams.log[1:]]
    assert moves == ["copy", "copy", "record"] * groups
    if up:
        assert torch.equal(scene.pool.data[5, :64], scene.device._slab[2, :64])
    scene.streams.log.clear()
    assert transfer.result()
    assert scene.streams.log == [("host", "wait", scene.streams.events)]  # the last one


def test_the_compute_stream_waits_for_a_layer(scene: Any) -> None:
    fence = scene.device.mark_batch()
    transfer = scene.device.start(Copy(1, True, rows(0), rows(3), fence), scene.pool, scene.slab)
    scene.streams.log.clear()
    waited = []
    for layer in range(LAYERS):
        assert transfer.wait_layer(layer, None)
        waited.append(scene.streams.log[-1])
    assert {name for name, _, _ in waited} == {"compute"}
    events = [event for _, _, event in waited]
    assert events == sorted(events)
    assert len(set(events)) == len(scene.pool.groups)
    assert events[-1] == scene.streams.events


def test_a_fence_is_an_event_of_the_stream_that_computes(scene: Any) -> None:
    scene.streams.log.clear()
    fence = scene.device.mark_batch()
    assert scene.streams.log == [("compute", "record", scene.streams.events)]
    assert fence == scene.device.marked


def test_a_copy_that_fails_half_way_is_over_before_that_is_told(scene: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its first rows would go on into memory that is somebody else's by then."""
    fence = scene.device.mark_batch()
    copy_, left = torch.Tensor.copy_, [3]

    def failing(target: Any, source: Any, non_blocking: bool = False) -> Any:
        left[0] -= 1
        if not left[0]:
            raise RuntimeError("out of something")
        return copy_(target, source, non_blocking=non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", failing)
    with pytest.raises(RuntimeError, match="out of something"):
        scene.device.start(Copy(1, True, rows(0, 1), rows(3, 4), fence), scene.pool, scene.slab)
    assert scene.streams.log[-1] == ("copies", "synchronize", 0)
