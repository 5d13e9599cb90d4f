"""The model's shape, read from a Hugging Face config.json; what tree training cannot do exactly is refused by name."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dta.errors import UsageError

FAMILIES = ("qwen2", "qwen3", "llama", "qwen3_moe")


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3's frequency scaling."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What a decoder of the families Qwen2.5, Qwen3, Qwen3-MoE and Llama 2 / 3.x needs, in one vocabulary."""

    family: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tied: bool
    """Input embedding and output layer share one weight."""
    qk_norm: bool
    qkv_bias: bool
    init_std: float
    max_positions: int
    """Longest position the model was made for; longer sequences are refused."""
    num_experts: int = 0
    """0: a dense model; else every layer has experts in place of its MLP, and `ffn_size` is that of no layer."""
    experts_per_token: int = 0
    expert_ffn_size: int = 0
    norm_topk_prob: bool = True
    """Weights of the chosen experts sum to one."""


def read_model_config(path: str | Path) -> ModelConfig:
    """Read a config.json, or the one in a folder; raise UsageError for what is missing, unknown or unsupported."""
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    try:
        raw = json.loads(file.read_text())
    except OSError as error:
        raise UsageError(f"{file}: cannot read the model config ({error.strerror})") from None
    except ValueError as error:
        raise UsageError(f"{file}: not valid JSON ({error})") from None
    if not isinstance(raw, dict):
        raise UsageError(f"{file}: expected a JSON object, got {type(raw).__name__}")
    try:
        return parse_model_config(raw)
    except UsageError as error:
        raise UsageError(f"{file}: {error}") from None


