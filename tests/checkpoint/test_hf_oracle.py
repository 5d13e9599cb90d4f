"""Transformers' own models are the oracle: the same weights give the same log-probs, gradients and files."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from megatron_dta.checkpoint.hf_files import hf_state, save_hf
from megatron_dta.checkpoint.hf_names import mappings
from megatron_dta.checkpoint.open_model import open_model
from megatron_dta.data.samples import Sample
from megatron_dta.engine.engine import TreeEngine
from megatron_dta.engine.flat import FlatEngine
from megatron_dta.mcore.head import _logits, _operand, edge_logprobs
from megatron_dta.rl import objectives

VOCAB, PADDED = 1003, 1024
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
"""With base 5e5 and head size 16, wavelength 6 is kept, 32 is blended, 167 and longer ones are stretched."""
SCALED = LLAMA3 | {"rope_theta": 5e5}
THETA = {"rope_type": "default", "rope_theta": 1e6}
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen2": lambda: Qwen2Config(**COMMON),
    "qwen2 tied, head size 16": lambda: Qwen2Config(**COMMON, head_dim=16, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**COMMON, head_dim=16, rope_parameters=THETA),
    "qwen3 tied": lambda: Qwen3Config(**COMMON, head_dim=16, rope_parameters=THETA, tie_word_embeddings=True),
    "qwen3, one kv head": lambda: Qwen3Config(**COMMON | {"num_key_value_heads": 1}, head_dim=16),
    "llama3 scaling": lambda: LlamaConfig(**COMMON, head_dim=16, rope_parameters=dict(SCALED)),
    "llama3 scaling, old keys": lambda: LlamaConfig(**COMMON, head_dim=16, rope_parameters=dict(SCALED)),
    "llama without head_dim": lambda: LlamaConfig(**COMMON, rms_norm_eps=1e-2),
    "llama tied, 4 kv heads": lambda: LlamaConfig(**COMMON | {"num_key_value_heads": 4}, tie_word_embeddings=True),
}
ENGINES: dict[str, Callable] = {
    "flat": FlatEngine,
    "whole": TreeEngine,
    "16": lambda model: TreeEngine(model, budget=16, poison_cache=True),
}
OLD_KEYS: dict[str, dict] = {
    "llama without head_dim": {"head_dim": None},
    "llama3 scaling, old keys": {"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": LLAMA3},
}
"""Keys of config.json as files from before transformers 5 have them; None: absent."""
every_model = pytest.mark.parametrize("name", CONFIGS)


def random_hf(name: str) -> torch.nn.Module:
    """Build a random model; transformers starts biases at 0 and norms at 1, which would hide a lost one."""
    torch.manual_seed(list(CONFIGS).index(name))
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="sdpa").eval()
    for key, parameter in model.named_parameters():
        if key.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.5)
        elif "norm" in key:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Callable[[str], tuple[torch.nn.Module, Path]]:
    """Return a function from a config's name to the transformers model and the folder it saved, made once."""
    made: dict[str, tuple[torch.nn.Module, Path]] = {}

    def make(name: str) -> tuple[torch.nn.Module, Path]:
        if name not in made:
            model, folder = random_hf(name), tmp_path_factory.mktemp("hf")
            model.save_pretrained(folder)
            file = folder / "config.json"
            raw = json.loads(file.read_text()) | OLD_KEYS.get(name, {})
            file.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))
            made[name] = model, folder
        return made[name]

    return make


def some_samples() -> list[Sample]:
    """Two branch points, 16 tokens being fewer than the shared prefix, and a sequence of its own; all trained."""
    rng = np.random.default_rng(0)
    prefix, middle, *tails = (rng.integers(0, VOCAB, size) for size in (30, 13, 9, 17, 5, 7))
    paths = [[prefix, middle, tails[0]], [prefix, middle, tails[1]], [prefix, tails[2]], [tails[3]]]
    paths[0][-1][0] = VOCAB - 1
    return [one_sample(np.concatenate(path), str(i)) for i, path in enumerate(paths)]


