"""What both engines share: checks, results, the objective over a part of the step.

Shapes: S sequences in the caller's order, M terms.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron_dta.data.samples import Sample
from megatron_dta.engine.batch import (
    Scope,
    TermData,
    TermIndex,
    Totals,
    check_arrays,
    merged_metrics,
    per_sequence,
    scope_of,
    term_index,
)
from megatron_dta.engine.executor import Grads
from megatron_dta.engine.experts import RouterLosses
from megatron_dta.errors import UsageError
from megatron_dta.mcore.model import TreeModel
from megatron_dta.rl.terms import Objective, Terms
from megatron_dta.tree.plan import StageProgram


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one pass over a batch did."""

    totals: dict[str, Any]
    """Sums and maxima of the objective's numbers over this process's terms; see `merged_metrics`.

    Where several processes hold a model they add up over all processes: each term is counted on one of them.
    """
    scope: Scope
    num_terms: int
    """Trained tokens, counted once per sequence that trains them."""
    sequence_tokens: int
    executed_tokens: int
    """Tokens computed with gradient, padding excluded."""
    pushed_tokens: int
    """Tokens whose forward ran once more, without gradient."""
    router_losses: dict[str, float]
    """Losses of this process's routers in the whole step; they add up over all processes, and are not in `totals`."""
    term_logprobs: torch.Tensor
    """[M], on the device; `engine.batch.per_sequence` gives every sample its own."""

    @property
    def metrics(self) -> dict[str, float]:
        """`loss`, means over trained tokens, and maxima: of the step, or of this process's share of it."""
        return merged_metrics([self.totals], self.scope.num_terms)


NO_LOSSES = RouterLosses()


class Engine(ABC):
    """What both engines share: checks, the objective over a part of the step, results in the caller's order."""

    def __init__(self, model: TreeModel, temperature: float, router_losses: RouterLosses):
        router_losses.check(model)
        self.router_losses = router_losses
        if not (math.isfinite(temperature) and temperature > 0):
            raise UsageError(f"temperature is {temperature}; expected a positive number")
        self.model, self.temperature = model, temperature

    def train_batch(
        self,
        samples: Sequence[Sample],
        objective: Objective,
        *,
        scope: Scope | None = None,
        plan: StageProgram | None = None,
        on_last_backward: Callable[[int], None] | None = None,
    ) -> StepResult:
        """Add the gradient of the objective over all samples to the model's parameters; return the step's metrics.

        The gradient is that of running every sample alone. A batch without a trained token adds nothing. Where several
        processes hold the model, all of them call this with the same samples. scope: what the whole step holds, where
        other replicas train the rest of it; metrics are this process's share then. plan: of these samples, made
        elsewhere. on_last_backward: called with the number of a model part before its last backward of this batch.
        Raises UsageError for samples that the model or the objective cannot take; nothing has been computed then.
        """
        index = self.check(samples)
        frozen = next((name for name, p in self.model.named_parameters() if not p.requires_grad), None)
        if frozen is not None:
            raise UsageError(f"parameter {frozen} is frozen; tree training needs every parameter to be trainable")
        wide = torch.promote_types(self.model.dtype, torch.float32)
        self._check_plan(samples, index, plan)
        data = TermData(samples, index, objective, scope or scope_of(samples), wide, self.model.device)
        return self._train(samples, data, objective, plan, on_last_backward)

    def forward_batch(self, samples: Sequence[Sample], *, plan: StageProgram | None = None) -> list[np.ndarray]:
        """Return every sample's log-probs, float64 [length]: entry t is the log-prob of token t given those before.

        Entry 0 and the entries of tokens outside the loss mask are NaN: nothing scored them.
        """
        index = self.check(samples)
        self._check_plan(samples, index, plan)
        return per_sequence(samples, index, self._score(samples, index, plan))

    @staticmethod
    def _check_plan(samples: Sequence[Sample], index: TermIndex, plan: StageProgram | None) -> None:
        """Raise UsageError for a plan that was made for other sequences, or in another order."""
        if plan is None:
            return
        forest = plan.forest
        same = len(samples) == forest.num_sequences
        same = same and all(s.tokens is t or np.array_equal(s.tokens, t) for s, t in zip(samples, forest.sequences))
        same = same and np.array_equal(index.sequence, forest.term_sequence)
        if not (same and np.array_equal(index.position, forest.term_position)):
            raise UsageError("the plan was made for other samples, or for these in another order: plan them again")

    def check(self, samples: Sequence[Sample]) -> TermIndex:
        """Return where the terms are; raise UsageError for samples that the model cannot take."""
        config = self.model.model_config
        for s in samples:
            check_arrays(s)
            if len(s.tokens) > config.max_positions:
                raise UsageError(
                    f"sample {s.sample_id}: {len(s.tokens)} tokens; the model has {config.max_positions} positions"
                )
            if s.tokens.min() < 0 or s.tokens.max() >= config.vocab_size:
                bad = s.tokens[(s.tokens < 0) | (s.tokens >= config.vocab_size)][0]
                raise UsageError(
                    f"sample {s.sample_id}: token id {bad}; the model's ids are 0 .. {config.vocab_size - 1}"
                )
        return term_index(samples)

    @abstractmethod
    def _train(
        self,
        samples: Sequence[Sample],
        data: TermData,
        objective: Objective,
        plan: StageProgram | None,
        on_last_backward: Callable[[int], None] | None,
    ) -> StepResult: ...

    @abstractmethod
    def _score(self, samples: Sequence[Sample], index: TermIndex, plan: StageProgram | None) -> np.ndarray: ...


def loss_grads(objective: Objective, terms: Terms, leaves, totals: Totals) -> Grads:
    """Evaluate the objective on a part of the step and differentiate it by edge log-probs and source entropies.

    Without a use of the entropies their gradient is None, which spares the head work; log-probs always have one, so
    that a backward runs also where no term depends on the model. An objective never sees a part without terms.
    """
    if not len(terms.logprobs):
        return torch.zeros_like(leaves[0]), None
    loss = objective(terms)
    totals.add(loss)
    grads = (None, None)
    if loss.value.requires_grad:
        grads = torch.autograd.grad(loss.value, leaves, allow_unused=True)
    return torch.zeros_like(leaves[0]) if grads[0] is None else grads[0], grads[1]
