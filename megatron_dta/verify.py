"""Is it equivalent? The same samples as a forest and each alone, compared on the user's own data."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from megatron_dta.data.samples import Sample
from megatron_dta.engine.batch import per_sequence, term_index
from megatron_dta.engine.engine import FlatEngine, TreeEngine
from megatron_dta.errors import UsageError
from megatron_dta.mcore.model import TreeModel
from megatron_dta.rl.terms import Loss, Objective, Terms

EXACT = 1e-9
"""In fp64: log-probs absolutely, gradients relatively."""


@dataclass(frozen=True, kw_only=True)
class Pass:
    """Outcome of one way to run the samples; gradients by parameter name, on the CPU."""

    loss: float
    logprobs: list[np.ndarray]
    grads: dict[str, torch.Tensor]
    reuse: float


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How far one pass is from another."""

    logprob: float
    """Largest absolute difference."""
    loss: float
    grad: float
    """Largest over parameters of |d| / max(|g|, 1e-6 |all g|)."""
    worst_parameter: str


def random_objective() -> Objective:
    """Build a loss in which every term has a weight of its own and entropies count: no two terms can be swapped."""

    def loss(terms: Terms) -> Loss:
        return Loss(value=terms.weighted_sum(-terms.advantages * terms.logprobs - 0.1 * terms.entropies))

    return Objective(name="random", function=loss, needs_advantages=True)


def with_random_advantages(samples: Sequence[Sample], seed: int = 0) -> list[Sample]:
    """Give every token of every sample a normal advantage drawn from `seed`."""
    rng = np.random.default_rng(seed)
    return [replace(s, advantage=rng.normal(size=len(s.tokens))) for s in samples]


def run_pass(model: TreeModel, engine: TreeEngine | FlatEngine, samples: Sequence[Sample]) -> Pass:
    """Run forward and backward once; the model's gradients are cleared after."""
    model.zero_grad(set_to_none=True)
    result = engine.train_batch(samples, random_objective())
    grads = {name: _grad(p) for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return Pass(
        loss=result.metrics["loss"],
        logprobs=per_sequence(samples, term_index(samples), result.term_logprobs.double().cpu().numpy()),
        grads=grads,
        reuse=result.sequence_tokens / max(result.executed_tokens, 1),
    )


def logprob_difference(a: list[np.ndarray], reference: list[np.ndarray]) -> float:
    """Return the largest absolute difference; NaN where only one side has a number.

    Entries that are NaN in the reference were not scored, and `np.max` keeps a NaN of the other side.
    """
    far = [np.abs(x - y)[~np.isnan(y)] for x, y in zip(a, reference)]
    return float(np.max(np.concatenate(far), initial=0.0))


def difference(a: Pass, reference: Pass) -> Difference:
    """Compare two passes over the same samples."""
    total = float(torch.stack([g.norm() for g in reference.grads.values()]).norm())
    errors = {
        name: float((a.grads[name] - g).norm() / max(float(g.norm()), 1e-6 * total, torch.finfo(g.dtype).tiny))
        for name, g in reference.grads.items()
    }
    worst = max(errors, key=lambda name: errors[name])
    if not all(np.isfinite(list(errors.values()))):
        worst = next(name for name, error in errors.items() if not np.isfinite(error))
    return Difference(
        logprob=logprob_difference(a.logprobs, reference.logprobs),
        loss=abs(a.loss - reference.loss),
        grad=errors[worst],
        worst_parameter=worst,
    )


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The comparison and the tolerance it was held to."""

    tree: Difference
    """Tree against the reference: each sequence alone."""
    sweep: float
    """Largest difference between the forest's log-probs without and with gradient; 0 where kernels repeat."""
    logprob_tolerance: float
    grad_tolerance: float
    why: str
    reuse: float
    trained_tokens: int

    @property
    def passed(self) -> bool:
        """Whether all differences are finite and within tolerance."""
        logprobs_fit = all(found <= self.logprob_tolerance for found in (self.tree.logprob, self.sweep))
        return logprobs_fit and self.tree.grad <= self.grad_tolerance


def verify(
    open_: Callable[[str], TreeModel],
    samples: Sequence[Sample],
    *,
    dtype: str,
    budget: int | str,
    backend: str | None = None,
    padding: int = 1,
    temperature: float = 1.0,
    say: Callable[[str], object] = lambda message: None,
) -> Verdict:
    """Run samples as a forest and each alone and compare.

    open_: opens the model in a given dtype; the reference takes over the weights as `dtype` rounds them. In fp64 both
    runs must agree to 1e-9. In fp32 and bf16 the reference is each sequence alone one precision higher; the forest
    may be at most twice as far from it as the sequences alone are in the same precision, plus one rounding. Raises
    UsageError if no token is trained: nothing would be compared.
    """
    samples = with_random_advantages(samples)
    trained = sum(int(np.count_nonzero(s.loss_mask[1:])) for s in samples)
    if trained == 0:
        raise UsageError("no sample has a trained token, so there is nothing to compare; check loss_mask")
    model = open_(dtype)
    say(f"{len(samples)} samples, {trained:,} trained tokens: as a forest ...")
    engine = TreeEngine(model, budget=budget, backend=backend, multiple=padding, temperature=temperature)
    tree = run_pass(model, engine, samples)
    sweep = logprob_difference(engine.forward_batch(samples), tree.logprobs)
    say(f"... each alone in {dtype} ...")
    flat = run_pass(model, FlatEngine(model, temperature=temperature), samples)
    if dtype == "fp64":
        tolerances, reference = (EXACT, EXACT), flat
        why = f"fp64: {EXACT:g} for log-probs (absolute) and gradients (relative)"
    else:
        wider = {"fp32": "fp64", "bf16": "fp32"}[dtype]
        say(f"... each alone in {wider}, the reference")
        weights = {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}
        del model, engine
        gc.collect()
        reference_model = _with_weights(open_(wider), weights)
        reference = run_pass(reference_model, FlatEngine(reference_model, temperature=temperature), samples)
        eager = difference(flat, reference)
        eps = {"fp32": torch.finfo(torch.float32).eps, "bf16": torch.finfo(torch.bfloat16).eps}[dtype]
        largest = max(float(np.nanmax(np.abs(lp), initial=0.0, where=~np.isnan(lp))) for lp in reference.logprobs)
        tolerances = (2 * eager.logprob + eps * largest, 2 * eager.grad + eps)
        why = f"{dtype}: twice the distance of each sequence alone ({dtype} to {wider}), plus one rounding"
    return Verdict(
        tree=difference(tree, reference),
        sweep=sweep,
        logprob_tolerance=tolerances[0],
        grad_tolerance=tolerances[1],
        why=why,
        reuse=tree.reuse,
        trained_tokens=trained,
    )


@torch.no_grad()
def _with_weights(model: TreeModel, weights: dict[str, torch.Tensor]) -> TreeModel:
    for name, parameter in model.named_parameters():
        parameter.copy_(weights[name])
    return model


def _grad(parameter: torch.nn.Parameter) -> torch.Tensor:
    grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return grad.detach().double().cpu()
