"""S7: each key of the settings changes something that can be seen on a cache, or an engine, that was opened with it."""

import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from settings_kit import Machine  # noqa: E402
from support import PAGE, crowd, disk_usage, prompt, serve, settle  # noqa: E402

from kvstrata import machine  # noqa: E402
from kvstrata.cache import PrefixCache  # noqa: E402
from kvstrata.config import KEYS, Settings  # noqa: E402
from kvstrata.engine import Engine, Request, Sampling  # noqa: E402
from kvstrata.layout import PageLayout  # noqa: E402

EFFECTS: dict[str, Callable[[Path], None]] = {}


def of(key: str) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    """Registers the function that shows the key's effect."""

    def register(effect: Callable[[Path], None]) -> Callable[[Path], None]:
        assert key not in EFFECTS
        EFFECTS[key] = effect
        return effect

    return register


def make_model() -> Any:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=30000, eos_token_id=None
    )
    return transformers.LlamaForCausalLM(config).eval()


MODEL = make_model()  # 8 KiB a page of 16 tokens
BASE = {
    "attn.page_size": PAGE,
    "attn.chunk_size": PAGE,
    "max_batch_size": 1,
    "kvc2.gpu_memory_size_GB": "136KiB",  # 16 pages and the scratch row
    "kvc2.cpu_memory_size_GB": "256KiB",
    "kvc2.disk_size_GB": "4MiB",
}


@contextmanager
def opened(**settings: Any) -> Iterator[PrefixCache]:
    """With BASE and these: attn_page_size=32 for attn.page_size; None leaves a key out."""
    named = {key.replace(".", "_"): key for key in KEYS}
    chosen = BASE | {named[name]: value for name, value in settings.items()}
    given = {key: value for key, value in chosen.items() if value is not None}
    with PrefixCache.open(MODEL, Settings.load(given, environ={}), say=None) as cache:
        yield cache
        cache.check_integrity()


@of("attn.page_size")
def _(root: Path) -> None:
    tokens = prompt(4)
    for size in (16, 32):
        with opened(attn_page_size=size, attn_chunk_size=size) as cache:
            serve(cache, tokens)
            assert serve(cache, tokens).hit == len(tokens) - size  # one token at least is computed: its page is not reused
            assert cache.stats()["gpu"]["pages"] == len(tokens) // size


@of("attn.chunk_size")
def _(root: Path) -> None:
    tokens = prompt(5).tolist()
    for chunk, reused in ((16, 4 * PAGE), (32, 4 * PAGE), (64, 4 * PAGE), (48, 3 * PAGE)):
        with opened(attn_chunk_size=chunk) as cache:
            engine = Engine(MODEL, None, cache)
            for hit in (0, reused):
                sequence = engine.submit(Request(tokens, Sampling(max_new_tokens=1))).result()
                assert sum(sequence.stats.reused_tokens.values()) == hit
            assert hit % chunk == 0


@of("kvc2.gpu_only")
def _(root: Path) -> None:
    for only, tier in ((False, "disk"), (True, None)):
        folder = root / str(only)
        with opened(kvc2_gpu_only=only, kvc2_disk_path=str(folder)) as cache:
            serve(cache, prompt(4))
            settle(cache)
            crowd(cache, 4)
            served = serve(cache, prompt(4))
            assert served.hit == (0 if only else 3 * PAGE)
            assert tier is None or getattr(served, tier) == served.hit
        assert folder.exists() is not only


@of("kvc2.utilization_percentage")
def _(root: Path) -> None:
    """On a GPU; test_share_of_a_device opens a pool there."""
    layout = PageLayout.from_config(MODEL.config, page_size=PAGE, dtype="float32")
    for share in (0.25, 1.0):
        settings = Settings.load({"attn.page_size": PAGE, "kvc2.utilization_percentage": share}, environ={})
        found = settings.resolve(layout, device="cuda:0", device_free_bytes=64 << 20)
        assert found.gpu.bytes == share * (64 << 20)
        assert found.gpu.pages == found.gpu.bytes // layout.row_stride - 1


@of("kvc2.gpu_memory_size_GB")
def _(root: Path) -> None:
    for pages in (4, 9):
        with opened(kvc2_gpu_memory_size_GB=f"{8 * (pages + 1)}KiB") as cache:
            assert cache.pool.data.shape[0] == pages + 1
            assert cache.lease(prompt(pages)).matched == 0
            assert cache.lease(prompt(pages + 1)).never


@of("kvc2.cpu_memory_size_GB")
def _(root: Path) -> None:
    for rows in (2, 7):
        with opened(kvc2_cpu_memory_size_GB=f"{8 * rows}KiB") as cache:
            serve(cache, prompt(12))
            settle(cache)
            stats = cache.stats()["cpu"]
            assert (stats["capacity"], stats["pages"]) == (rows, rows)