def one_sample(tokens: np.ndarray, name: str = "0") -> Sample:
    return Sample(
        sample_id=name,
        group_id="g",
        trajectory_id=name,
        tokens=tokens.astype(np.int32),
        loss_mask=np.arange(len(tokens)) > 0,
    )


def hf_logprobs(model: torch.nn.Module, tokens: np.ndarray) -> torch.Tensor:
    """Return the log-probs of tokens 1 .. of one unpadded sequence."""
    ids = torch.from_numpy(tokens.astype(np.int64))
    logits = model(ids[None]).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]


def norms_in_own_dtype(model: torch.nn.Module) -> None:
    """Compute RMS norms in the model's dtype; transformers rounds their inputs to fp32."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = lambda x, m=module: (
                m.weight * x * (x.square().mean(-1, keepdim=True) + m.variance_epsilon).rsqrt()
            )


@every_model
def test_logprobs_equal_transformers(name, checkpoint):
    """E02, E04, E06: fp32, each sequence alone, as one chunk, and cut below its prefix; |log-prob| is about 8."""
    hf, folder = checkpoint(name)
    model, _ = open_model(hf_folder=str(folder), dtype="fp32")
    samples = some_samples()
    with torch.no_grad():
        expected = [hf_logprobs(hf, s.tokens).numpy() for s in samples]
    for engine in ENGINES.values():
        for got, want in zip(engine(model).forward_batch(samples), expected):
            assert np.isnan(got[0])
            np.testing.assert_allclose(got[1:], want, rtol=0, atol=1e-5)


def test_rope_scaling_matters_here(checkpoint):
    """The comparison above would notice a model that ignores llama3 scaling."""
    hf, folder = checkpoint("llama3 scaling")
    plain = AutoModelForCausalLM.from_pretrained(folder, rope_parameters=THETA | {"rope_theta": 5e5})
    tokens = some_samples()[0].tokens
    with torch.no_grad():
        difference = (hf_logprobs(hf, tokens) - hf_logprobs(plain, tokens)).abs()
    assert difference.max() > 0.1


def gradient_errors(hf: torch.nn.Module, folder: Path, engine: Callable) -> dict[str, float]:
    """Return |d| / |g| per transformers parameter, of the mean log-likelihood of one sequence, in fp64."""
    model, _ = open_model(hf_folder=str(folder), dtype="fp64")
    sample = some_samples()[1]
    engine(model).train_batch([sample], objectives.sft())
    (-hf_logprobs(hf, sample.tokens).mean()).backward()
    expected = {key: p.grad for key, p in hf.named_parameters()}
    got, parameters = {}, dict(model.named_parameters())
    for mapping in mappings(model.model_config):
        got.update(zip(mapping.hf, mapping.split(parameters[mapping.megatron].grad)))
    assert got.keys() == expected.keys()
    return {key: float((got[key] - g).norm() / g.norm()) for key, g in expected.items()}


@pytest.mark.parametrize("engine", ["flat", "16"])
@every_model
def test_gradients_equal_transformers_autograd(name, engine, checkpoint):
    """E06: every parameter, fp64, relative.

    Rotary angles are fp32 on both sides, by the same operations, so they are equal. What transformers computes in
    fp32 even for an fp64 model are its norms: with those in fp64 only fp64 rounding remains. One rounding is 1.1e-16;
    sums of at most 1,003 terms through two layers, enlarged where terms cancel, stay below a thousand of them.
    """
    folder = checkpoint(name)[1]
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    norms_in_own_dtype(hf)
    errors = gradient_errors(hf, folder, ENGINES[engine])
    assert max(errors.values()) < 1e-13, errors


@every_model
def test_gradients_equal_unchanged_transformers(name, checkpoint):
    """The same against the library as it is: five norms in a row, each 6e-8 off, enlarged where terms cancel."""
    folder = checkpoint(name)[1]
    errors = gradient_errors(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64), folder, FlatEngine)
    assert max(errors.values()) < 5e-6, errors


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@every_model
def test_weights_out_and_in_are_bit_equal(name, dtype, checkpoint, tmp_path):
    """E02, E04: same keys, bits, rows and config as the source, and transformers reads them back."""
    hf, folder = checkpoint(name)
    source = folder
    if dtype == "bf16":
        hf, source = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16), tmp_path / "bf16"
        hf.save_pretrained(source)
    model, raw = open_model(hf_folder=str(source), dtype=dtype)
    save_hf(model, tmp_path / "out", raw)
    before, after = (load_file(f / "model.safetensors") for f in (source, tmp_path / "out"))
    assert after.keys() == before.keys()
    assert ("lm_head.weight" in after) != hf.config.tie_word_embeddings
    assert after["model.embed_tokens.weight"].shape == (VOCAB, COMMON["hidden_size"])
    for key, tensor in before.items():
        assert after[key].dtype == tensor.dtype
        assert torch.equal(after[key], tensor), key
    configs = [json.loads((f / "config.json").read_text()) for f in (source, tmp_path / "out")]
    assert configs[0] == configs[1]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.from_numpy(some_samples()[0].tokens.astype(np.int64))[None]
    with torch.no_grad():
        assert torch.equal(again(ids).logits, hf(ids).logits)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["qwen3", "qwen3 tied"])
def test_padded_vocabulary_has_no_part(name, engine, checkpoint):
    """E04: rows 1003 .. 1023 change no bit of a log-prob or of a file, and their gradient is exactly 0."""
    model, _ = open_model(hf_folder=str(checkpoint(name)[1]), dtype="fp32")
    samples, make = some_samples(), ENGINES[engine]
    before, state = make(model).forward_batch(samples), hf_state(model)
    embedding = dict(model.named_parameters())["embedding.word_embeddings.weight"]
    weights = {id(w): w for w in (model.output_weight(), embedding)}
    assert len(weights) == (1 if "tied" in name else 2)
    for weight in weights.values():
        assert weight.shape[0] == PADDED
        weight.data[VOCAB:] = 100.0
    for a, b in zip(make(model).forward_batch(samples), before):
        np.testing.assert_array_equal(a, b)
    assert all(torch.equal(hf_state(model)[key], tensor) for key, tensor in state.items())
    make(model).train_batch(samples, objectives.sft())
    for weight in weights.values():
        assert weight.grad[:VOCAB].any()
        assert not weight.grad[VOCAB:].any()


def test_bf16_logits_are_not_rounded_to_bf16():
    """B05: sums of 512 products of integers up to 8 are exact in fp32 and need up to 16 bits; bf16 has 8."""
    torch.manual_seed(0)
    hidden, weight = (torch.randint(-8, 9, (rows, 512)) for rows in (37, PADDED))
    exact = (hidden @ weight[:VOCAB].T).double()
    logits = _logits(hidden.bfloat16(), _operand(weight.bfloat16(), VOCAB), 1.0)
    assert logits.dtype == torch.float32
    assert torch.equal(logits.double(), exact)
    assert not torch.equal(logits.bfloat16().double(), exact)


def test_bf16_loss_is_fp32():
    """B05: log-probs and entropies of bf16 hidden states are fp32, and log-probs are right to fp32 rounding."""
    torch.manual_seed(1)
    hidden, weight = (torch.randint(-1, 2, (rows, 512)).bfloat16() for rows in (8, PADDED))
    target = torch.randint(0, VOCAB, (8,))
    logprobs, entropies = edge_logprobs(
        hidden, weight, torch.arange(8), target, temperature=1.0, vocab_size=VOCAB
    )  # fmt: skip
    assert logprobs.dtype == entropies.dtype == torch.float32
    expected = (hidden.double() @ weight[:VOCAB].double().T).log_softmax(-1)[torch.arange(8), target]
    assert expected.abs().min() > 8
    torch.testing.assert_close(logprobs.double(), expected, rtol=4 * torch.finfo(torch.float32).eps, atol=0)
