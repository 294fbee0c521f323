"""Memory while serving: the pool never moves, nothing of its size is allocated after the start, and nothing grows without end."""

import gc
import tracemalloc
from pathlib import Path

import pytest
from support import PAGE, prompt, serve, settle, tiny_identity, tiny_layout, until

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from kvstrata.engine.engine import Engine  # noqa: E402
from kvstrata.layout import PageLayout  # noqa: E402

MIB = 1 << 20


class Words:
    """A tokenizer is needed for text only."""

    eos_token_id = None

    def decode(self, tokens, skip_special_tokens=False):
        return ""


@pytest.fixture
def make_engine(open_cache, tmp_path):
    """make_engine(gpu, cpu, disk_bytes): a random two-layer Llama on small tiers."""
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=128,
        eos_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    layout = PageLayout.from_config(config, page_size=PAGE, dtype="float32")

    def make(gpu, cpu, disk_bytes):
        options = {"disk": tmp_path / "disk", "disk_bytes": disk_bytes} if disk_bytes else {}
        return Engine(model, Words(), open_cache(gpu=gpu, cpu=cpu, layout=layout, identity=tiny_identity(layout), **options))

    return make


def test_the_pool_is_filled_before_it_is_used(open_cache):
    """First touches of memory cost more than the copies of the first hits: a thread pays for them, and keeps what is there."""
    layout = tiny_layout(page_size=256, layers=4, width=64)
    cache = open_cache(gpu=64, cpu=0, layout=layout)
    pool = cache.pool
    pool.data[-1].fill_(7)
    until(lambda: pool.backend._filling.filled_bytes == pool.data.nbytes, "the whole pool")
    assert pool.data[-1].eq(7).all()


def addresses(pool):
    """Every tensor of the pool that a compiled graph could have kept: where it lies and how."""
    views = [view for layer in pool.layers for view in layer.planes.values()]
    return [(tensor.data_ptr(), tuple(tensor.shape), tensor.stride()) for tensor in [pool.data, *views]]


def ask(engine, tokens, new=4):
    (sequence,) = engine.generate([[int(token) % 128 for token in tokens]], max_new_tokens=new)
    assert sequence.error is None
    return sequence.stats


class Largest(TorchDispatchMode):
    """The largest memory that an operation made, apart from the memories in `known`."""

    def __init__(self, known):
        super().__init__()
        self.known = set(known)
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self.known:
                    self.bytes = max(self.bytes, storage.nbytes())
        return result


def test_the_pool_stays_where_it_is(make_engine):
    """Through eviction, reload from RAM and disk, growth and cancellation."""
    engine = make_engine(gpu=12, cpu=16, disk_bytes=4 * MIB)
    cache, pool = engine.cache, engine.cache.pool
    before = addresses(pool)
    assert len(before) == 1 + 2 * 2
    reused = {"gpu": 0, "cpu": 0, "disk": 0}
    prompts = [prompt(pages + 0.5, seed=pages) for pages in (2, 4, 6, 8)]
    for round in range(6):
        for tokens in prompts:
            stats = ask(engine, tokens, new=1 + round)
            for tier, count in stats.reused_tokens.items():
                reused[tier] += count
            assert addresses(pool) == before
        if round % 2:
            ask(engine, prompts[0])
            settle(cache)
            reused["gpu"] += ask(engine, prompts[0]).reused_tokens["gpu"]
        else:
            sequence = engine.submit(request(prompts[3]))
            engine.step()
            sequence.cancel()
            engine.step()
            settle(cache)
            for seed in range(8):
                serve(cache, prompt(4, 100 * round + seed))
                settle(cache)
        assert addresses(pool) == before
    assert min(reused.values()) > 0, f"every tier was used: {reused}"
    assert cache.stats()["gpu"]["evicted"] > 0


def request(tokens):
    from kvstrata.engine.sampling import Sampling
    from kvstrata.engine.sequence import Request

    return Request([int(token) % 128 for token in tokens], Sampling(max_new_tokens=8))


def test_the_pool_is_marked_static(make_engine):
    """torch.compile may keep the addresses: the mark of torch._dynamo is on every tensor of the pool."""
    pool = make_engine(gpu=4, cpu=0, disk_bytes=0).cache.pool
    for tensor in [pool.data, *(view for layer in pool.layers for view in layer.planes.values())]:
        assert getattr(tensor, "_dynamo_static_input_type", None) is not None


def test_nothing_of_the_pools_size_is_allocated_while_serving(make_engine):
    engine = make_engine(gpu=1500, cpu=64, disk_bytes=4 * MIB)
    cache, pool = engine.cache, engine.cache.pool
    size = pool.data.nbytes
    assert size > 20 * MIB
    weights = [tensor.untyped_storage().data_ptr() for tensor in [*engine.model.parameters(), *engine.model.buffers()]]
    ask(engine, prompt(2.5, seed=1))
    tracemalloc.start()
    try:
        with Largest([pool.data.untyped_storage().data_ptr(), *weights]) as largest:
            for seed in range(1, 12):
                ask(engine, prompt(2.5, seed % 5))
            ask(engine, prompt(30.5, seed=99))
            for _ in range(2):
                ask(engine, prompt(30.5, seed=99))
        settle(cache)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert largest.bytes > 0
    assert largest.bytes < size / 20, f"torch made {largest.bytes:,} bytes at once; the pool has {size:,}"
    assert peak < size / 4, f"Python held {peak:,} bytes more than at the start; the pool has {size:,}"


def resident():
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")) * 1024


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_resident_memory_is_flat_over_a_thousand_requests(make_engine):
    """New prompts, returning ones, all tiers full and turning over. What is known per page is bounded by what the tiers hold."""
    engine = make_engine(gpu=24, cpu=48, disk_bytes=2 * MIB)
    cache = engine.cache
    marks = []
    for number in range(1000):
        seed = number if number % 3 else number % 40
        ask(engine, prompt(1 + number % 4 + 0.25, seed), new=2)
        if number % 50 == 0:
            cache.drain_events()
        if number in (300, 999):
            settle(cache)
            gc.collect()
            marks.append(resident())
    assert cache.stats()["disk"]["evicted"] > 100, "the disk tier turned over"
    growth = marks[1] - marks[0]
    assert growth < 4 * MIB, f"{growth:,} bytes more after 700 requests"


def test_known_pages_are_bounded_by_the_tiers(open_cache, tmp_path):
    """Ten thousand new pages later the records are those of the pages that are somewhere."""
    cache = open_cache(gpu=8, cpu=16, disk=tmp_path / "disk", disk_bytes=1 << 20)
    most = 0
    for seed in range(1250):
        serve(cache, prompt(8, seed))
        most = max(most, cache.stats()["known_pages"])
    settle(cache)
    stats = cache.stats()
    capacity = 8 + 16 + (1 << 20) // 8192
    assert stats["gpu"]["stored"] > 9000
    assert most <= capacity + 16
