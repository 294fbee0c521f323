"""What is refused at the start, each with a sentence that says what to do."""

import re
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import vllm
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm_sim import BLOCK, PAGE, WIDTH, tokens_of

from kvstrata.config import ConfigError
from kvstrata.connect.vllm import KVStrataConnector
from kvstrata.connect.vllm.blocks import BlockLayout, Unsupported
from kvstrata.connect.vllm.copier import DeviceBlocks, HostCopier, MappedSlab, TorchCopier
from kvstrata.connect.vllm.plan import BlockCopy
from kvstrata.connect.vllm.plugin import TESTED, check_version, register

FULL = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)


def test_the_entry_point_registers_the_short_name():
    (entry,) = [one for one in entry_points(group="vllm.general_plugins") if one.name == "kvstrata"]
    entry.load()()
    register()  # vLLM calls it in each of its processes, and more than once
    transfer = KVTransferConfig(kv_connector="KVStrataConnector", kv_role="kv_both")
    assert KVConnectorFactory.get_connector_class(transfer) is KVStrataConnector


def test_versions():
    assert any(vllm.__version__.startswith(one + ".") for one in TESTED)
    check_version("0.32.7+cpu", allow=False)
    check_version("0.99.0", allow=True)
    with pytest.raises(RuntimeError, match=r"0\.32\.x, and this is vLLM 0\.33\.0: install one of those.*allow_untested_vllm"):
        check_version("0.33.0", allow=False)


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        ({"confg": "x"}, "unknown key 'confg' in kv_connector_extra_config: did you mean 'config'?"),
        ({"save_generated": "yes"}, "kv_connector_extra_config.save_generated is 'yes', but must be true or false"),
    ],
)
def test_options(make_sim, extra, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        make_sim(extra=extra)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"kvc2.disk_pat": "x"}, "unknown key 'kvc2.disk_pat'"),
        ({"kvc2.gpu_only": True}, "so no tier would be left"),
        ({"kvc2.cpu_memory_size_GB": 1e-6}, "holds 0 pages"),
    ],
)
def test_settings(make_sim, settings, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        make_sim(settings=settings)


def test_the_role_of_a_cache(make_sim):
    sim = make_sim()
    sim.config.kv_transfer_config.kv_role = "kv_producer"
    with pytest.raises(ValueError, match="set it to 'kv_both'"):
        KVStrataConnector(sim.config, KVConnectorRole.WORKER, sim.kv)


def layout_of(sim, *groups, page=PAGE, chosen=True):
    kv = KVCacheConfig(8, [], [KVCacheGroupSpec([f"layer{n}"], spec) for n, spec in enumerate(groups)])
    return BlockLayout.of(sim.config, kv, page, chosen)


def test_models_that_are_refused(make_sim):
    """Never silently downgraded, and never wrong."""
    sim = make_sim()
    window = SlidingWindowSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=64)
    mamba = MambaSpec(block_size=BLOCK, shapes=((4, 4),), dtypes=(torch.float32,))
    with pytest.raises(Unsupported, match=r"the model has 2 kinds of KV cache .* --disable-hybrid-kv-cache-manager"):
        layout_of(sim, FULL, window)
    for spec in (window, mamba):
        with pytest.raises(Unsupported, match=f"layer layer0 has a {type(spec).__name__}, and only full attention and MLA"):
            layout_of(sim, spec)
    with pytest.raises(Unsupported, match=r"attn\.page_size 24 must be a multiple of vLLM's block size 16"):
        layout_of(sim, FULL, page=24)
    sim.config.speculative_config = SimpleNamespace(use_eagle=lambda: True)
    with pytest.raises(Unsupported, match="depend on the next token"):
        layout_of(sim, FULL)
    sim.config.speculative_config = None
    sim.config.parallel_config.pipeline_parallel_size = 2
    with pytest.raises(Unsupported, match="--pipeline-parallel-size 2 is not supported"):
        layout_of(sim, FULL)
    sim.config.parallel_config.pipeline_parallel_size = 1


def test_models_that_fit(make_sim):
    sim = make_sim()
    mla = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=24, head_size_v=0, dtype=torch.bfloat16)
    assert layout_of(sim, mla).page_layout("t").row_bytes == PAGE * 24 * 2
    assert layout_of(sim, FULL, page=8, chosen=False).blocks_per_page == 1, "larger blocks make larger pages"


def test_importing_needs_neither_vllm_nor_torch():
    source = (Path(__file__).parents[2] / "kvstrata/connect/vllm/__init__.py").read_text()
    assert "import vllm" not in source
    assert "torch" not in source.split('"""')[2]


@pytest.mark.parametrize("copier", [HostCopier, TorchCopier])
def test_copiers_bring_back_what_they_took(make_sim, copier):
    """Each block to its place, nothing beside it touched; the way that suits any device of torch's does what the quick one does."""
    sim = make_sim(page=64)
    worker = sim.ranks[0].connector.worker
    slab = MappedSlab(sim.connector.scheduler._slab)
    device = DeviceBlocks(sim.ranks[0].caches, worker._blocks, sim.kv.num_blocks)
    copy = copier(device, worker._blocks, 0, slab)
    for layer, cache in enumerate(sim.ranks[0].caches.values()):
        cache[:] = torch.arange(cache.numel()).reshape(cache.shape) + layer * 10**6
    before = [cache.clone() for cache in sim.ranks[0].caches.values()]
    rows, parts, blocks = (np.array(one, np.int32) for one in ([3, 3, 5], [0, 3, 1], [7, 2, 9]))
    what = BlockCopy(1, "r", rows, parts, blocks)
    copy.copy(what, up=False)
    taken = [cache[blocks].clone() for cache in sim.ranks[0].caches.values()]
    for cache in sim.ranks[0].caches.values():
        cache[blocks] = -1
    other = HostCopier(device, worker._blocks, 0, slab)  # what one saved the other loads
    other.copy(what, up=True)
    for cache, own, whole in zip(sim.ranks[0].caches.values(), taken, before, strict=True):
        assert torch.equal(cache[blocks], own)
        assert torch.equal(cache, whole)


def test_blocks_that_are_not_contiguous(make_sim):
    sim = make_sim()
    caches = {name: torch.zeros(sim.kv.num_blocks, 1, WIDTH, BLOCK * 2)[..., ::2] for name in sim.ranks[0].caches}
    with pytest.raises(ValueError, match="are not contiguous; use an attention backend with the KV cache layout LBHNC"):
        sim.ranks[0].connector.register_kv_caches(caches)


def test_kernel_blocks_smaller_than_vllms(make_sim):
    """A backend may cut vLLM's blocks for its kernels; their bytes are the same."""
    sim = make_sim()
    blocks = sim.connector._blocks
    caches = {name: torch.zeros(2 * sim.kv.num_blocks, 1, BLOCK // 2, WIDTH, dtype=torch.int32) for name in blocks.layers}
    found = DeviceBlocks(caches, blocks, sim.kv.num_blocks)
    assert [tuple(one.shape) for one in found.bytes] == [(sim.kv.num_blocks, BLOCK * WIDTH * 4)] * 2
    assert sim.serve(tokens_of(40)) == (0, 0)
