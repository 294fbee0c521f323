"""R2: the bytes of a page follow the number of KV heads, in every tier, and not that of query heads."""

import pytest
from support import crowd, prompt, serve, settle

from kvstrata.layout import PageLayout

PAGE, HEADS, WIDTH, LAYERS = 16, 8, 16, 2


def shaped(kv_heads: int) -> PageLayout:
    config = {
        "model_type": "llama",
        "hidden_size": HEADS * WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": kv_heads,
    }
    return PageLayout.from_config(config, page_size=PAGE, dtype="float16")


def heads_apart(layout: PageLayout, kv_heads: int) -> bool:
    """Whether a page has room for K and V of that many heads, and no more than a block of 4 KiB beyond."""
    return layout.row_bytes == LAYERS * 2 * PAGE * kv_heads * WIDTH * 2 and layout.row_stride - layout.row_bytes < 4096


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 8])
def test_bytes_of_a_page(kv_heads):
    layout = shaped(kv_heads)
    assert heads_apart(layout, kv_heads)
    k, v = layout.layer_planes(0)
    assert k.shape == v.shape == (kv_heads, WIDTH)


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 8])
def test_every_byte_comes_back_from_every_tier(open_cache, tmp_path, kv_heads):
    layout, tokens = shaped(kv_heads), prompt(6, seed=2)
    cache = open_cache(gpu=8, cpu=16, disk=tmp_path / "disk", layout=layout)
    assert cache.pool.data.shape == (9, layout.row_stride)
    assert cache.pool.layers[0].k.shape == (9, PAGE, kv_heads, WIDTH)
    serve(cache, tokens)
    settle(cache)
    assert serve(cache, tokens).gpu == 80  # serve() proves every byte that was found
    crowd(cache)
    assert serve(cache, tokens).cpu == 80
    settle(cache)
    cache.close()
    cache = open_cache(gpu=8, cpu=8, disk=tmp_path / "disk", layout=layout)
    assert serve(cache, tokens).disk == 80


def test_what_keeps_it_from_happening(monkeypatch):
    """Counting query heads instead, as where the configuration does not say how many KV heads there are, is seen."""
    import kvstrata.layout

    real = kvstrata.layout.PageLayout.from_config.__func__

    def blind(cls, config, **options):
        return real(cls, {name: value for name, value in config.items() if name != "num_key_value_heads"}, **options)

    monkeypatch.setattr(kvstrata.layout.PageLayout, "from_config", classmethod(blind))
    assert not heads_apart(shaped(2), 2)
    assert heads_apart(shaped(2), HEADS)
