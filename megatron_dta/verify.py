"""Is it equivalent? The same samples as a forest and each alone, compared on the user's own data."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from megatron_dta.control.communicator import Alone, Communicator
from megatron_dta.data.samples import Sample
from megatron_dta.engine.batch import per_sequence, term_index
from megatron_dta.engine.engine import TreeEngine
from megatron_dta.engine.flat import FlatEngine
from megatron_dta.errors import UsageError
from megatron_dta.mcore.gradients import Gradients
from megatron_dta.mcore.model import TreeModel
from megatron_dta.mcore.shards import gather_whole
from megatron_dta.rl.terms import Loss, Objective, Terms

EXACT = 1e-9
"""In fp64: log-probs absolutely, gradients relatively."""
ROUTER_EXACT = 1e-6
"""The same for a mixture of experts: a few roundings of fp32, 6e-8 each. A token routed elsewhere is off by order 1."""


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
    """Run forward and backward once on a model that this process holds whole, gradients gathered as training does."""
    gradients = Gradients(model.parts, model.transformer, distributed_optimizer=False)
    try:
        gradients.begin()
        result = engine.train_batch(samples, random_objective())
        return Pass(
            loss=result.metrics["loss"],
            logprobs=per_sequence(samples, term_index(samples), result.term_logprobs.double().cpu().numpy()),
            grads=main_grads(model, Alone()) or {},
            reuse=result.sequence_tokens / max(result.executed_tokens, 1),
        )
    finally:
        gradients.release()


def main_grads(model: TreeModel, communicator: Communicator) -> dict[str, torch.Tensor] | None:
    """Return whole parameters' main gradients by name on process 0, float64 on the CPU; None elsewhere."""
    return gather_whole(lambda shard: vars(shard.parameter)["main_grad"].double().cpu(), model, communicator)


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


def exact_tolerance(reference: Pass, *, has_experts: bool) -> Tolerance:
    """Return 1e-9 for everything: fp64. Megatron's router takes its softmax in fp32: 1e-6 with experts."""
    most = ROUTER_EXACT if has_experts else EXACT
    why = f"fp64{', routers in fp32' * has_experts}: {most:g}, log-probs and loss absolute, gradients relative"
    return Tolerance(logprob=most, loss=most, grads=dict.fromkeys(reference.grads, most), why=why)


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
    repeat: float | None = None
    """Largest relative difference of a gradient when the step is run again, if it was ..."""
    repeat_allowed: float = 0.0
    """... and what is allowed: none on a CPU."""

    @property
    def worst_parameter(self) -> str:
        """The parameter whose gradient error is largest for its tolerance; a NaN first."""
        ratios = {name: error / self.tolerance.grads[name] for name, error in self.tree.grads.items()}
        return max(ratios, key=lambda name: np.inf if np.isnan(ratios[name]) else ratios[name])

    @property
    def passed(self) -> bool:
        """Whether all differences are finite and within tolerance."""
        found = [self.tree.logprob, self.sweep, self.tree.loss, self.repeat or 0.0, *self.tree.grads.values()]
        allowed = [self.tolerance.logprob, self.tolerance.logprob, self.tolerance.loss, self.repeat_allowed]
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
    samples, trained = prepared(samples)
    model = open_(dtype)
    say(f"{len(samples)} samples, {trained:,} trained tokens: as a forest ...")
    engine = TreeEngine(model, budget=budget, backend=backend, multiple=padding, temperature=temperature)
    tree = run_pass(model, engine, samples)
    sweep = logprob_difference(engine.forward_batch(samples), tree.logprobs)
    del engine
    alone = each_alone(model, open_, samples, dtype=dtype, temperature=temperature, say=say)
    return Verdict(
        tree=difference(tree, alone.reference),
        sweep=sweep,
        tolerance=alone.tolerance(tree.reuse),
        reuse=tree.reuse,
        trained_tokens=trained,
    )


def prepared(samples: Sequence[Sample]) -> tuple[list[Sample], int]:
    """Return samples with random advantages and how many tokens they train; raise UsageError for none."""
    trained = sum(int(np.count_nonzero(s.loss_mask[1:])) for s in samples)
    if trained == 0:
        raise UsageError("no sample has a trained token, so there is nothing to compare; check loss_mask")
    return with_random_advantages(samples), trained


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Each sequence alone: the reference, and how far the same is from it in the dtype under test."""

    reference: Pass
    dtype: str
    wider: str | None
    """The reference's precision; None: that of the test itself, fp64."""
    eager: Difference | None
    has_experts: bool

    def tolerance(self, reuse: float) -> Tolerance:
        """Return what a run that computes each token `reuse` times less often is held to."""
        if self.eager is None or self.wider is None:
            return exact_tolerance(self.reference, has_experts=self.has_experts)
        return derived_tolerance(self.eager, self.reference, self.dtype, self.wider, reuse)


def each_alone(
    model: TreeModel,
    open_: Callable[[str], TreeModel],
    samples: Sequence[Sample],
    *,
    dtype: str,
    temperature: float,
    say: Callable[[str], object],
) -> Reference:
    """Run each sequence alone on a model that this process holds whole, and in low precision one precision higher."""
    say(f"... each alone in {dtype} ...")
    flat = run_pass(model, FlatEngine(model, temperature=temperature), samples)
    has_experts = model.model_config.num_experts > 0
    if dtype == "fp64":
        return Reference(reference=flat, dtype=dtype, wider=None, eager=None, has_experts=has_experts)
    wider = {"fp32": "fp64", "bf16": "fp32"}[dtype]
    say(f"... each alone in {wider}, the reference")
    weights = {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}
    del model
    gc.collect()
    wide = _with_weights(open_(wider), weights)
    reference = run_pass(wide, FlatEngine(wide, temperature=temperature), samples)
    return Reference(
        reference=reference, dtype=dtype, wider=wider, eager=difference(flat, reference), has_experts=has_experts
    )


@torch.no_grad()
def _with_weights(model: TreeModel, weights: dict[str, torch.Tensor]) -> TreeModel:
    for name, parameter in model.named_parameters():
        parameter.copy_(weights[name])
    return model