def parse_model_config(raw: dict[str, Any]) -> ModelConfig:
    """Translate the keys of a Hugging Face config; raise UsageError naming the option that is not supported."""
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise UsageError(f"model_type is {family!r}; supported are {', '.join(FAMILIES)}")
    _refuse(raw, family)
    num_heads = _positive(raw, "num_attention_heads")
    hidden_size = _positive(raw, "hidden_size")
    num_kv_heads = _positive(raw, "num_key_value_heads", num_heads if family == "llama" else None)
    if num_heads % num_kv_heads:
        raise UsageError(f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}")
    rope = _rope(raw)
    return ModelConfig(
        family=family,
        num_layers=_positive(raw, "num_hidden_layers"),
        hidden_size=hidden_size,
        ffn_size=_positive(raw, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=_head_size(raw, family, hidden_size, num_heads),
        vocab_size=_positive(raw, "vocab_size"),
        norm_eps=_number(raw, "rms_norm_eps", 1e-6),
        rope_theta=_number(rope, "rope_theta", 10000.0),
        rope_scaling=_rope_scaling(rope),
        tied=bool(raw.get("tie_word_embeddings", False)),
        qk_norm=family in ("qwen3", "qwen3_moe"),
        qkv_bias=family == "qwen2",
        init_std=_number(raw, "initializer_range", 0.02),
        max_positions=_positive(raw, "max_position_embeddings"),
        **(_experts(raw) if family == "qwen3_moe" else {}),
    )


def _experts(raw: dict[str, Any]) -> dict[str, Any]:
    """Read the experts; transformers 5 writes their number as `num_local_experts`."""
    local = raw.get("num_local_experts")
    num_experts = _positive(raw, "num_experts", local)
    if local not in (None, num_experts):
        raise UsageError(f"num_experts is {num_experts}, num_local_experts {local!r}; give one of them")
    per_token = _positive(raw, "num_experts_per_tok")
    if per_token > num_experts:
        raise UsageError(f"num_experts_per_tok is {per_token}; expected at most num_experts, {num_experts}")
    normalised = raw.get("norm_topk_prob", False)
    if not isinstance(normalised, bool):
        raise UsageError(f"norm_topk_prob is {normalised!r}; expected true or false")
    if normalised and per_token == 1:
        raise UsageError(
            "norm_topk_prob = True with num_experts_per_tok = 1 is not supported: the weight is always one, so the "
            "router would get no gradient; set norm_topk_prob to false, or more experts per token"
        )
    return {
        "num_experts": num_experts,
        "experts_per_token": per_token,
        "expert_ffn_size": _positive(raw, "moe_intermediate_size"),
        "norm_topk_prob": normalised,
    }


def _head_size(raw: dict[str, Any], family: str, hidden_size: int, num_heads: int) -> int:
    """Hugging Face defaults: 128 for Qwen3, else the hidden size shared out evenly."""
    if raw.get("head_dim") is not None:
        head_size = _positive(raw, "head_dim")
    elif family == "qwen3":
        head_size = 128
    elif hidden_size % num_heads:
        raise UsageError(f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}")
    else:
        head_size = hidden_size // num_heads
    if head_size % 2:
        raise UsageError(f"head_dim is {head_size}; rotary embedding needs an even number")
    return head_size


def _rope(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary keys as one dictionary: transformers 5 writes it so, a base beside it counts for one inside."""
    given = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        raise UsageError(f"rope_parameters is {given!r}; expected one object of numbers, the same for every layer")
    if given.get("partial_rotary_factor", 1.0) != 1.0:
        raise UsageError(f"partial_rotary_factor = {given['partial_rotary_factor']!r} is not supported; {_REMEDY}")
    return {"rope_theta": raw.get("rope_theta"), **given}


def _rope_scaling(rope: dict[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise UsageError(f"rope_scaling type {kind!r} is not supported; use 'default' or 'llama3'")
    return RopeScaling(
        factor=_number(rope, "factor"),
        low_freq_factor=_number(rope, "low_freq_factor"),
        high_freq_factor=_number(rope, "high_freq_factor"),
        original_max_positions=_positive(rope, "original_max_position_embeddings"),
    )


def _refuse(raw: dict[str, Any], family: str) -> None:
    """Name the first option under which shared tokens would not train exactly as each rollout alone."""
    layer_types = raw.get("layer_types") or []
    refused = {
        "hidden_act": raw.get("hidden_act", "silu") != "silu",
        "use_sliding_window": bool(raw.get("use_sliding_window")),
        "layer_types": any(kind != "full_attention" for kind in layer_types),
        "sliding_window": raw.get("sliding_window") is not None and "use_sliding_window" not in raw,
        "attention_bias": bool(raw.get("attention_bias")),
        "mlp_bias": bool(raw.get("mlp_bias")),
        "alibi": bool(raw.get("alibi")),
        "num_nextn_predict_layers": bool(raw.get("num_nextn_predict_layers")),
        "partial_rotary_factor": raw.get("partial_rotary_factor", 1.0) != 1.0,
        "use_mrope": bool(raw.get("use_mrope")),
        "decoder_sparse_step": raw.get("decoder_sparse_step", 1) != 1,
        **{name: bool(value) for name, value in raw.items() if "dropout" in name or "pdrop" in name},
        **{name: bool(raw.get(name)) for name in _OFF},
        **{name: bool(raw.get(name)) for name in _NUM_EXPERTS if family != "qwen3_moe"},
    }
    for name, is_refused in refused.items():
        if is_refused:
            raise UsageError(f"{name} = {raw.get(name)!r} is not supported in tree training; {_REMEDY}")


_OFF = (
    *("attention_sinks", "attention_sink", "mlp_only_layers"),
    *(
        "shared_expert_intermediate_size",
        "n_shared_experts",
        "num_shared_experts",
        "moe_shared_expert_intermediate_size",
    ),
    *("peft_type", "adapters", "quantization_config"),
)
_NUM_EXPERTS = ("num_experts", "num_local_experts")
_REMEDY = (
    "use a full-attention decoder without dropout, sliding window, biases outside q/k/v, MTP or adapters, either dense "
    "or a qwen3_moe with routed experts alone in every layer"
)


def _positive(raw: dict[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key, default)
    if value is None and default is not None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{key} is {value!r}; expected a positive whole number")
    return value


def _number(raw: dict[str, Any], key: str, default: float | None = None) -> float:
    value = default if raw.get(key) is None else raw[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise UsageError(f"{key} is {value!r}; expected a positive number")
    return float(value)
