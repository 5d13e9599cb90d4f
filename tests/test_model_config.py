"""Hugging Face configs: read as transformers reads them, or refused with the name of the key."""

import json
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from megatron_dta.errors import UsageError
from megatron_dta.model_config import ModelConfig, RopeScaling, parse_model_config, read_model_config

BASE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 1003,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "initializer_range": 0.01,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)
FAMILIES = ("qwen2", "qwen3", "llama")
"""Dense ones."""
EXPERTS: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
}


def parse(**changes) -> ModelConfig:
    """Parse the base config with changes; `...` takes a key away."""
    return parse_model_config({key: value for key, value in (BASE | changes).items() if value is not ...})


def test_every_key_is_read():
    assert parse(head_dim=32, rope_scaling=LLAMA3) == ModelConfig(
        family="llama",
        num_layers=3,
        hidden_size=96,
        ffn_size=160,
        num_heads=6,
        num_kv_heads=2,
        head_size=32,
        vocab_size=1003,
        norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=SCALING,
        tied=True,
        qk_norm=False,
        qkv_bias=False,
        init_std=0.01,
        max_positions=512,
    )


def test_families_differ_in_norms_and_biases():
    assert [(parse(model_type=f).qk_norm, parse(model_type=f).qkv_bias) for f in FAMILIES] == [
        (False, True),
        (True, False),
        (False, False),
    ]


def test_config_is_frozen():
    with pytest.raises(FrozenInstanceError):
        parse().head_size = 1  # type: ignore[misc]


REFUSED: dict[str, Any] = {
    "attention_dropout": 0.1,
    "hidden_dropout": 0.1,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "resid_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "attn_pdrop": 0.1,
    "use_sliding_window": True,
    "sliding_window": 4096,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "alibi": True,
    "attention_sinks": True,
    "attention_sink": 4,
    "num_nextn_predict_layers": 1,
    "mlp_only_layers": [0],
    "decoder_sparse_step": 2,
    "shared_expert_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 64,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "peft_type": "LORA",
    "adapters": {"a": "b"},
    "quantization_config": {"bits": 4},
    "mlp_bias": True,
    "attention_bias": True,
    "hidden_act": "gelu",
    "partial_rotary_factor": 0.5,
    "use_mrope": True,
}


@pytest.mark.parametrize("family", [*FAMILIES, "qwen3_moe"])
@pytest.mark.parametrize("key", REFUSED)
def test_a40_option_is_refused_by_name(key, family):
    with pytest.raises(UsageError, match=rf"^{key} ") as error:
        parse(
            **EXPERTS | {"model_type": family, "num_experts": 8 if family == "qwen3_moe" else None, key: REFUSED[key]}
        )
    assert "full-attention decoder" in str(error.value), "the message has a remedy"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_a40_experts_in_a_dense_family_are_refused(key, family):
    with pytest.raises(UsageError, match=rf"^{key} = 8 .*qwen3_moe"):
        parse(model_type=family, **{key: 8})


def test_experts_are_read():
    config = parse(**EXPERTS)
    assert config == replace(
        parse(model_type="qwen3"),
        family="qwen3_moe",
        head_size=16,  # transformers' default: the hidden size shared out
        num_experts=8,
        experts_per_token=2,
        expert_ffn_size=48,
        norm_topk_prob=True,
    )
    off = {"mlp_only_layers": [], "decoder_sparse_step": 1, "shared_expert_intermediate_size": 0}
    assert parse(**EXPERTS, **off) == config
    assert not parse(**EXPERTS | {"norm_topk_prob": ...}).norm_topk_prob, "as transformers reads it"
    assert parse(model_type="qwen3").num_experts == 0


def test_transformers_5_calls_the_number_of_experts_local():
    config = parse(**EXPERTS)
    assert parse(**EXPERTS | {"num_experts": ..., "num_local_experts": 8}) == config
    assert parse(**EXPERTS, num_local_experts=8) == config
    with pytest.raises(UsageError, match="num_experts is 8, num_local_experts 4"):
        parse(**EXPERTS, num_local_experts=4)


