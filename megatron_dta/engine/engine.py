"""What an RL framework calls: train on a batch of sequences, or ask for their log-probs.

Shapes: S sequences in the caller's order, M terms.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron_dta.attention.api import Backend, get_backend
from megatron_dta.data.samples import Sample, columns
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
from megatron_dta.engine.executor import Executor, Grads, as_index, backward
from megatron_dta.errors import UsageError
from megatron_dta.mcore.head import edge_logprobs
from megatron_dta.mcore.model import TreeModel
from megatron_dta.mcore.params import Mode
from megatron_dta.rl.terms import Objective, Terms
from megatron_dta.tree.budget import WHOLE
from megatron_dta.tree.cost import CostModel, default_cost
from megatron_dta.tree.outline import build_outline
from megatron_dta.tree.plan import Chunk, Plan
from megatron_dta.tree.planner import Settings, build_plan, plan_batch


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one pass over a batch did."""

    totals: dict[str, Any]
    """Sums and maxima of the objective's numbers over this rank's terms; see `merged_metrics`."""
    scope: Scope
    num_terms: int
    """Trained tokens, counted once per sequence that trains them."""
    sequence_tokens: int
    executed_tokens: int
    """Tokens computed with gradient, padding excluded."""
    pushed_tokens: int
    """Tokens whose forward ran once more, without gradient."""
    term_logprobs: torch.Tensor
    """[M], on the device; `engine.batch.per_sequence` gives every sample its own."""

    @property
    def metrics(self) -> dict[str, float]:
        """`loss`, means over trained tokens, and maxima: of the step, or of this rank's share of it."""
        return merged_metrics([self.totals], self.scope.num_terms)


class _Engine:
    """What both engines share: checks, the objective over a part of the step, results in the caller's order."""

    def __init__(self, model: TreeModel, temperature: float):
        if not (math.isfinite(temperature) and temperature > 0):
            raise UsageError(f"temperature is {temperature}; expected a positive number")
        self.model, self.temperature = model, temperature

    def train_batch(
        self,
        samples: Sequence[Sample],
        objective: Objective,
        *,
        scope: Scope | None = None,
        plan: Plan | None = None,
    ) -> StepResult:
        """Add the gradient of the objective over all samples to the model's parameters; return the step's metrics.

        The gradient is that of running every sample alone. A batch without a trained token adds nothing. scope: what
        the whole step holds, where other ranks train the rest of it; metrics are this rank's share then. plan: of
        these samples, made elsewhere. Raises UsageError for samples that the model or the objective cannot take;
        nothing has been computed then.
        """
        index = self.check(samples)
        frozen = next((name for name, p in self.model.named_parameters() if not p.requires_grad), None)
        if frozen is not None:
            raise UsageError(f"parameter {frozen} is frozen; tree training needs every parameter to be trainable")
        weight = self.model.output_weight()
        wide = torch.promote_types(weight.dtype, torch.float32)
        self._check_plan(samples, index, plan)
        data = TermData(samples, index, objective, scope or scope_of(samples), wide, weight.device)
        return self._train(samples, data, objective, plan)

    def forward_batch(self, samples: Sequence[Sample], *, plan: Plan | None = None) -> list[np.ndarray]:
        """Return every sample's log-probs, float64 [length]: entry t is the log-prob of token t given those before.

        Entry 0 and the entries of tokens outside the loss mask are NaN: nothing scored them.
        """
        index = self.check(samples)
        self._check_plan(samples, index, plan)
        return per_sequence(samples, index, self._score(samples, index, plan))

    @staticmethod
    def _check_plan(samples: Sequence[Sample], index: TermIndex, plan: Plan | None) -> None:
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

    def _train(self, samples: Sequence[Sample], data: TermData, objective: Objective, plan: Plan | None) -> StepResult:
        raise NotImplementedError

    def _score(self, samples: Sequence[Sample], index: TermIndex, plan: Plan | None) -> np.ndarray:
        raise NotImplementedError


