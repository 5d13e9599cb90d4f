"""From a layout to a plan: pushes on demand, chunks in post-order, cache rows given out and taken back."""

from dataclasses import dataclass, field

import numpy as np

from megatron_dta.tree.budget import padded
from megatron_dta.tree.forest import Forest
from megatron_dta.tree.layout import Layout, group_by
from megatron_dta.tree.plan import Chunk, Kind, Operation, Plan, Push


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
    if capacity % multiple:
        raise ValueError(f"capacity is {capacity}; expected full multiples of the padding, {multiple}")
    builder = _Builder(forest, chunk_of, capacity, push_capacity or capacity, multiple)
    largest = max((len(tokens) for tokens in builder.layout.tokens), default=0)
    if largest > capacity:
        raise ValueError(f"a chunk holds {largest} tokens; the capacity is {capacity}")
    own_order = builder.layout.order()
    needed = builder.line_up(own_order)
    order: list[int | None] = [*own_order]
    if slots is not None:
        order += [None] * (len(slots.pushes) - len(order))
        given = np.cumsum(slots.pushes)
        if len(slots.pushes) < len(order) or (given[: len(needed)] < needed).any():
            raise ValueError(f"slots {slots.pushes} do not suffice; this plan needs {np.diff(needed, prepend=0)}")
        needed = given
    for chunk, pushes in zip(order, needed.tolist()):
        while len(builder.pushes) < pushes:
            builder.push()
        builder.forward(chunk)
        if len(builder.waiting) == in_flight:
            builder.backward()
    while builder.waiting:
        builder.backward()
    return builder.plan(in_flight)


_NO_TOKENS = np.zeros(0, np.int32)


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


class _Builder:
    """Emit operations in order and keep the books of both caches."""

    def __init__(self, forest: Forest, chunk_of: np.ndarray, capacity: int, push_capacity: int, multiple: int):
        self.forest, self.layout = forest, Layout(forest, chunk_of)
        layout = self.layout
        self.capacity, self.push_capacity, self.multiple = capacity, push_capacity, multiple
        self.contexts = layout.contexts()
        self.state_row = np.full(self.forest.num_tokens, -1, np.int32)
        self.grad_row = np.full(self.forest.num_tokens, -1, np.int32)
        self.readers_left = np.zeros(self.forest.num_tokens, np.int32)
        for context in self.contexts:
            self.readers_left[context] += 1
        self.is_pushed = self.readers_left > 0
        self.state, self.grad = _Rows(), _Rows()
        self.line = np.zeros(0, np.int32)
        self.pushes: list[Push] = []
        self.waiting: list[tuple[int | None, dict]] = []
        self.chunks: list[Chunk] = []
        self.operations: list[Operation] = []
        target_chunk = layout.chunk_of[self.forest.parent[self.forest.edges]]
        self.edges = group_by(target_chunk, layout.num_chunks)
        self.terms = group_by(target_chunk[self.forest.term_edge], layout.num_chunks)

    def line_up(self, order: list[int]) -> np.ndarray:
        """Line up the pushed tokens as chunks need them; return the pushes made before each chunk, int64 [K]."""
        in_line = np.zeros(self.forest.num_tokens, bool)
        line, lengths = [self.line], []
        for chunk in order:
            fresh = self.contexts[chunk][~in_line[self.contexts[chunk]]]
            in_line[fresh] = True
            line.append(fresh)
            lengths.append(len(fresh))
        self.line = np.concatenate(line)
        return -(-np.cumsum(lengths, dtype=np.int64) // max(self.push_capacity, 1))

    def push(self) -> None:
        """Push the next tokens of the line, or padding where it is empty."""
        tokens, self.line = np.sort(self.line[: self.push_capacity]), self.line[self.push_capacity :]
        context = self.layout.ancestors(tokens)
        call = self._call(tokens, context[~np.isin(context, tokens, assume_unique=True)])
        rows = self.state.take(len(tokens))
        self.state_row[tokens] = rows
        self.operations.append(Operation(kind=Kind.PUSH, index=len(self.pushes)))
        self.pushes.append(Push(**call, store_state=rows))

    def forward(self, chunk: int | None) -> None:
        """Emit a chunk's forward; None: a call of padding."""
        tokens = _NO_TOKENS if chunk is None else self.layout.tokens[chunk].astype(np.int32)
        self.waiting.append((chunk, self._call(tokens, self._context(chunk))))
        self.operations.append(Operation(kind=Kind.FORWARD, index=len(self.chunks) + len(self.waiting) - 1))

    def _context(self, chunk: int | None) -> np.ndarray:
        return _NO_TOKENS if chunk is None else self.contexts[chunk]

    def _call(self, tokens: np.ndarray, context: np.ndarray) -> dict:
        keys = np.concatenate([context, tokens])
        size = padded(max(len(tokens), 1), self.multiple)
        padding = np.arange(len(tokens), size)  # one-token trees that see only themselves
        visible_from = np.concatenate([np.searchsorted(tokens, keys), padding])
        visible_to = np.concatenate([np.searchsorted(tokens, self.forest.subtree_end[keys]), padding + 1])
        return {
            "tokens": tokens,
            "size": size,
            "context": context,
            "context_state": self.state_row[context],
            "visible_from": visible_from.astype(np.int32),
            "visible_to": visible_to.astype(np.int32),
        }

    def backward(self) -> None:
        """Emit the oldest waiting chunk's backward, and free what nobody needs after it."""
        chunk, call = self.waiting.pop(0)
        context = self._context(chunk)
        index = len(self.chunks)
        fresh = context[self.grad_row[context] < 0]
        self.grad_row[fresh] = self.grad.take(len(fresh))
        own_rows = np.flatnonzero(self.is_pushed[call["tokens"]]).astype(np.int32)
        own_grad = self.grad_row[call["tokens"][own_rows]]
        self.chunks.append(
            Chunk(
                **call,
                context_grad=self.grad_row[context],
                fresh_grad=self.grad_row[fresh],
                own_rows=own_rows,
                own_grad=own_grad,
                **self._edges(chunk, call["tokens"]),
            )
        )
        self.operations.append(Operation(kind=Kind.BACKWARD, index=index))
        self.readers_left[context] -= 1
        done = self.state_row[context[self.readers_left[context] == 0]]
        self.state.give_back(done)
        self.grad.give_back(own_grad)
        if len(done) or len(own_grad):
            self.operations.append(Operation(kind=Kind.FREE, index=index, free_state=done, free_grad=own_grad))

    def _edges(self, chunk: int | None, tokens: np.ndarray) -> dict:
        edges, terms = (_NO_TOKENS, _NO_TOKENS) if chunk is None else (self.edges[chunk], self.terms[chunk])
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

    def plan(self, in_flight: int) -> Plan:
        return Plan(
            forest=self.forest,
            pushes=tuple(self.pushes),
            chunks=tuple(self.chunks),
            operations=tuple(self.operations),
            state_rows=self.state.size,
            grad_rows=self.grad.size,
            capacity=self.capacity,
            in_flight=in_flight,
        )