@pytest.mark.parametrize("key", ["num_experts", "num_experts_per_tok", "moe_intermediate_size"])
@pytest.mark.parametrize("value", [..., 0, -1, 2.0, True], ids=repr)
def test_sizes_of_experts_are_positive_whole_numbers(value, key):
    with pytest.raises(UsageError, match=rf"^{key} is .*positive whole number"):
        parse(**EXPERTS | {key: value})


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9; expected at most num_experts, 8"),
        ({"norm_topk_prob": 1}, "norm_topk_prob is 1; expected true or false"),
        ({"num_experts_per_tok": 1}, "norm_topk_prob = True with num_experts_per_tok = 1 .*no gradient"),
    ],
)
def test_a40_bad_experts_are_refused(changes, told):
    with pytest.raises(UsageError, match=told):
        parse(**EXPERTS | changes)
    assert parse(**EXPERTS | {"num_experts_per_tok": 1, "norm_topk_prob": False}).experts_per_token == 1


OFF: dict[str, Any] = {
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "sliding_window": None,
    "layer_types": ["full_attention"] * 3,
    "alibi": False,
    "num_nextn_predict_layers": 0,
    "num_experts": None,
    "mlp_bias": False,
    "attention_bias": False,
    "hidden_act": "silu",
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}


@pytest.mark.parametrize("key", OFF)
def test_a40_option_that_is_off_is_no_reason_to_refuse(key):
    assert parse(**{key: OFF[key]}) == parse()


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a40_window_that_is_not_used(family):
    """Qwen files carry a window size, but no layer uses it."""
    raw = {"use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 28}
    assert parse(model_type=family, **raw) == parse(model_type=family)


@pytest.mark.parametrize("key", ["rope_type", "type"])
@pytest.mark.parametrize("where", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind", ["yarn", "dynamic", "linear", "longrope", "su"])
def test_a40_rope_scaling_is_refused_by_name(kind, where, key):
    with pytest.raises(UsageError, match=f"rope_scaling type '{kind}'.*'llama3'"):
        parse(**{where: {key: kind, "factor": 2.0, "rope_theta": 1e4}})


def test_a40_part_of_a_head_rotated_is_refused_in_the_new_place():
    with pytest.raises(UsageError, match="partial_rotary_factor"):
        parse(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5})


def test_a40_rope_by_layer_type_is_refused():
    by_type = {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}
    with pytest.raises(UsageError, match="rope_parameters"):
        parse(rope_theta=..., rope_parameters=by_type)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scaling", [{"rope_type": "default"}, LLAMA3], ids=["default", "llama3"])
@pytest.mark.parametrize("theta", ["inside", "outside"])
def test_rope_parameters_are_read_like_the_old_keys(theta, scaling, family):
    """Transformers 5 writes one dictionary; it takes a base given beside it for the one inside."""
    old = parse(model_type=family, rope_scaling=scaling)
    inside = {"rope_theta": 500000.0} if theta == "inside" else {}
    new = parse(
        model_type=family,
        rope_theta=... if theta == "inside" else 500000.0,
        rope_parameters=scaling | inside,
    )
    assert new == old
    assert new.rope_theta == 500000.0


@pytest.mark.parametrize("scaling", [None, {"rope_type": "default"}, {"type": "default"}])
def test_no_rope_scaling(scaling):
    assert parse(rope_scaling=scaling).rope_scaling is None


REQUIRED = [key for key, value in BASE.items() if isinstance(value, int) and not isinstance(value, bool)]


@pytest.mark.parametrize("key", REQUIRED)
@pytest.mark.parametrize("value", [..., None, "8", 8.0, 0, -1, True, [8]], ids=repr)
def test_sizes_are_positive_whole_numbers(value, key):
    with pytest.raises(UsageError, match=f"^{key} is .*expected a positive whole number"):
        parse(model_type="qwen3", **{key: value})


@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta", "initializer_range"])
@pytest.mark.parametrize("value", ["fast", [1.0], -1.0], ids=repr)
def test_numbers_are_numbers(value, key):
    with pytest.raises(UsageError, match=key):
        parse(**{key: value})


@pytest.mark.parametrize("key", [key for key in LLAMA3 if key != "rope_type"])
@pytest.mark.parametrize("value", [..., "x"], ids=repr)
def test_llama3_scaling_needs_every_number(value, key):
    scaling = {k: v for k, v in (LLAMA3 | {key: value}).items() if v is not ...}
    with pytest.raises(UsageError, match=key):
        parse(rope_scaling=scaling)


@pytest.mark.parametrize("value", ["llama3", [LLAMA3]], ids=["text", "list"])
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_rope_scaling_is_an_object(key, value):
    with pytest.raises(UsageError, match="rope"):
        parse(**{key: value})


@pytest.mark.parametrize("value", [None, "gpt2", "mixtral", ["llama"], {}], ids=repr)
def test_unknown_family_names_the_known_ones(value):
    with pytest.raises(UsageError, match=r"model_type is .*supported are qwen2, qwen3, llama"):
        parse(model_type=value)


@pytest.mark.parametrize(
    ("family", "given", "expected"),
    [("qwen3", ..., 128), ("qwen3", None, 128), ("qwen2", ..., 16), ("llama", ..., 16), ("llama", None, 16)]
    + [(family, 24, 24) for family in FAMILIES],
)
def test_e06_head_size(family, given, expected):
    assert parse(model_type=family, head_dim=given).head_size == expected


def test_e06_heads_that_do_not_divide():
    with pytest.raises(UsageError, match=r"num_attention_heads 6 .*num_key_value_heads 4"):
        parse(num_key_value_heads=4)
    with pytest.raises(UsageError, match=r"hidden_size 100 .*num_attention_heads 6"):
        parse(hidden_size=100)
    with pytest.raises(UsageError, match="head_dim is 15"):
        parse(head_dim=15)


def test_llama_without_kv_heads_has_as_many_as_query_heads():
    assert parse(num_key_value_heads=...).num_kv_heads == parse(num_key_value_heads=None).num_kv_heads == 6


def test_a_folder_or_its_file_may_be_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    assert read_model_config(tmp_path) == read_model_config(tmp_path / "config.json") == parse()


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"3", b"\xff\xfe", b'{"model_type": "t5"}', b'{"hidden_size": 3}'])
def test_errors_name_the_file(text, tmp_path):
    file = tmp_path / "config.json"
    file.write_bytes(text)
    with pytest.raises(UsageError, match=f"^{file}: "):
        read_model_config(file)


