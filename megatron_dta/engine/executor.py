"""Run the static operation list of a plan: pushes, forwards, backwards, frees, in the order that the plan gives.

Shapes: R rows of a call, E edges and M terms of a chunk, h hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron_dta.attention.api import Backend
from megatron_dta.attention.mask import tree_mask
from megatron_dta.engine.cache import ArenaCache
from megatron_dta.mcore.head import edge_logprobs
from megatron_dta.mcore.model import TreeModel
from megatron_dta.mcore.params import Mode, TreeParams
from megatron_dta.tree.plan import Call, Chunk, Kind, Operation, Plan, Push

Grads = tuple[torch.Tensor, torch.Tensor | None]
"""Gradients of the loss for edge log-probs [E] and source entropies; None: the loss does not use them."""

ChunkLoss = Callable[[Chunk, torch.Tensor, torch.Tensor], Grads]
"""(chunk, detached edge log-probs [E], detached source entropies) -> gradients for both."""


def backward(outputs: tuple[torch.Tensor, torch.Tensor], grads: Grads) -> None:
    """Start a backward from edge log-probs and, where the loss uses them, entropies."""
    used = [(output, grad) for output, grad in zip(outputs, grads) if grad is not None]
    torch.autograd.backward([output for output, _ in used], [grad for _, grad in used])


@dataclass(frozen=True, kw_only=True, eq=False)
class _InFlight:
    """A chunk between its forward and its backward."""

    outputs: tuple[torch.Tensor, torch.Tensor]
    grads: Grads


def as_index(rows: np.ndarray | None, device: torch.device) -> torch.Tensor:
    """Put an index array of the plan on a device, int64."""
    return torch.from_numpy(np.asarray(rows, np.int64)).to(device)


class Executor:
    """One pass over a plan, in mode TRAIN or SWEEP."""

    def __init__(
        self, model: TreeModel, plan: Plan, mode: Mode, *, backend: Backend, temperature: float, poison: bool = False
    ):
        """Allocate the caches at the plan's sizes; a sweep has no accumulators."""
        self.model, self.plan, self.mode = model, plan, mode
        self.backend, self.temperature = backend, temperature
        config, weight = model.model_config, model.output_weight()
        self.device = weight.device
        self.cache = ArenaCache(
            num_layers=config.num_layers,
            state_rows=plan.state_rows,
            grad_rows=plan.grad_rows if mode is Mode.TRAIN else 0,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            dtype=weight.dtype,
            device=self.device,
            poison=poison,
        )
        self.in_flight: dict[int, _InFlight] = {}

    def run(self, chunk_loss: ChunkLoss) -> None:
        """Execute every operation; in a SWEEP the gradients that `chunk_loss` returns are not used."""
        skipped = () if self.mode is Mode.TRAIN else (Kind.BACKWARD, Kind.FREE)
        for operation in self.plan.operations:
            if operation.kind not in skipped:
                self.execute(operation, chunk_loss)

    def execute(self, operation: Operation, chunk_loss: ChunkLoss) -> None:
        """Execute one operation; the caller keeps to the plan's order."""
        actions: dict[Kind, Callable[[Operation], Any]] = {
            Kind.PUSH: lambda op: self._push(self.plan.pushes[op.index]),
            Kind.FORWARD: lambda op: self._forward(op.index, chunk_loss),
            Kind.BACKWARD: lambda op: self._backward(op.index),
            Kind.FREE: lambda op: self.cache.free(self._rows(op.free_state), self._rows(op.free_grad)),
        }
        actions[operation.kind](operation)

    def _push(self, push: Push) -> None:
        with torch.no_grad():
            self._hidden(push, Mode.PUSH, store_state=self._rows(push.store_state))

    def _forward(self, index: int, chunk_loss: ChunkLoss) -> None:
        chunk = self.plan.chunks[index]
        with torch.set_grad_enabled(self.mode is Mode.TRAIN):
            hidden = self._hidden(
                chunk,
                self.mode,
                context_grad=self._rows(chunk.context_grad),
                own_rows=self._rows(chunk.own_rows),
                own_grad=self._rows(chunk.own_grad),
            )
            logprobs, entropies = edge_logprobs(
                hidden[self._rows(chunk.source_rows)],
                self.model.output_weight(),
                self._rows(chunk.edge_source),
                self._rows(self.plan.forest.tokens[self.plan.forest.edges[chunk.edges]]),
                temperature=self.temperature,
                vocab_size=self.model.model_config.vocab_size,
            )
        grads = chunk_loss(chunk, logprobs.detach(), entropies.detach())
        if self.mode is Mode.TRAIN:
            self.in_flight[index] = _InFlight(outputs=(logprobs, entropies), grads=grads)

    def _backward(self, index: int) -> None:
        """Run a chunk's backward, also without a loss-bearing edge: its descendants' gradients wait in the cache."""
        self.cache.begin_grads(self._rows(self.plan.chunks[index].fresh_grad))
        chunk = self.in_flight.pop(index)
        backward(chunk.outputs, chunk.grads)

    def _hidden(self, call: Call, mode: Mode, **rows: torch.Tensor) -> torch.Tensor:
        """Run the decoder over a call's rows: final hidden states [R, h]."""
        forest = self.plan.forest
        tokens, depth = (
            torch.from_numpy(np.pad(values[call.tokens], (0, call.size - len(call.tokens)))).to(self.device)
            for values in (forest.tokens, forest.depth)
        )
        params = TreeParams(
            mode=mode,
            depth=depth,
            mask=tree_mask(call.visible_from, call.visible_to, call.size, self.device),
            backend=self.backend,
            cache=self.cache,
            context_state=self._rows(call.context_state),
            **rows,
        )
        return self.model(tokens[None], depth[None], None, packed_seq_params=params)[0]

    def _rows(self, rows: np.ndarray | None) -> torch.Tensor:
        return as_index(rows, self.device)
