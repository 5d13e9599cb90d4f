"""From a layout to a plan: pushes on demand, chunks in post-order, cache rows given out and taken back.

What the calls are follows from the layout alone and is found once; cache rows follow from the order in which one part
of the model runs them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_dta.tree.budget import padded
from megatron_dta.tree.forest import Forest
from megatron_dta.tree.layout import Layout, group_by
from megatron_dta.tree.pipeline import Pipeline, Step, steps, with_transfers
from megatron_dta.tree.pipeline import in_flight as most_in_flight
from megatron_dta.tree.plan import Chunk, Kind, Operation, Plan, Push, StageProgram


@dataclass(frozen=True, kw_only=True)
class Slots:
    """The operations of a rank that shares collectives with others: equally many on each of them.

    A rank with fewer pushes or chunks runs calls of padding in their place.
    """

    pushes: tuple[int, ...]
    """Pushes before each chunk slot; its length is the number of chunk slots."""


def schedule(
    forest: Forest,
    chunk_of: np.ndarray,
    *,
    capacity: int,
    push_capacity: int | None = None,
    multiple: int = 1,
    in_flight: int = 1,
    slots: Slots | None = None,
) -> Plan:
    """Turn any assignment of tokens to chunks, int [T], into a plan.

    Chunks run in the order of their numbers where that is legal, else in an order found. Pushed tokens stand in line
    as chunks need them; a push takes the next `push_capacity` (by default `capacity`) of the line, right before a
    chunk that needs one of them, or where `slots` has it. At most `in_flight` chunks are between forward and backward;
    backwards run in the order of the forwards. Raises ValueError where chunks hold each other's ancestors, a chunk
    exceeds the capacity, the capacity is no multiple of the padding, `in_flight` is below 1, or the slots do not
    suffice.
    """
    if in_flight < 1:
        raise ValueError(f"in_flight is {in_flight}; expected at least one chunk between forward and backward")
    calls = _Calls(forest, chunk_of, capacity, push_capacity or capacity, multiple, slots)
    return _plan(calls, steps(calls.stream, Pipeline(stages=in_flight), 0), in_flight)


def stage_program(
    forest: Forest,
    chunk_of: np.ndarray,
    *,
    capacity: int,
    push_capacity: int | None = None,
    multiple: int = 1,
    pipeline: Pipeline,
    stage: int,
    slots: Slots | None = None,
) -> StageProgram:
    """Turn any assignment of tokens to chunks, int [T], into what one stage of a pipeline runs.

    The calls are those of `schedule`; their order, and how many chunks are in flight, is that of `pipeline.steps`.
    Raises as `schedule`, and UsageError for a stage that the pipeline does not have.
    """
    calls = _Calls(forest, chunk_of, capacity, push_capacity or capacity, multiple, slots)
    order = steps(calls.stream, pipeline, stage)
    plans = tuple(
        _plan(calls, [step for step in order if step.part == part], most_in_flight(pipeline, stage=stage, part=part))
        for part in range(pipeline.virtual)
    )
    operations = with_transfers(order, [plan.operations for plan in plans], pipeline, stage)
    return StageProgram(plans=plans, operations=operations)


_NO_TOKENS = np.zeros(0, np.int32)


class _Calls:
    """The calls of a rank in the order in which they start, without cache rows."""

    def __init__(
        self,
        forest: Forest,
        chunk_of: np.ndarray,
        capacity: int,
        push_capacity: int,
        multiple: int,
        slots: Slots | None,
    ):
        """Raise as `schedule`."""
        if capacity % multiple:
            raise ValueError(f"capacity is {capacity}; expected full multiples of the padding, {multiple}")
        self.forest, self.layout = forest, Layout(forest, chunk_of)
        self.capacity, self.push_capacity, self.multiple = capacity, push_capacity, multiple
        largest = max((len(tokens) for tokens in self.layout.tokens), default=0)
        if largest > capacity:
            raise ValueError(f"a chunk holds {largest} tokens; the capacity is {capacity}")
        self.contexts = self.layout.contexts()
        self.num_readers = np.zeros(forest.num_tokens, np.int32)
        for context in self.contexts:
            self.num_readers[context] += 1
        target_chunk = self.layout.chunk_of[forest.parent[forest.edges]]
        self.edges = group_by(target_chunk, self.layout.num_chunks)
        self.terms = group_by(target_chunk[forest.term_edge], self.layout.num_chunks)
        order, pushes = self._in_slots(self.layout.order(), slots)
        self.pushes = [self._push(number) for number in range(sum(pushes))]
        self.chunks = [self._chunk(chunk) for chunk in order]
        self.stream = [kind for count in pushes for kind in [Kind.PUSH] * count + [Kind.FORWARD]]
        """PUSH and FORWARD, as the calls come."""

    def _in_slots(self, own_order: list[int], slots: Slots | None) -> tuple[list[int | None], list[int]]:
        """Return the chunk of every slot, None for padding, and the pushes right before it."""
        needed = self._line_up(own_order)
        own = np.diff(needed, prepend=0).tolist()
        if slots is None:
            return [*own_order], own
        given = np.cumsum(slots.pushes)
        if len(slots.pushes) < len(own_order) or (given[: len(needed)] < needed).any():
            raise ValueError(f"slots {slots.pushes} do not suffice; this plan needs {own}")
        return [*own_order] + [None] * (len(slots.pushes) - len(own_order)), [*slots.pushes]

    def _line_up(self, order: list[int]) -> np.ndarray:
        """Line up the pushed tokens as chunks need them; return the pushes made before each chunk, int64 [K]."""
        in_line = np.zeros(self.forest.num_tokens, bool)
        line, lengths = [_NO_TOKENS], []
        for chunk in order:
            fresh = self.contexts[chunk][~in_line[self.contexts[chunk]]]
            in_line[fresh] = True
            line.append(fresh)
            lengths.append(len(fresh))
        self.line = np.concatenate(line)
        return -(-np.cumsum(lengths, dtype=np.int64) // max(self.push_capacity, 1))

    def _push(self, number: int) -> dict[str, Any]:
        """Return a push of its share of the line, or of padding where the line has ended."""
        tokens = np.sort(self.line[number * self.push_capacity : (number + 1) * self.push_capacity])
        context = self.layout.ancestors(tokens)
        return self._call(tokens, context[~np.isin(context, tokens, assume_unique=True)])

    def _chunk(self, chunk: int | None) -> dict[str, Any]:
        """Return a chunk; None: a call of padding."""
        if chunk is None:
            tokens = context = edges = terms = _NO_TOKENS
        else:
            tokens, context = self.layout.tokens[chunk].astype(np.int32), self.contexts[chunk]
            edges, terms = self.edges[chunk], self.terms[chunk]
        own_rows = np.flatnonzero(self.num_readers[tokens]).astype(np.int32)
        return self._call(tokens, context) | {"own_rows": own_rows} | self._edges(edges, terms, tokens)

    def _call(self, tokens: np.ndarray, context: np.ndarray) -> dict[str, Any]:
        keys = np.concatenate([context, tokens])
        size = padded(max(len(tokens), 1), self.multiple)
        padding = np.arange(len(tokens), size)  # one-token trees that see only themselves
        visible_from = np.concatenate([np.searchsorted(tokens, keys), padding])
        visible_to = np.concatenate([np.searchsorted(tokens, self.forest.subtree_end[keys]), padding + 1])
        return {
            "tokens": tokens,
            "size": size,
            "context": context,
            "visible_from": visible_from.astype(np.int32),
            "visible_to": visible_to.astype(np.int32),
        }

    def _edges(self, edges: np.ndarray, terms: np.ndarray, tokens: np.ndarray) -> dict[str, np.ndarray]:
        by_target = self.forest.parent[self.forest.edges[edges]]
        by_source = np.argsort(by_target, kind="stable")  # a source's edges side by side: the head works in row blocks
        rank = np.empty_like(by_source)
        rank[by_source] = np.arange(len(edges))
        sources, edge_source = np.unique(by_target[by_source], return_inverse=True)
        return {
            "source_rows": np.searchsorted(tokens, sources).astype(np.int32),
            "edges": edges[by_source].astype(np.int32),
            "edge_source": edge_source.astype(np.int32),
            "terms": terms,
            "term_edge": rank[np.searchsorted(edges, self.forest.term_edge[terms])],
        }


@dataclass
class _Rows:
    """Rows of a cache: the lowest free ones first, so the high-water mark is the most rows alive at once."""

    size: int = 0
    free: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))

    def take(self, count: int) -> np.ndarray:
        reused, self.free = self.free[:count], self.free[count:]
        fresh = np.arange(self.size, self.size + count - len(reused), dtype=np.int32)
        self.size += len(fresh)
        return np.concatenate([reused, fresh])

    def give_back(self, rows: np.ndarray) -> None:
        self.free = np.sort(np.concatenate([self.free, rows]))


def _plan(calls: _Calls, order: Sequence[Step], in_flight: int) -> Plan:
    """Give out cache rows along the order in which one part of the model runs all calls."""
    books = _Books(calls)
    actions = {Kind.PUSH: books.push, Kind.FORWARD: books.forward, Kind.BACKWARD: books.backward}
    for step in order:
        books.operations.append(Operation(kind=step.kind, index=step.index))
        actions[step.kind](step.index)
    return Plan(
        forest=calls.forest,
        pushes=tuple(books.pushes),
        chunks=tuple(books.chunks),
        operations=tuple(books.operations),
        state_rows=books.state.size,
        grad_rows=books.grad.size,
        capacity=calls.capacity,
        in_flight=in_flight,
    )


class _Books:
    """Keep the books of both caches while calls run; pushes and chunks begin, and chunks end, in the order of calls."""

    def __init__(self, calls: _Calls):
        self.calls = calls
        num_tokens = calls.forest.num_tokens
        self.state_row, self.grad_row = np.full(num_tokens, -1, np.int32), np.full(num_tokens, -1, np.int32)
        self.readers_left = calls.num_readers.copy()
        self.state, self.grad = _Rows(), _Rows()
        self.bound: dict[int, np.ndarray] = {}
        self.pushes: list[Push] = []
        self.chunks: list[Chunk] = []
        self.operations: list[Operation] = []

    def push(self, index: int) -> None:
        call = self.calls.pushes[index]
        context_state = self.state_row[call["context"]]
        self.state_row[call["tokens"]] = rows = self.state.take(len(call["tokens"]))
        self.pushes.append(Push(**call, context_state=context_state, store_state=rows))

    def forward(self, index: int) -> None:
        """Bind the states that a chunk reads, until its backward."""
        self.bound[index] = self.state_row[self.calls.chunks[index]["context"]]

    def backward(self, index: int) -> None:
        """Complete a chunk, and free what nobody needs after it."""
        call, context_state = self.calls.chunks[index], self.bound.pop(index)
        context = call["context"]
        fresh = context[self.grad_row[context] < 0]
        self.grad_row[fresh] = self.grad.take(len(fresh))
        own_grad = self.grad_row[call["tokens"][call["own_rows"]]]
        rows = {"context_grad": self.grad_row[context], "fresh_grad": self.grad_row[fresh], "own_grad": own_grad}
        self.chunks.append(Chunk(**call, context_state=context_state, **rows))
        self.readers_left[context] -= 1
        done = context_state[self.readers_left[context] == 0]
        self.state.give_back(done)
        self.grad.give_back(own_grad)
        if len(done) or len(own_grad):
            self.operations.append(Operation(kind=Kind.FREE, index=index, free_state=done, free_grad=own_grad))