class TreeEngine(_Engine):
    """Computes each distinct token of a batch once."""

    def __init__(
        self,
        model: TreeModel,
        *,
        budget: int | str = WHOLE,
        multiple: int = 1,
        backend: Backend | str | None = None,
        temperature: float = 1.0,
        cost: CostModel | None = None,
        state_limit: int | None = None,
        poison_cache: bool = False,
    ):
        """Configure an engine.

        budget: most rows with gradient per chunk, padding included, or `whole`; multiple: every call's rows are
        padded to it; backend: attention backend or its name, see `default_backend`; temperature: sampling temperature
        of the rollouts; cost: what calls take on this machine, see `tree.cost`; state_limit: most cached
        states alive at once; poison_cache: fill unused cache rows with NaN (debugging).
        """
        super().__init__(model, temperature)
        self.budget, self.multiple, self.poison_cache = budget, multiple, poison_cache
        self.state_limit = state_limit
        name = backend or default_backend(model.output_weight())
        self.backend = get_backend(name) if isinstance(name, str) else name
        self.cost = cost or machine_cost(model)
        self._planned: tuple[bytes, Plan] | None = None

    @property
    def settings(self) -> Settings:
        """What plans of this engine have to fit, on one rank."""
        return Settings(
            cost=self.cost, budget=self.budget, multiple=self.multiple, state_limit=self.state_limit
        )  # fmt: skip

    def plan(self, samples: Sequence[Sample]) -> Plan:
        """Return the plan of a batch; the last one is kept, for sweeps and inner epochs over the same content."""
        content = columns(samples)
        key = _content(*content, self.budget, self.multiple)
        if self._planned is None or self._planned[0] != key:
            (task,) = plan_batch(build_outline(*content), self.settings).tasks
            self._planned = (key, build_plan(task, *content, multiple=self.multiple))
        return self._planned[1]

    def _train(self, samples, data: TermData, objective: Objective, plan: Plan | None) -> StepResult:
        plan, totals = plan or self.plan(samples), Totals()

        def chunk_loss(chunk: Chunk, logprobs, entropies):
            leaves = logprobs.requires_grad_(), entropies.requires_grad_()
            term_edge = as_index(chunk.term_edge, logprobs.device)
            edge_source = as_index(chunk.edge_source, logprobs.device)
            terms = data.terms(
                as_index(chunk.terms, logprobs.device), leaves[0][term_edge], leaves[1][edge_source[term_edge]]
            )
            return _loss_grads(objective, terms, leaves, totals)

        runs = data.scope.num_terms > 0  # of the whole step: a rank without a term runs with the others
        if runs:
            self._executor(plan, Mode.TRAIN).run(chunk_loss)
        return StepResult(
            totals=totals.numbers(),
            scope=data.scope,
            num_terms=data.num_terms,
            sequence_tokens=int(plan.forest.lengths.sum()),
            executed_tokens=plan.forest.num_tokens if runs else 0,
            pushed_tokens=plan.num_pushed if runs else 0,
            term_logprobs=data.logprobs,
        )

    def _score(self, samples, index: TermIndex, plan: Plan | None) -> np.ndarray:
        plan = plan or self.plan(samples)
        edges = np.full(len(plan.forest.edges), np.nan)

        def keep(chunk: Chunk, logprobs, entropies):
            edges[chunk.edges] = logprobs.cpu().numpy()
            return logprobs, None

        if plan.chunks:
            self._executor(plan, Mode.SWEEP).run(keep)
        return edges[plan.forest.term_edge]

    def _executor(self, plan: Plan, mode: Mode) -> Executor:
        return Executor(
            self.model, plan, mode, backend=self.backend, temperature=self.temperature, poison=self.poison_cache
        )


class FlatEngine(_Engine):
    """Runs every sequence alone, unpadded, with stock causal attention: what `TreeEngine` must equal."""

    def __init__(self, model: TreeModel, *, temperature: float = 1.0):
        super().__init__(model, temperature)

    def _train(self, samples, data: TermData, objective: Objective, plan: Plan | None) -> StepResult:
        totals, executed = Totals(), 0
        for sample, terms in self._parts(samples):
            logprobs, entropies = self._sequence(sample)
            leaves = logprobs.detach().requires_grad_(), entropies.detach().requires_grad_()
            grads = _loss_grads(objective, data.terms(terms, *leaves), leaves, totals)
            backward((logprobs, entropies), grads)
            executed += len(sample.tokens)
        return StepResult(
            totals=totals.numbers(),
            scope=data.scope,
            num_terms=data.num_terms,
            sequence_tokens=sum(len(s.tokens) for s in samples),
            executed_tokens=executed,
            pushed_tokens=0,
            term_logprobs=data.logprobs,
        )

    def _score(self, samples, index: TermIndex, plan: Plan | None) -> np.ndarray:
        logprobs = np.full(len(index.sequence), np.nan)
        with torch.no_grad():
            for sample, terms in self._parts(samples):
                logprobs[terms] = self._sequence(sample)[0].cpu().numpy()
        return logprobs

    def _parts(self, samples):
        """Yield (sample, its slice of the terms), for samples that train a token."""
        start = 0
        for sample in samples:
            stop = start + int(np.count_nonzero(sample.loss_mask[1:]))
            if stop > start:
                yield sample, slice(start, stop)
            start = stop

    def _sequence(self, sample: Sample) -> tuple[torch.Tensor, torch.Tensor]:
        weight = self.model.output_weight()
        tokens = torch.from_numpy(sample.tokens.astype(np.int64)).to(weight.device)
        positions = torch.arange(len(tokens), device=weight.device)
        hidden = self.model(tokens[None], positions[None], None)[0]
        target = as_index(np.flatnonzero(sample.loss_mask[1:]) + 1, weight.device)
        return edge_logprobs(
            hidden[target - 1],
            weight,
            torch.arange(len(target), device=weight.device),
            tokens[target],
            temperature=self.temperature,
            vocab_size=self.model.model_config.vocab_size,
        )


def _loss_grads(objective: Objective, terms: Terms, leaves, totals: Totals) -> Grads:
    """Evaluate the objective on a part of the step and differentiate it by edge log-probs and source entropies.

    Without a use of the entropies their gradient is None, which spares the head work; log-probs always have one, so
    that a backward runs also where no term depends on the model.
    """
    loss = objective(terms)
    if len(terms.logprobs):
        totals.add(loss)
    grads = (None, None)
    if loss.value.requires_grad:
        grads = torch.autograd.grad(loss.value, leaves, allow_unused=True)
    return torch.zeros_like(leaves[0]) if grads[0] is None else grads[0], grads[1]


def default_backend(weight: torch.Tensor) -> str:
    """Return `flash4` for half precision on CUDA, which is all it computes, and `segment` for everything else."""
    return "flash4" if weight.is_cuda and weight.dtype in (torch.bfloat16, torch.float16) else "segment"


def machine_cost(model: TreeModel) -> CostModel:
    """Return the shipped cost of a model on the kind of machine that it is on."""
    return default_cost(model.model_config, "h200" if model.output_weight().is_cuda else "cpu")


def _content(*parts) -> bytes:
    """Return a digest of lists of arrays and of plain values."""
    digest = hashlib.blake2b()
    for part in parts:
        for value in part if isinstance(part, list) else [part]:
            is_array = isinstance(value, np.ndarray)
            digest.update(f"{value.dtype}{value.shape}".encode() if is_array else repr(value).encode())
            if is_array:
                digest.update(np.ascontiguousarray(value).data)
    return digest.digest()