@pytest.mark.parametrize("name", ["absent.json", "."])
def test_absent_file(name, tmp_path):
    with pytest.raises(UsageError, match=r"cannot read the model config"):
        read_model_config(tmp_path / name)


def real_configs(data_dir: Path, *, supported: bool) -> list[Path]:
    files = sorted((data_dir / "hf_configs").glob("*.json"))
    families = (*FAMILIES, "qwen3_moe")
    return [f for f in files if (json.loads(f.read_text())["model_type"] in families) == supported]


def test_e18_real_configs_mean_what_transformers_reads(data_dir):
    """Its own class is the reference: defaults, head size, rotary base and scaling."""
    files = real_configs(data_dir, supported=True)
    assert len(files) == 15
    for file in files:
        ours, theirs = read_model_config(file), AutoConfig.from_pretrained(file)
        rope = theirs.rope_parameters
        head_size = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
        assert (ours.head_size, ours.num_kv_heads) == (head_size, theirs.num_key_value_heads), file
        assert (ours.rope_theta, ours.norm_eps, ours.tied) == (
            rope["rope_theta"],
            theirs.rms_norm_eps,
            theirs.tie_word_embeddings,
        ), file
        assert (ours.rope_scaling is not None) == (rope["rope_type"] == "llama3"), file
        assert (ours.vocab_size, ours.max_positions) == (theirs.vocab_size, theirs.max_position_embeddings), file
        if ours.num_experts:
            assert (ours.num_experts, ours.experts_per_token, ours.expert_ffn_size, ours.norm_topk_prob) == (
                theirs.num_experts,
                theirs.num_experts_per_tok,
                theirs.moe_intermediate_size,
                theirs.norm_topk_prob,
            ), file


def test_a40_other_real_configs_are_refused_by_name(data_dir):
    files = real_configs(data_dir, supported=False)
    kinds = {json.loads(file.read_text())["model_type"]: file for file in files}
    assert kinds.keys() == {"qwen3_next", "qwen3_5", "qwen3_5_moe"}
    for kind, file in kinds.items():
        with pytest.raises(UsageError, match=f"{file.name}: model_type is '{kind}'; supported are qwen2"):
            read_model_config(file)
