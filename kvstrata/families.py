"""What a model's config says about its KV states: the widths that each layer stores per token, or why we do not support it."""

from collections.abc import Iterator, Mapping
from typing import Any

# Where a config keeps the kinds of its layers, and the kinds whose K and V can be reused page by page.
LAYER_KINDS = ("layer_types", "layers_block_type", "block_types")
FULL_ATTENTION = {"full_attention", "attention"}

# Settings that only models with recurrent or convolutional layers have; looked at where no list of layer kinds says more.
RECURRENT = (
    "state_size",
    "ssm_state_size",
    "ssm_cfg",
    "mamba_d_state",
    "mamba_d_ssm",
    "attn_layer_period",
    "hybrid_override_pattern",
    "linear_num_value_heads",
    "linear_attn_config",
    "lru_width",
    "conv_L_cache",
    "attention_hidden_size",  # RWKV
)

KEEPS_LESS = "are not supported yet: they do not keep K and V of every token"

# These change the keys of a prefix when the request grows past a length, and in transformers depend on the requests before.
LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope", "su"}

# Names of the same thing in configs that are older than the common ones.
ALIASES = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_kv_heads", "n_head_kv", "multi_query_group_num"),
    "head_dim": ("kv_channels", "dim_head"),
    "hidden_size": ("n_embd", "d_model"),
}

# The part of a multimodal or wrapped config that describes the language model.
TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config", "decoder", "generator")


class UnsupportedModel(ValueError):
    """The KV states of this model cannot be reused page by page (yet); the text is one sentence that says why."""


class _Config:
    """One way to read a dict, a plain object or a transformers config; a missing value is None."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def __getitem__(self, name: str) -> Any:
        for known in (name, *ALIASES.get(name, ())):
            if isinstance(self._source, Mapping):
                value = self._source.get(known)
            else:
                try:
                    value = getattr(self._source, known, None)
                except RuntimeError as error:  # transformers refuses to answer for the whole model where layers differ
                    raise UnsupportedModel(f"{self['model_type']}: layers that differ in {known} are not supported yet") from error
            if value is not None:
                return value
        return None

    def count(self, name: str) -> int:
        value = self[name]
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        said = "does not give" if value is None else f"gives {value!r} for"
        raise UnsupportedModel(f"{self['model_type'] or 'model'}: the config {said} {name}, which must be one positive number")


def kv_widths(config: Any) -> list[dict[str, tuple[int, ...]]]:
    """For each layer the planes it stores, in the order of the row: name -> width of one token.

    `config`: a transformers config, or a dict or object with the same names; wrappers of multimodal models are opened. Raises
    UnsupportedModel.
    """
    model = _language_model(_Config(config))
    for reason in _refusals(model):
        raise UnsupportedModel(f"{model['model_type'] or 'model'}: {reason}")
    layers = model.count("num_hidden_layers")
    if model["kv_lora_rank"] is not None:
        return [{"latent": (1, model.count("kv_lora_rank") + model.count("qk_rope_head_dim"))}] * layers
    heads = _kv_heads(model)
    key = _head_dim(model)
    value = key if model["v_head_dim"] is None else model.count("v_head_dim")
    return [{"k": (heads, key), "v": (heads, value)}] * layers


def _language_model(config: _Config) -> _Config:
    if config["is_encoder_decoder"]:
        return config  # refused as a whole; its decoder alone would look like a causal model
    for part in TEXT_PARTS:
        inner = config[part]
        if inner is not None and not isinstance(inner, str | int | bool):
            return _language_model(_Config(inner))
    return config


def _kv_heads(model: _Config) -> int:
    nested = model["attn_config"]  # DBRX and MPT
    if nested is not None and _Config(nested)["kv_n_heads"] is not None:
        return _Config(nested).count("kv_n_heads")
    if model["new_decoder_architecture"]:  # Falcon 40B and later cache K and V of every query head
        return model.count("num_attention_heads")
    if model["multi_query"]:  # Falcon 7B, StarCoder
        return 1
    return model.count("num_key_value_heads" if model["num_key_value_heads"] is not None else "num_attention_heads")


def _head_dim(model: _Config) -> int:
    if model["head_dim"] is not None:
        return model.count("head_dim")
    hidden, heads = model.count("hidden_size"), model.count("num_attention_heads")
    if hidden % heads:
        raise UnsupportedModel(
            f"{model['model_type'] or 'model'}: no head_dim, and hidden_size {hidden} is not a multiple of {heads} attention heads"
        )
    return hidden // heads


def _refusals(model: _Config) -> Iterator[str]:
    """Reasons why pages of this model would be wrong or incomplete."""
    if model["is_encoder_decoder"]:
        yield "encoder-decoder models are not supported: their cross-attention states depend on another input"
    if model["index_topk"] is not None or model["index_n_heads"] is not None:
        yield "models with a sparse-attention indexer (DSA) are not supported yet: indexer keys are not stored"
    if model["num_kv_shared_layers"]:
        yield "models whose layers share K and V (num_kv_shared_layers) are not supported yet"
    if model["cross_attention_layers"]:
        yield "models with cross-attention layers are not supported: their states depend on another input"
    if model["use_bidirectional_attention"] in (True, "all"):
        yield "models with bidirectional attention are not supported: the states of a prefix depend on what follows it"
    for rope in _rope_kinds(model["rope_parameters"] or model["rope_scaling"]):
        if rope in LENGTH_DEPENDENT_ROPE:
            yield f"{rope} RoPE is not supported: it changes with the length of a request, so a longer one needs other keys"
    kinds = next((model[name] for name in LAYER_KINDS if isinstance(model[name], list | tuple)), None)
    if kinds is not None:  # what transformers goes by, too: the settings of kinds that do not occur say nothing
        for kind in kinds:
            if kind not in FULL_ATTENTION:
                yield f"layers of the kind {kind!r} {KEEPS_LESS}"
        return
    for name in RECURRENT:
        if model[name]:
            yield f"recurrent or convolutional layers ({name}) {KEEPS_LESS}"
    if 0 in (model["attn_type_list"] or ()):  # MiniMax
        yield f"linear-attention layers (attn_type_list) {KEEPS_LESS}"
    if model["attention_chunk_size"]:
        yield f"chunked-attention layers (attention_chunk_size {model['attention_chunk_size']}) {KEEPS_LESS}"
    if "local" in str(model["attention_types"]):  # GPT-Neo
        yield f"local-attention layers (attention_types) {KEEPS_LESS}"
    if model["sliding_window"] and model["use_sliding_window"] is not False:
        # Qwen: the first max_window_layers layers use full attention. Elsewhere a window means that every layer has it.
        full = (model["max_window_layers"] or 0) if model["use_sliding_window"] else 0
        if full < model.count("num_hidden_layers"):
            yield f"sliding-window layers (sliding_window {model['sliding_window']}) {KEEPS_LESS}"


def _rope_kinds(rope: Any) -> Iterator[str]:
    """The kinds in a RoPE setting, which may hold one setting per kind of layer."""
    if not isinstance(rope, Mapping):
        return
    yield str(rope.get("rope_type") or rope.get("type") or "default")
    for inner in rope.values():
        yield from _rope_kinds(inner)
