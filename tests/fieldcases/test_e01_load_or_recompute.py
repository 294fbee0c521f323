"""E1: loading is chosen only where it beats computing again; traffic that finds nothing pays nothing."""

import pytest
from support import PAGE, tiny_identity

from kvstrata.speed import Speed, worth_loading

MB, GB = 10**6, 10**9
TOKEN = 46_080  # bytes of a token: SmolLM2-135M in float32
LLAMA_70B = 327_680  # in bfloat16


@pytest.mark.parametrize(
    ("disk", "prefill", "loads"),
    [
        (20 * MB, 50_000, False),
        (3 * GB, 1_000, True),
        (20 * MB, 100, True),  # a machine that computes even slower than its disk reads
        (3 * GB, 500_000, False),
    ],
)
@pytest.mark.parametrize("tokens", [256, 2048, 131_072])
def test_the_two_ends(disk, prefill, loads, tokens):
    assert worth_loading(tokens * TOKEN, 0, disk, tokens, prefill) is loads


@pytest.mark.parametrize("per_token", [576, TOKEN, LLAMA_70B])
def test_the_border_is_where_both_take_as_long(per_token):
    tokens, prefill = 4096, 2000.0
    border = tokens * per_token / (tokens / prefill)  # bytes per second
    assert worth_loading(tokens * per_token, 0, border * 1.001, tokens, prefill)
    assert not worth_loading(tokens * per_token, 0, border * 0.999, tokens, prefill)


def test_what_waits_before_it_counts():
    """A fast disk with a long queue is a slow disk."""
    tokens = 2048
    alone = worth_loading(tokens * TOKEN, 0, 1 * GB, tokens, 10_000)
    behind = worth_loading(tokens * TOKEN, 100 * tokens * TOKEN, 1 * GB, tokens, 10_000)
    assert alone
    assert not behind


def test_unknown_speeds_load_and_learn():
    assert worth_loading(1 << 40, 0, None, 1, 1000.0)
    assert worth_loading(1 << 40, 0, 1.0, 1, None)


def test_speeds_follow_what_was_measured():
    disk, prefill = Speed(), Speed()
    assert worth_loading(2048 * TOKEN, 0, disk.value, 2048, prefill.value)
    prefill.measured(2048, 2048 / 50_000)
    disk.measured(2048 * TOKEN, 2048 * TOKEN / (20 * MB))  # it was tried once, and was slow
    assert not worth_loading(2048 * TOKEN, 0, disk.value, 2048, prefill.value)
    for _ in range(20):
        disk.measured(3 * GB, 1.0)
        prefill.measured(1000, 1.0)
    assert worth_loading(2048 * TOKEN, 0, disk.value, 2048, prefill.value)
    slow = disk.value
    disk.measured(1 * MB, 1.0, at_least=True)  # seen late: proves nothing about a faster disk
    assert disk.value == slow


# --- in the engine


class Asked:
    """A request that holds a lease, as the engine's decision sees it."""

    def __init__(self, lease):
        self.lease = lease


@pytest.fixture
def engine(open_cache, tmp_path):
    """An engine on a cache whose prompt `engine.prompt` of 8 pages is on disk, its last 4 pages only there; and `engine.other`."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from kvstrata.engine.engine import Engine
    from kvstrata.layout import PageLayout

    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, vocab_size=64
    )
    model = transformers.LlamaForCausalLM(config).eval()
    layout = PageLayout.from_config(config, page_size=PAGE, dtype="float32")
    tokens = list(range(60)) * 3
    tokens = tokens[: 8 * PAGE + 2]

    def open_engine():
        cache = open_cache(gpu=24, cpu=24, disk=tmp_path / "disk", layout=layout, identity=tiny_identity(layout))
        return Engine(model, Words(), cache)

    other = tokens[::-1]
    first = open_engine()
    assert [sequence.error for sequence in first.generate([tokens, other], max_new_tokens=1)] == [None, None]
    assert first.cache.flush(30)
    first.cache.close()
    engine = open_engine()
    assert engine.generate([tokens[: 4 * PAGE + 2]], max_new_tokens=1)[0].stats.reused_tokens["disk"] == 4 * PAGE
    engine.prompt, engine.other = tokens, other
    return engine


class Words:
    eos_token_id = None

    def decode(self, tokens, skip_special_tokens=False):
        return ""


def test_the_engine_decides_by_the_bytes_on_disk(engine):
    cache = engine.cache
    engine.scheduler.patience.prefill.value = 50_000.0
    engine.scheduler.patience.disk.value = 50_000.0 * cache.layout.bytes_per_token / 2  # reads half as fast as the model computes
    with cache.lease(engine.prompt, must=True) as lease:
        assert lease.sources == {"gpu": 4 * PAGE, "cpu": 0, "disk": 4 * PAGE}
        assert not engine.scheduler.patience.seconds(Asked(lease), [])
        engine.scheduler.patience.disk.value *= 3
        assert engine.scheduler.patience.seconds(Asked(lease), [])
        assert engine.scheduler.patience.seconds(Asked(lease), [Asked(lease), Asked(lease)])  # those wait for the very same pages
        with cache.lease(engine.other, must=True) as other:
            assert other.sources["disk"] == 8 * PAGE
            assert not engine.scheduler.patience.seconds(Asked(lease), [Asked(other)])  # this one for twice as many others
    with cache.lease(engine.prompt[: 4 * PAGE + 2], must=True) as lease:
        assert not engine.scheduler.patience.seconds(Asked(lease), []), "all there: nothing to wait for"
    with cache.lease([63] * 100, must=True) as lease:
        assert lease.matched == 0
        assert not engine.scheduler.patience.seconds(Asked(lease), []), "a new prompt never waits"


def test_the_engine_takes_the_part_that_is_near(engine):
    """Where the disk is not worth waiting for, the pages before those on disk are still used."""
    engine.scheduler.patience.prefill.value, engine.scheduler.patience.disk.value = 1e12, 1.0
    sequence = engine.generate([engine.prompt], max_new_tokens=1)[0]
    assert sequence.error is None
    assert sequence.stats.reused_tokens["gpu"] == 4 * PAGE
    assert sequence.stats.computed_tokens <= 4 * PAGE + 2
