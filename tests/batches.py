"""Small models and odd batches for tests of the engines."""

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch

from megatron_dta.checkpoint.open_model import DTYPES, TINY
from megatron_dta.data.samples import Sample
from megatron_dta.engine.base import StepResult
from megatron_dta.engine.engine import TreeEngine
from megatron_dta.engine.flat import FlatEngine
from megatron_dta.mcore import parallel
from megatron_dta.mcore.model import TreeModel, build_model
from megatron_dta.model_config import parse_model_config
from megatron_dta.rl.terms import Objective

VOCAB = 13
P = [1, 2, 3, 4, 5]

SHAPES: dict[str, list[list[int]]] = {
    "one token": [[3]],
    "two tokens": [[3, 4]],
    "chain": [list(np.arange(23) % VOCAB)],
    "duplicates": [[1, 2, 3, 4]] * 3,
    "prefixes": [[1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 3], [1, 2, 3, 4]],
    "star": [[7, *range(1, 4), k] for k in range(VOCAB)],
    "siblings": [[*P, 6, 7, 8], [*P, 9, 10, 11, 12], [*P, 9, 10, 1]],
    "comb": [[*P, *([6, 7] * turn), 8, 8, 9] for turn in range(5)],
    "caterpillar": [[*range(1, 9)[:k], 10, 11] for k in range(1, 9)],
    "several trees": [[1, 2, 3, 4], [2, 3, 4], [2, 3, 5, 6, 7], [5], [6, 6, 6, 6, 6], [1, 2, 9]],
    "ragged": [[*P, 4, 4], [*P, 4, 4, 4, 2, 2, 2, 2, 2, 2, 2, 1], [*P, 4, 6], [8, 8, 8], [*P]],
}


@cache
def tiny(family: str = "qwen3", dtype: str = "fp64", *, recompute: str = "none", tied: bool = False) -> TreeModel:
    """Build a two-layer model over `VOCAB` tokens once; tests clear its gradients."""
    raw = TINY | {"model_type": family, "vocab_size": VOCAB, "max_position_embeddings": 8192, "initializer_range": 0.3}
    device = parallel.initialize(seed=1)
    config = parse_model_config(raw | {"tie_word_embeddings": tied})
    model = build_model(config, dtype=DTYPES[dtype], device=device, recompute=recompute)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.2)
    return model


def batch(sequences: Sequence[Sequence[int]], *, seed: int = 0, p_trained: float = 0.6, **given) -> list[Sample]:
    """Make samples with random masks, rewards, old and reference log-probs; `given` replaces fields of all."""
    rng = np.random.default_rng(seed)
    samples = []
    for i, tokens in enumerate(sequences):
        mask = rng.random(len(tokens)) < p_trained
        mask[0] = False
        fields = {
            "sample_id": str(i),
            "group_id": str(i % 2),
            "trajectory_id": str(i),
            "tokens": np.array(tokens, np.int32),
            "loss_mask": mask,
            "reward": float(rng.normal()),
            "old_logprobs": -3 * rng.random(len(tokens)),
            "ref_logprobs": -3 * rng.random(len(tokens)),
        }
        samples.append(Sample(**(fields | given)))
    return samples


def trained(tokens: Sequence[int], mask: Sequence[int], name: str = "0", **given) -> Sample:
    """Make one sample with the given mask."""
    fields = {"sample_id": name, "group_id": "g", "trajectory_id": name}
    return Sample(
        tokens=np.array(tokens, np.int32), loss_mask=np.array(mask, bool), **(fields | given)
    )  # fmt: skip


def step(
    engine: TreeEngine | FlatEngine, samples: Sequence[Sample], objective: Objective
) -> tuple[StepResult, dict[str, torch.Tensor]]:
    """Run one training pass from cleared gradients; return its result and every parameter's gradient."""
    model = engine.model
    model.zero_grad(set_to_none=True)
    result = engine.train_batch(samples, objective)
    grads = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
    }  # fmt: skip
    model.zero_grad(set_to_none=True)
    return result, grads


def grad_error(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the largest |d| / max(|g|, 1e-6 |all g|) over parameters; NaN counts as infinite."""
    total = float(torch.stack([g.double().norm() for g in expected.values()]).norm())
    errors = [
        float((got[name].double() - g.double()).norm() / max(float(g.double().norm()), 1e-6 * total, 1e-300))
        for name, g in expected.items()
    ]
    return max(float("inf") if np.isnan(e) else e for e in errors)
