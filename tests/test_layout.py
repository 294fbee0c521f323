"""Page layouts: bytes of a row for GQA and MLA, order of the planes, and the models that are refused."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.layout import PageLayout, PlaneSpec, UnsupportedModel, check_page_size, dtype_name

LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "v_head_dim": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}
PAGE_SIZES = st.sampled_from([16, 32, 64, 128, 256, 512, 1024])


def test_smollm2_row_has_the_bytes_that_were_measured() -> None:
    smollm2 = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}
    layout = PageLayout.from_config(smollm2, page_size=256, dtype="float32")
    assert layout.bytes_per_token == 46_080
    assert layout.row_bytes == 256 * 46_080
    assert PageLayout.from_config(smollm2, page_size=256, dtype="bfloat16").bytes_per_token == 23_040


def test_mla_stores_one_latent_plane_per_layer() -> None:
    layout = PageLayout.from_config(DEEPSEEK, page_size=64, dtype="bfloat16")
    assert layout.bytes_per_token == 70_272
    assert [plane.name for plane in layout.planes] == ["latent"] * 61
    assert layout.plane(60, "latent").shape == (1, 576)


@given(
    layers=st.integers(1, 5),
    kv_heads=st.sampled_from([1, 2, 3, 8]),
    head_dim=st.sampled_from([8, 64, 80, 128]),
    page_size=PAGE_SIZES,
    dtype=st.sampled_from([("float32", 4), ("bfloat16", 2), ("float16", 2)]),
)
def test_r2_page_bytes_count_the_kv_heads(
    layers: int, kv_heads: int, head_dim: int, page_size: int, dtype: tuple[str, int]
) -> None:
    config = {"num_hidden_layers": layers, "num_attention_heads": 24, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    layout = PageLayout.from_config(config, page_size=page_size, dtype=dtype[0])
    assert layout.row_bytes == 2 * layers * page_size * kv_heads * head_dim * dtype[1]
    assert layout.row_stride % 4096 == 0
    assert 0 <= layout.row_stride - layout.row_bytes < 4096
    # The planes cover the row without gaps, layer by layer, K before V.
    assert [(plane.layer, plane.name) for plane in layout.planes] == [(layer, name) for layer in range(layers) for name in "kv"]
    end = 0
    for plane in layout.planes:
        assert plane.offset == end
        assert plane.offset % dtype[1] == 0
        assert plane.bytes == page_size * plane.bytes_per_token
        assert plane.shape == (kv_heads, head_dim)
        end += plane.bytes
    assert end == layout.row_bytes
    assert layout.layers == tuple(range(layers))
    for layer in layout.layers:
        assert layout.layer_range(layer) == (layer * layout.row_bytes // layers, layout.row_bytes // layers)


@given(tokens=st.integers(0, 100_000), size=st.integers(0, 10**9), page_size=PAGE_SIZES)
def test_tokens_and_bytes_agree(tokens: int, size: int, page_size: int) -> None:
    layout = PageLayout.from_config(LLAMA, page_size=page_size, dtype="float16")
    assert layout.tokens_in(layout.bytes_for(tokens)) >= tokens
    assert layout.bytes_for(layout.tokens_in(size)) <= size < layout.bytes_for(layout.tokens_in(size)) + layout.row_stride


def test_s6_page_sizes() -> None:
    for page_size in (16, 32, 64, 128, 256, 512, 1024):
        check_page_size(page_size)
    for page_size in (0, 1, 8, 100, 255, 2048, -16, True, 16.0, "16"):
        with pytest.raises(ValueError, match="16 to 1024"):
            PageLayout.from_config(LLAMA, page_size=page_size)  # type: ignore[arg-type]
    assert PageLayout.from_config(LLAMA, page_size=1, dtype="float32", simulator=True).row_bytes == 2 * 2 * 2 * 8 * 4
    with pytest.raises(ValueError, match=r"page_size 100 must be a power of two from 16 to 1024 .* use 256"):
        check_page_size(100, simulator=True)


def test_configs_of_all_kinds_agree() -> None:
    expected = PageLayout.from_config(LLAMA, page_size=16)
    assert PageLayout.from_config(SimpleNamespace(**LLAMA), page_size=16) == expected
    assert PageLayout.from_config({"model_type": "llava", "text_config": LLAMA, "hidden_size": 1}, page_size=16) == expected
    old_names = {"n_layer": 2, "n_head": 8, "n_embd": 64, "num_kv_heads": 2}
    assert PageLayout.from_config(old_names, page_size=16) == expected
    assert PageLayout.from_config(LLAMA | {"num_key_value_heads": None}, page_size=16).planes[0].shape == (8, 8)
    assert PageLayout.from_config(LLAMA | {"multi_query": True}, page_size=16).planes[0].shape == (1, 8)
    assert PageLayout.from_config(LLAMA | {"head_dim": 32, "v_head_dim": 16}, page_size=16).plane(1, "v").shape == (2, 16)


@pytest.mark.parametrize(
    "config",
    [
        LLAMA | {"sliding_window": None},
        LLAMA | {"model_type": "qwen3", "sliding_window": None, "use_sliding_window": False},
        LLAMA | {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False},
        LLAMA | {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 2},
        LLAMA | {"sliding_window": 4096, "layer_types": ["full_attention"] * 2},
        LLAMA | {"mamba_d_state": 16, "layer_types": ["attention"] * 2},
        LLAMA | {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}},
        LLAMA | {"attn_type_list": [1, 1]},
    ],
)
def test_plain_models_are_accepted(config: dict[str, Any]) -> None:
    assert len(PageLayout.from_config(config).planes) == 4


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding_window 4096"),
        ({"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 1}, "sliding_window 4096"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ({"layer_types": ["conv", "full_attention"]}, "conv"),
        ({"layers_block_type": ["mamba", "attention"]}, "mamba"),
        ({"attention_chunk_size": 8192}, "attention_chunk_size"),
        ({"attention_types": [[["global", "local"], 1]]}, "local-attention"),
        ({"mamba_d_state": 16}, "mamba_d_state"),
        ({"attn_type_list": [0, 1]}, "attn_type_list"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"index_topk": 2048}, "indexer"),
        ({"num_kv_shared_layers": 1}, "num_kv_shared_layers"),
        ({"cross_attention_layers": [1]}, "cross-attention"),
        ({"use_bidirectional_attention": "all"}, "bidirectional"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic RoPE"),
        ({"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}, "longrope RoPE"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers"),
        ({"num_key_value_heads": [2, 1]}, "num_key_value_heads"),
        ({"hidden_size": 65}, "hidden_size 65"),
        ({"kv_lora_rank": 512}, "qk_rope_head_dim"),
    ],
)  # fmt: skip
def test_other_models_are_refused_with_one_sentence(change: dict[str, Any], word: str) -> None:
    for config in (LLAMA | change, {"text_config": LLAMA | change}, SimpleNamespace(**(LLAMA | change))):
        with pytest.raises(UnsupportedModel) as caught:
            PageLayout.from_config(config)
        assert word in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "specs",
    [
        [],
        [PlaneSpec(0, "k", "float16", (2, 8)), PlaneSpec(0, "k", "float16", (2, 8))],
        [PlaneSpec(1, "k", "float16", (2, 8)), PlaneSpec(0, "k", "float16", (2, 8))],
        [PlaneSpec(0, "k", "float16", (2, 0))],
        [PlaneSpec(0, "k", "float16", ())],
        [PlaneSpec(0, "k", "int4", (2, 8))],
    ],
)
def test_impossible_planes_are_errors(specs: list[PlaneSpec]) -> None:
    with pytest.raises(ValueError):
        PageLayout.from_planes(specs, page_size=16, dtype="float16", tag="test")


def test_planes_of_several_dtypes_and_a_slice_of_the_layers() -> None:
    specs = [PlaneSpec(layer, *one) for layer in (16, 17) for one in (("k", "uint8", (2, 8)), ("scale", "float32", (2,)))]
    layout = PageLayout.from_planes(specs, page_size=16, dtype="uint8", tag="test")
    assert layout.layers == (16, 17)
    assert layout.bytes_per_token == 2 * (16 + 8)
    assert layout.layer_range(17) == (16 * 24, 16 * 24)
    assert [plane.name for plane in layout.layer_planes(17)] == ["k", "scale"]
    for missing in (lambda: layout.layer_range(0), lambda: layout.plane(16, "v")):
        with pytest.raises(KeyError):
            missing()


def test_dtypes_by_name_or_from_torch() -> None:
    assert dtype_name("bfloat16") == dtype_name("torch.bfloat16") == "bfloat16"
    with pytest.raises(ValueError, match="'int4' is not supported; use one of float32"):
        dtype_name("int4")


FAMILIES = {
    "llama": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 1, "head_dim": 24},
    "gpt2": {"n_layer": 2, "n_head": 4, "n_embd": 64},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "deepseek_v3": {
        "kv_lora_rank": 32, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 24,
        "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32, "num_experts_per_tok": 2,
    },
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_layout_has_the_shapes_that_transformers_caches(family: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    size = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.CONFIG_MAPPING[family](
        **({} if "n_embd" in FAMILIES[family] else size), **FAMILIES[family], pad_token_id=0
    )
    layout = PageLayout.from_config(config, page_size=16, dtype=torch.float32)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        cached = model(torch.arange(3, 9)[None], use_cache=True).past_key_values.layers
    assert len(cached) == len(layout.layers) == 2
    for layer, states in enumerate(cached):
        found = [(tensor.shape[1], tensor.shape[3]) for tensor in (states.keys, states.values)]
        if family == "deepseek_v3":  # the latent and the rope part, side by side in one plane
            found = [(1, found[0][1] + found[1][1])]
        assert [plane.shape for plane in layout.layer_planes(layer)] == found


def test_layers_of_different_shapes_are_refused() -> None:
    transformers = pytest.importorskip("transformers")
    with pytest.raises(UnsupportedModel):
        PageLayout.from_config(transformers.CONFIG_MAPPING["gemma4_text"]())


def test_layouts_identities_and_settings_need_no_torch() -> None:
    code = "import sys, kvstrata.layout, kvstrata.identity, kvstrata.config; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert "kvstrata.config" in loaded
    assert not {"torch", "transformers", "kvstrata._core"} & set(loaded)
