"""Run the static operation list of a stage: pushes, forwards, backwards, frees, transfers, in the order of the plan.

Shapes: n rows of a call on this process, E edges and M terms of a chunk, h hidden size.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_dta.attention.api import Backend
from megatron_dta.engine.cache import ArenaCache, SharedArenaCache
from megatron_dta.engine.calls import Calls, RankCall, as_index
from megatron_dta.engine.links import Arriving, Links
from megatron_dta.mcore.head import edge_logprobs
from megatron_dta.mcore.model import TreeModel
from megatron_dta.mcore.params import Mode
from megatron_dta.mcore.routing import Routing
from megatron_dta.tree.deal import ShardEdges
from megatron_dta.tree.plan import Call, Flow, Kind, Operation, StageOperation, StageProgram

Grads = tuple[torch.Tensor, torch.Tensor | None]
"""Gradients of the loss for edge log-probs [E] and source entropies; None: the loss does not use them."""

ChunkLoss = Callable[[ShardEdges, torch.Tensor, torch.Tensor], Grads]
"""(this process's edges of a chunk, detached log-probs [E], detached source entropies) -> gradients for both."""


def backward(outputs: tuple[torch.Tensor, torch.Tensor], grads: Grads) -> None:
    """Start a backward from edge log-probs and, where the loss uses them, entropies."""
    used = [(output, grad) for output, grad in zip(outputs, grads) if grad is not None]
    torch.autograd.backward([output for output, _ in used], [grad for _, grad in used])


@dataclass(frozen=True, kw_only=True, eq=False)
class _InFlight:
    """A chunk between its forward and its backward on one model part."""

    received: torch.Tensor | None
    """Hidden states from the part before."""
    hidden: torch.Tensor | None = None
    """What the part handed on ..."""
    outputs: tuple[torch.Tensor, torch.Tensor] | None = None
    """... or, of the last part, edge log-probs and entropies, with their gradients."""
    grads: Grads | None = None


@dataclass(kw_only=True, eq=False)
class _Turn:
    """An operation that computes, with the transfers around it and what is freed after it."""

    operation: StageOperation
    receives: list[Operation]
    after: list[Operation] = field(default_factory=list)


class Executor:
    """One pass over a stage's program, in mode TRAIN or SWEEP."""

    def __init__(
        self,
        model: TreeModel,
        program: StageProgram,
        mode: Mode,
        *,
        backend: Backend,
        temperature: float,
        routings: Sequence[Routing | None] | None = None,
        on_last_backward: Callable[[int], None] | None = None,
        poison: bool = False,
    ):
        """Allocate every part's caches at its plan's sizes; a sweep has no accumulators.

        routings: of every model part, for a mixture of experts; on_last_backward: called with a part's number before
        the last backward that it runs.
        """
        self.model, self.program, self.mode = model, program, mode
        self.temperature, self.on_last_backward = temperature, on_last_backward
        self.routings = routings or [None] * len(model.parts)
        self.device = model.device
        self.calls = Calls(program.forest, model.axes, model.groups, backend, model.device)
        self.caches = [self._cache(part, poison) for part in range(len(model.parts))]
        self.links = Links(model.groups)
        self.in_flight: dict[tuple[int, int], _InFlight] = {}
        self._arriving: dict[tuple[int, Flow, Kind, int], Arriving] = {}
        self._made: torch.Tensor | None = None

    def _cache(self, part: int, poison: bool) -> ArenaCache:
        config, axes, plan = self.model.model_config, self.model.axes, self.program.plans[part]
        is_shared = axes.context > 1 and axes.cp_comm == "allgather"
        by_heads = 1 if is_shared else axes.context
        sizes: dict[str, Any] = {
            "num_layers": self.model.num_local_layers[part],
            "state_rows": plan.state_rows,
            "grad_rows": plan.grad_rows if self.mode is Mode.TRAIN else 0,
            "num_kv_heads": config.num_kv_heads // (axes.tensor * by_heads),
            "head_size": config.head_size,
            "dtype": self.model.dtype,
            "device": self.device,
            "poison": poison,
        }
        return SharedArenaCache(group=self.model.groups.cp, **sizes) if is_shared else ArenaCache(**sizes)

    def run(self, chunk_loss: ChunkLoss) -> None:
        """Execute every operation; in a SWEEP the gradients that `chunk_loss` returns are not used."""
        turns = list(self._turns())
        self._post_with_pushes(turns, 0)
        for number, turn in enumerate(turns):
            self.execute(turn.operation, chunk_loss)
            self._post_with_pushes(turns, number + 1)  # before sending, never before computing: see `Links`
            for operation in turn.after:
                self._after(turn.operation.part, operation)
        self.links.finish()

    def _turns(self) -> Iterator[_Turn]:
        """Put each computing operation together with what belongs to it; a SWEEP has forwards only."""
        receives: list[Operation] = []
        turn: _Turn | None = None
        for entry in self.program.operations:
            operation = entry.operation
            if self.mode is Mode.SWEEP and not _is_forward(operation):
                continue
            if operation.kind is Kind.RECV:
                receives.append(operation)
            elif operation.kind in (Kind.SEND, Kind.FREE):
                assert turn is not None, "nothing has been computed yet"
                turn.after.append(operation)
            else:
                if turn is not None:
                    yield turn
                turn, receives = _Turn(operation=entry, receives=receives), []
        if turn is not None:
            yield turn

    def execute(self, entry: StageOperation, chunk_loss: ChunkLoss) -> None:
        """Execute one PUSH, FORWARD or BACKWARD; the caller keeps to the program's order."""
        part, operation = entry.part, entry.operation
        plan = self.program.plans[part]
        if operation.kind is Kind.PUSH:
            with torch.no_grad():
                received = self._received(part, Flow.ACTIVATION, Kind.PUSH, operation.index)
                own = self.calls.make(plan.pushes[operation.index], Mode.PUSH, self.caches[part])
                self._made = self._hidden(part, own, received)
        elif operation.kind is Kind.FORWARD:
            self._forward(part, operation.index, chunk_loss)
        else:
            self._backward(part, operation.index)

    def _forward(self, part: int, index: int, chunk_loss: ChunkLoss) -> None:
        chunk, trains = self.program.plans[part].chunks[index], self.mode is Mode.TRAIN
        received = self._received(part, Flow.ACTIVATION, Kind.FORWARD, index)
        if received is not None and trains:
            received.requires_grad_()
        own = self.calls.make(chunk, self.mode, self.caches[part])
        with torch.set_grad_enabled(trains):
            hidden = self._hidden(part, own, received)
            if not self.model.parts[part].post_process:
                self._made = hidden.detach()
                entry = _InFlight(received=received, hidden=hidden)
            else:
                edges = self.calls.edges(chunk, own.rows)
                outputs = self._head(hidden, edges)
                grads = chunk_loss(edges, outputs[0].detach(), outputs[1].detach())
                entry = _InFlight(received=received, outputs=outputs, grads=grads)
        if trains:
            self.in_flight[part, index] = entry

    def _head(self, hidden: torch.Tensor, edges: ShardEdges) -> tuple[torch.Tensor, torch.Tensor]:
        forest = self.program.forest
        return edge_logprobs(
            self.model.head_rows(hidden)[as_index(edges.source_rows, self.device)],
            self.model.output_weight(),
            as_index(edges.edge_source, self.device),
            as_index(forest.tokens[forest.edges[edges.edges]], self.device),
            temperature=self.temperature,
            vocab_size=self.model.model_config.vocab_size,
            group=self.model.groups.tp,
        )

    def _backward(self, part: int, index: int) -> None:
        """Run a chunk's backward, also without a loss-bearing edge: its descendants' gradients wait in the cache."""
        plan = self.program.plans[part]
        self.caches[part].begin_grads(plan.chunks[index].fresh_grad)
        entry = self.in_flight.pop((part, index))
        if index == len(plan.chunks) - 1 and self.on_last_backward is not None:
            self.on_last_backward(part)
        if entry.outputs is not None:
            assert entry.grads is not None
            backward(entry.outputs, entry.grads)
        else:
            assert entry.hidden is not None
            grad = self._received(part, Flow.GRADIENT, Kind.FORWARD, index)
            assert grad is not None
            torch.autograd.backward([entry.hidden], [grad])
        self._made = None if entry.received is None else entry.received.grad

    def _hidden(self, part: int, own: RankCall, received: torch.Tensor | None) -> torch.Tensor:
        """Run a model part over a call's rows: what the next part takes, or final hidden states."""
        routing = own.params.routing = self.routings[part]
        hidden = self.model.run_part(part, own.tokens, own.params, received)
        if (
            routing is not None and own.params.mode is Mode.PUSH
        ):  # its tokens' rows may be on other processes in their chunks
            assert own.params.routed_tokens is not None
            routing.share(own.params.routed_tokens)
        return hidden

    def _post_with_pushes(self, turns: Sequence[_Turn], number: int) -> None:
        """Post the receives of a turn; of a push, those of the pushes and the chunk after it too."""
        for turn in turns[number:]:
            self._post(turn)
            if turn.operation.operation.kind is not Kind.PUSH:
                break

    def _post(self, turn: _Turn) -> None:
        """Post the turn's receives, once."""
        part, receives = turn.operation.part, turn.receives
        turn.receives = []
        for operation in receives:
            transfer = operation.transfer
            assert transfer is not None
            plan = self.program.plans[part]
            call: Call = (plan.pushes if transfer.call is Kind.PUSH else plan.chunks)[operation.index]
            shape = (self.calls.num_hidden(call), 1, self.model.model_config.hidden_size)
            key = (part, transfer.flow, transfer.call, operation.index)
            self._arriving[key] = self.links.receive(transfer, shape, self.model.dtype, self.device)

    def _received(self, part: int, flow: Flow, call: Kind, index: int) -> torch.Tensor | None:
        """Return what the part before, or for gradients the part after, has sent; None at the model's ends."""
        arriving = self._arriving.pop((part, flow, call, index), None)
        return None if arriving is None else arriving.wait()

    def _after(self, part: int, operation: Operation) -> None:
        if operation.kind is Kind.FREE:
            assert operation.free_state is not None
            assert operation.free_grad is not None
            self.caches[part].free(operation.free_state, operation.free_grad)
        else:
            assert operation.transfer is not None
            assert self._made is not None
            self.links.send(operation.transfer, self._made)


def _is_forward(operation: Operation) -> bool:
    if operation.transfer is not None:
        return operation.transfer.flow is Flow.ACTIVATION
    return operation.kind in (Kind.PUSH, Kind.FORWARD)
