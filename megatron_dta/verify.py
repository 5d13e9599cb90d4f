"""Is it equivalent? The same samples as a forest and each alone, compared on the user's own data."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from megatron_dta.data.samples import Sample
from megatron_dta.engine.batch import per_sequence, term_index
from megatron_dta.engine.engine import FlatEngine, TreeEngine
from megatron_dta.engine.optimizer import gather_into
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
    grads: dict[str, float]
    """By parameter: |d| / max(|g|, 1e-6 |all g|)."""

    @property
    def grad(self) -> float:
        """The largest of `grads`; NaN if one is."""
        return float(np.max(list(self.grads.values())))


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
    """Run forward and backward once, gradients gathered in at least fp32 as training does; `.grad` is empty after."""
    model.zero_grad(set_to_none=True)
    grads, hooks = {}, []
    for name, p in model.named_parameters():
        grads[name] = torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32))
        hooks.append(p.register_post_accumulate_grad_hook(gather_into(grads[name])))
    try:
        result = engine.train_batch(samples, random_objective())
    finally:
        for hook in hooks:
            hook.remove()
    return Pass(
        loss=result.metrics["loss"],
        logprobs=per_sequence(samples, term_index(samples), result.term_logprobs.double().cpu().numpy()),
        grads={name: grad.detach().double().cpu() for name, grad in grads.items()},
        reuse=result.sequence_tokens / max(result.executed_tokens, 1),
    )


def logprob_difference(a: list[np.ndarray], reference: list[np.ndarray]) -> float:
    """Return the largest absolute difference; NaN where only one side has a number."""
    far = [np.abs(x - y)[~(np.isnan(x) & np.isnan(y))] for x, y in zip(a, reference)]
    return float(np.max(np.concatenate(far), initial=0.0))


def difference(a: Pass, reference: Pass) -> Difference:
    """Compare two passes over the same samples."""
    total = float(torch.stack([g.norm() for g in reference.grads.values()]).norm())
    least = max(1e-6 * total, torch.finfo(torch.float64).tiny)
    return Difference(
        logprob=logprob_difference(a.logprobs, reference.logprobs),
        loss=abs(a.loss - reference.loss),
        grads={
            name: float((a.grads[name] - g).norm()) / max(float(g.norm()), least) for name, g in reference.grads.items()
        },
    )


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """What each part of a difference may be at most."""

    logprob: float
    loss: float
    grads: dict[str, float]
    why: str


def exact_tolerance(reference: Pass) -> Tolerance:
    """Return 1e-9 for everything: fp64."""
    why = f"fp64: {EXACT:g}, log-probs and loss absolute, gradients relative"
    return Tolerance(logprob=EXACT, loss=EXACT, grads=dict.fromkeys(reference.grads, EXACT), why=why)


def derived_tolerance(eager: Difference, reference: Pass, dtype: str, wider: str, reuse: float) -> Tolerance:
    """Return twice the error that each sequence alone has in the same dtype, plus one rounding.

    Gradients get a factor sqrt(reuse) more: n sequences alone round a shared token n times independently, which adds
    up to sqrt(n) roundings, while a forest rounds it once and weighs it n times. A parameter may always be as far off
    as the median one: a small tensor can be lucky alone. The loss is a mean of log-probs with weights of order one.
    """
    eps = torch.finfo({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]).eps
    scored = np.concatenate(reference.logprobs)
    logprob = 2 * eager.logprob + eps * float(np.max(np.abs(scored[~np.isnan(scored)]), initial=0.0))
    typical = float(np.median(list(eager.grads.values())))
    grads = {name: 2 * reuse**0.5 * max(error, typical) + eps for name, error in eager.grads.items()}
    why = (
        f"{dtype}: twice the distance of each sequence alone ({dtype} to {wider}), for gradients times the square root "
        "of the reuse, plus one rounding"
    )
    return Tolerance(logprob=logprob, loss=logprob, grads=grads, why=why)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The comparison and the tolerance it was held to."""

    tree: Difference
    """Tree against the reference: each sequence alone."""
    sweep: float
    """Largest difference between the forest's log-probs without and with gradient; 0 where kernels repeat."""
    tolerance: Tolerance
    reuse: float
    trained_tokens: int

    @property
    def worst_parameter(self) -> str:
        """The parameter whose gradient error is largest for its tolerance; a NaN first."""
        ratios = {name: error / self.tolerance.grads[name] for name, error in self.tree.grads.items()}
        return max(ratios, key=lambda name: np.inf if np.isnan(ratios[name]) else ratios[name])

    @property
    def passed(self) -> bool:
        """Whether all differences are finite and within tolerance."""
        found = [self.tree.logprob, self.sweep, self.tree.loss, *self.tree.grads.values()]
        allowed = [self.tolerance.logprob, self.tolerance.logprob, self.tolerance.loss]
        allowed += [self.tolerance.grads[name] for name in self.tree.grads]
        return all(np.isfinite(f) and f <= a for f, a in zip(found, allowed))


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
    may be at most as far from it as `derived_tolerance` says of the sequences alone in the same precision. Raises
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
        reference, tolerance = flat, exact_tolerance(flat)
    else:
        wider = {"fp32": "fp64", "bf16": "fp32"}[dtype]
        say(f"... each alone in {wider}, the reference")
        weights = {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}
        del model, engine
        gc.collect()
        reference_model = _with_weights(open_(wider), weights)
        reference = run_pass(reference_model, FlatEngine(reference_model, temperature=temperature), samples)
        tolerance = derived_tolerance(difference(flat, reference), reference, dtype, wider, tree.reuse)
    return Verdict(
        tree=difference(tree, reference),
        sweep=sweep,
        tolerance=tolerance,
        reuse=tree.reuse,
        trained_tokens=trained,
    )


@torch.no_grad()
def _with_weights(model: TreeModel, weights: dict[str, torch.Tensor]) -> TreeModel:
    for name, parameter in model.named_parameters():
        parameter.copy_(weights[name])
    return model