@of("kvc2.disk_path")
def _(root: Path) -> None:
    for folder, hit in ((root / "a", 0), (root / "b", 0), (root / "a", 3 * PAGE), (None, 0)):
        with opened(kvc2_disk_path=folder) as cache:
            assert serve(cache, prompt(4)).disk == hit
            settle(cache)
    assert list((root / "a").rglob("*.kvs"))


@of("kvc2.disk_group")
def _(root: Path) -> None:
    for group, bits in ((False, 0), (True, stat.S_IRGRP)):
        folder = root / str(group)
        with opened(kvc2_disk_path=folder, kvc2_disk_group=group) as cache:
            serve(cache, prompt(4))
            settle(cache)
        files = list(folder.rglob("*.kvs"))
        assert files
        assert {path.stat().st_mode & stat.S_IRGRP for path in [folder, *files]} == {bits}
        assert not any(path.stat().st_mode & 0o007 for path in [folder, *files])


@of("kvc2.disk_size_GB")
def _(root: Path) -> None:
    kept = {}
    for size in (1 << 20, 3 << 20):
        folder = root / str(size)
        with opened(kvc2_disk_path=folder, kvc2_disk_size_GB=f"{size}B") as cache:
            for seed in range(32):
                serve(cache, prompt(16, seed=seed))
                settle(cache)
                assert disk_usage(folder) <= size
            kept[size] = cache.stats()["disk"]["pages"]
    assert kept[3 << 20] > 2 * kept[1 << 20] > 0


@of("kvc2.disk_reserve_free_GB")
def _(root: Path) -> None:
    """Space that must stay free: with more of it than there is, requests go on and nothing is written."""
    room = Machine(free=10**18, total=10**18)  # else it would not be opened at all
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "probe_folder", room.probe_folder)
        for number, (reserve, pages) in enumerate(((0, 4), ("500PB", 0))):
            with opened(kvc2_disk_path=root / str(number), kvc2_disk_reserve_free_GB=reserve) as cache:
                serve(cache, prompt(4))
                settle(cache)
                assert serve(cache, prompt(4)).hit == 3 * PAGE
                settle(cache)
                assert cache.stats()["disk"]["pages"] == pages


@of("kvc2.io_threads")
def _(root: Path) -> None:
    def threads() -> int:
        names = (task / "comm" for task in Path("/proc/self/task").iterdir())
        return sum(name.read_text().startswith("kvstrata-io-") for name in names)

    before = threads()
    for count in (1, 3):
        with opened(kvc2_disk_path=root / "disk", kvc2_io_threads=count):
            assert threads() - before == count


@of("kvc2.load_deadline_s")
def _(root: Path) -> None:
    """What Lease.wait() waits at most, where it is not told."""

    class Seen:
        def __init__(self, core: Any) -> None:
            self.core, self.waits = core, []

        def __getattr__(self, name: str) -> Any:
            return getattr(self.core, name)

        def wait(self, lease: int, seconds: float) -> bool:
            self.waits.append(seconds)
            return bool(self.core.wait(lease, seconds))

    for seconds in (0, 0.25, None):
        with opened(kvc2_load_deadline_s=seconds) as cache:
            cache._core = seen = Seen(cache._core)
            with cache.lease(prompt(4)) as lease:
                lease.wait()
                lease.wait(7.0)
            assert seen.waits == [5.0 if seconds is None else seconds, 7.0]


@of("max_batch_size")
def _(root: Path) -> None:
    for most in (1, 2, 3):
        with opened(max_batch_size=most) as cache:
            engine = Engine(MODEL, None, cache)
            sequences = [engine.submit(Request(prompt(1, seed).tolist(), Sampling(max_new_tokens=6))) for seed in range(4)]
            at_once = 0
            while not all(sequence.finished for sequence in sequences):
                engine.step()
                at_once = max(at_once, len(engine.scheduler.running))
            assert at_once == most
    with opened(max_batch_size=2, kvc2_gpu_memory_size_GB=None) as cache:
        assert cache.pool.pages - 1 == 2 * 4096 // PAGE


@pytest.mark.parametrize("key", KEYS)
def test_a_key_has_its_effect(key: str, tmp_path: Path) -> None:
    assert key in EFFECTS, f"{key} has no test that shows its effect"
    EFFECTS[key](tmp_path)


def test_no_effect_is_left_over() -> None:
    assert set(EFFECTS) == set(KEYS)


@pytest.mark.cuda
def test_share_of_a_device() -> None:
    model = make_model().to("cuda")
    pages = []
    for share in (0.01, 0.02):
        settings = Settings.load({"attn.page_size": PAGE, "kvc2.utilization_percentage": share}, environ={})
        with PrefixCache.open(model, settings, say=None) as cache:
            pages.append(cache.pool.pages)
    assert 1.5 < pages[1] / pages[0] < 2.5
