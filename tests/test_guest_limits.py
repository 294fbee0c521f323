"""What the settings come to where another engine owns the device: two tiers, and no word about the third."""

import pytest
from pages import tiny_layout

from kvstrata import capacity
from kvstrata.config import ConfigError, Settings

LAYOUT = tiny_layout()


def resolved(**settings):
    given = {"attn.page_size": LAYOUT.page_size, "attn.chunk_size": LAYOUT.page_size, "kvc2.cpu_memory_size_GB": "1MB", **settings}
    return capacity.resolve(Settings.load(given, environ={}), LAYOUT, guest=True)


def test_two_tiers(tmp_path):
    found = resolved(**{"kvc2.disk_path": str(tmp_path / "disk"), "kvc2.disk_size_GB": "4MB"})
    assert found.gpu.pages == 0
    assert found.cpu.pages == 1_000_000 // LAYOUT.row_stride
    assert found.disk.pages > 0
    told = "\n".join(found.banner())
    assert "kvc2.cpu_memory_size_GB" in told
    assert "kvc2.utilization_percentage" not in told


def test_settings_that_the_engine_decides_are_told_of():
    found = resolved(max_batch_size=4, **{"kvc2.gpu_memory_size_GB": 1})
    assert [line for line in found.warnings if line.startswith("kvc2.gpu_memory_size_GB: not used, since the engine decides")]
    assert [line for line in found.warnings if line.startswith("max_batch_size: not used")]


def test_no_tier_at_all():
    with pytest.raises(ConfigError, match="so no tier would be left; remove it"):
        resolved(**{"kvc2.gpu_only": True})
