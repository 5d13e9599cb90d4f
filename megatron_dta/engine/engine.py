"""What an RL framework calls: train on a batch of sequences, or ask for their log-probs.

Shapes: S sequences in the caller's order, M terms.
"""

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist

from megatron_dta.attention.api import Backend, get_backend
from megatron_dta.data.samples import Sample, columns
from megatron_dta.engine.base import NO_LOSSES, Engine, StepResult, loss_grads
from megatron_dta.engine.batch import TermData, TermIndex, Totals
from megatron_dta.engine.calls import as_index
from megatron_dta.engine.executor import Executor
from megatron_dta.engine.experts import RouterLosses, finish_counts, router_losses, routings, update_expert_bias
from megatron_dta.mcore.model import TreeModel
from megatron_dta.mcore.params import Mode
from megatron_dta.mcore.routing import Routing
from megatron_dta.rl.terms import Objective
from megatron_dta.tree.budget import WHOLE
from megatron_dta.tree.cost import CostModel, default_cost
from megatron_dta.tree.deal import ShardEdges
from megatron_dta.tree.outline import build_outline
from megatron_dta.tree.pipeline import Pipeline, in_flight
from megatron_dta.tree.plan import StageProgram
from megatron_dta.tree.planner import Settings, Task, build_program, plan_batch


class TreeEngine(Engine):
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
        router_losses: RouterLosses = NO_LOSSES,
        poison_cache: bool = False,
    ):
        """Configure an engine.

        budget: most rows with gradient per chunk, padding included, or `whole`; multiple: every call's rows are
        padded to it; backend: attention backend or its name, see `default_backend`; temperature: sampling temperature
        of the rollouts; cost: what calls take on this machine, see `tree.cost`; state_limit: most cached
        states alive at once; router_losses: what a mixture of experts adds to every objective; poison_cache: fill
        unused cache rows with NaN (debugging).
        """
        super().__init__(model, temperature, router_losses)
        self.budget, self.poison_cache = budget, poison_cache
        self.multiple = model.axes.multiple(multiple)
        self.state_limit = state_limit
        name = backend or default_backend(model)
        self.backend = get_backend(name) if isinstance(name, str) else name
        axes = model.axes
        self.cost = (cost or machine_cost(model)).on(
            tensor=axes.tensor, context=axes.context, pipeline=axes.pipeline
        )  # fmt: skip
        self.pipeline = Pipeline(stages=axes.pipeline, virtual=axes.virtual)
        self._planned: tuple[bytes, StageProgram] | None = None

    @property
    def settings(self) -> Settings:
        """What plans of this engine have to fit, on one replica."""
        return Settings(
            cost=self.cost,
            budget=self.budget,
            multiple=self.multiple,
            in_flight=in_flight(self.pipeline),
            state_limit=self.state_limit,
        )

    def program(self, task: Task, samples: Sequence[Sample]) -> StageProgram:
        """Build what this stage runs of a task, from the task's samples."""
        return build_program(
            task, *columns(samples), multiple=self.multiple, pipeline=self.pipeline, stage=self.model.groups.stage
        )

    def plan(self, samples: Sequence[Sample]) -> StageProgram:
        """Return the plan of a batch; the last one is kept, for sweeps and inner epochs over the same content."""
        content = columns(samples)
        key = _content(*content, self.budget, self.multiple)
        if self._planned is None or self._planned[0] != key:
            (task,) = plan_batch(build_outline(*content), self.settings).tasks
            self._planned = (key, self.program(task, samples))
        return self._planned[1]

    def _train(self, samples, data: TermData, objective: Objective, plan, on_last_backward) -> StepResult:
        plan, totals = plan or self.plan(samples), Totals()
        routed = routings(self.model, plan.forest.multiplicity, data.scope.num_tokens, self.router_losses)

        def chunk_loss(edges: ShardEdges, logprobs, entropies):
            leaves = logprobs.requires_grad_(), entropies.requires_grad_()
            term_edge = as_index(edges.term_edge, logprobs.device)
            edge_source = as_index(edges.edge_source, logprobs.device)
            chosen = as_index(edges.terms, logprobs.device)
            terms = data.terms(chosen, leaves[0][term_edge], leaves[1][edge_source[term_edge]])
            return loss_grads(objective, terms, leaves, totals)

        runs = data.scope.num_terms > 0  # of the whole step: a rank without a term runs with the others
        if runs:
            if self.router_losses.aux_coef > 0:  # its gradient needs the load of all experts
                self._executor(plan, Mode.SWEEP, routed).run(lambda edges, logprobs, entropies: (logprobs, None))
                finish_counts(routed)
            self._executor(plan, Mode.TRAIN, routed, on_last_backward).run(chunk_loss)
            if self.router_losses.z_coef > 0:
                finish_counts(routed)
            update_expert_bias(self.model, routed)
        first = plan.plans[0]
        return StepResult(
            totals=(totals if self.model.groups.tp.rank() == 0 else Totals()).numbers(),
            scope=data.scope,
            num_terms=data.num_terms,
            sequence_tokens=int(plan.forest.lengths.sum()),
            executed_tokens=plan.forest.num_tokens if runs else 0,
            pushed_tokens=first.num_pushed if runs else 0,
            router_losses=router_losses(self.model, routed) if runs else {},
            term_logprobs=self._over_processes(data.logprobs),
        )

    def _score(self, samples, index: TermIndex, plan: StageProgram | None) -> np.ndarray:
        plan = plan or self.plan(samples)
        wide = torch.promote_types(self.model.dtype, torch.float32)
        found = torch.zeros(len(plan.forest.edges), dtype=wide, device=self.model.device)

        def keep(edges: ShardEdges, logprobs, entropies):
            found[as_index(edges.edges, found.device)] = logprobs
            return logprobs, None

        routed = routings(self.model, plan.forest.multiplicity, len(plan.forest.tokens), RouterLosses())
        if plan.plans[0].chunks:
            self._executor(plan, Mode.SWEEP, routed).run(keep)
        return self._over_processes(found).double().cpu().numpy()[plan.forest.term_edge]

    def _over_processes(self, found: torch.Tensor) -> torch.Tensor:
        """Give every process of the replica what one of them has found; the others have zeros there."""
        for group in (self.model.groups.cp, self.model.groups.pp):
            if group.size() > 1:
                dist.all_reduce(found, group=group)
        return found

    def _executor(
        self,
        plan: StageProgram,
        mode: Mode,
        routed: Sequence[Routing | None],
        on_last_backward: Callable[[int], None] | None = None,
    ) -> Executor:
        return Executor(
            self.model,
            plan,
            mode,
            backend=self.backend,
            temperature=self.temperature,
            routings=routed,
            on_last_backward=on_last_backward,
            poison=self.poison_cache,
        )


def default_backend(model: TreeModel) -> str:
    """Return `flash4` for half precision on CUDA, which is all it computes, and `segment` for everything else."""
    is_half = model.dtype in (torch.bfloat16, torch.float16)
    return "flash4" if model.device.type == "cuda" and is_half else "segment"


def machine_cost(model: TreeModel) -> CostModel:
    """Return the shipped cost of a model on the kind of machine that it is on."""
    return default_cost(model.model_config, "h200" if model.device.type == "cuda" else "cpu")


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
