"""Play a plan without a model: every state is there when it is read, every gradient when it is consumed."""

from collections import deque

import numpy as np

from megatron_dta.tree.plan import Call, Chunk, Kind, Operation, Plan
from megatron_dta.tree.schedule import Slots
from tests.forests import ancestor_sets


class Replay:
    """Play a plan's operations with token numbers for states and sets of tokens for gradients, checking each step."""

    def __init__(self, plan: Plan, multiple: int = 1, slots: Slots | None = None):
        """slots: the calls that the plan has to run, calls of padding included; without them it has no such calls."""
        self.plan, self.multiple, self.slots = plan, multiple, slots
        self.ancestors = ancestor_sets(plan.forest)
        self.outside = descendants_in_other_chunks(plan, self.ancestors)
        self.states: dict[int, int] = {}
        self.gradients: dict[int, tuple[int, set[int]]] = {}
        self.in_flight: deque[int] = deque()
        self.forwarded: list[int] = []
        self.finished: set[int] = set()
        self.stored: set[int] = set()
        self.most_states = self.most_gradients = 0

    def run(self) -> None:
        if self.slots is not None:
            self.check_slots(self.slots)
        actions = {Kind.FORWARD: self.forward, Kind.BACKWARD: self.backward, Kind.PUSH: self.push, Kind.FREE: self.free}
        for operation in self.plan.operations:
            actions[operation.kind](operation)
        assert (self.states, self.gradients, list(self.in_flight)) == ({}, {}, []), "something is left at the end"
        assert sorted(self.forwarded) == list(range(len(self.plan.chunks)))
        assert self.finished == set(range(self.plan.forest.num_tokens))
        assert (self.most_states, self.most_gradients) == (self.plan.state_rows, self.plan.grad_rows)

    def check_slots(self, slots: Slots) -> None:
        """Collectives are in calls: ranks that share them run the same kinds of calls one after the other."""
        calls = [kind for kind in kinds_of(self.plan) if kind != Kind.BACKWARD]
        assert calls == [k for pushes in slots.pushes for k in [Kind.PUSH] * pushes + [Kind.FORWARD]]

    def push(self, operation: Operation) -> None:
        push = self.plan.pushes[operation.index]
        self.check_call(push)
        tokens, rows = push.tokens.tolist(), push.store_state.tolist()
        assert not self.stored & set(tokens), "pushed twice"
        assert not self.states.keys() & set(rows), "a live state is overwritten"
        assert all(0 <= row < self.plan.state_rows for row in rows)
        assert len(set(rows)) == len(tokens)
        self.stored |= set(tokens)
        self.states |= zip(rows, tokens)
        self.most_states = max(self.most_states, len(self.states))

    def forward(self, operation: Operation) -> None:
        self.check_call(self.plan.chunks[operation.index])
        self.forwarded.append(operation.index)
        self.in_flight.append(operation.index)
        assert len(self.in_flight) <= self.plan.in_flight

    def backward(self, operation: Operation) -> None:
        assert operation.index == self.in_flight.popleft(), "backwards run in the order of the forwards"
        chunk = self.plan.chunks[operation.index]
        self.check_context(chunk)
        self.begin_gradients(chunk)
        self.consume_own(chunk)
        for row, token in zip(chunk.context_grad.tolist(), chunk.context.tolist()):
            assert self.gradients[row][0] == token, "a gradient goes to another token's accumulator"
            self.gradients[row][1].update(t for t in chunk.tokens.tolist() if token in self.ancestors[t])
        self.finished |= set(chunk.tokens.tolist())

    def begin_gradients(self, chunk: Chunk) -> None:
        fresh, rows = set(chunk.fresh_grad.tolist()), chunk.context_grad.tolist()
        assert len(fresh) == len(chunk.fresh_grad)
        assert len(set(rows)) == len(chunk.context)
        assert all(0 <= row < self.plan.grad_rows for row in rows)
        assert fresh == set(rows) - self.gradients.keys(), "rows are zeroed exactly at their first use"
        self.gradients |= {r: (t, set()) for r, t in zip(rows, chunk.context.tolist()) if r in fresh}
        self.most_gradients = max(self.most_gradients, len(self.gradients))

    def consume_own(self, chunk: Chunk) -> None:
        """Every gradient that descendants elsewhere owe has arrived, so their chunks ran earlier: post-order."""
        own = chunk.tokens[chunk.own_rows].tolist()
        assert own == [t for t in chunk.tokens.tolist() if self.outside[t]]
        for token, row in zip(own, chunk.own_grad.tolist()):
            assert self.gradients[row] == (token, self.outside[token])
            assert self.outside[token] <= self.finished

    def free(self, operation: Operation) -> None:
        for row in operation.free_state.tolist():
            assert self.outside[self.states.pop(row)] <= self.finished, "somebody still reads a freed state"
        for row in operation.free_grad.tolist():
            assert self.gradients.pop(row)[0] in self.finished, "a freed gradient was not consumed"
        kept = [*self.states.values(), *(t for t, _ in self.gradients.values() if t in self.finished)]
        assert not any(self.outside[token] <= self.finished for token in kept), "a row is kept too long"

    def check_call(self, call: Call) -> None:
        tokens = set(call.tokens.tolist())
        assert call.tokens.tolist() == sorted(tokens)
        rows = max(len(tokens), 1 if self.slots else 0)
        assert rows > 0, "a call without tokens"
        assert call.size == -(-rows // self.multiple) * self.multiple, "A04: the size is the padded token count"
        assert call.size <= self.plan.capacity
        assert len(call.visible_from) == len(call.visible_to) == len(call.context) + call.size
        assert call.context.tolist() == sorted(set().union(*(self.ancestors[t] for t in tokens)) - tokens)
        padding = np.arange(len(tokens), call.size)
        assert call.visible_from[len(call.context) + len(tokens) :].tolist() == padding.tolist()
        assert call.visible_to[len(call.context) + len(tokens) :].tolist() == (padding + 1).tolist()
        self.check_context(call)

    def check_context(self, call: Call) -> None:
        assert [self.states.get(row) for row in call.context_state.tolist()] == call.context.tolist()


def kinds_of(plan: Plan) -> list[Kind]:
    """Return what the operations of a plan do, one after the other, but for freeing: that runs nothing."""
    return [operation.kind for operation in plan.operations if operation.kind != Kind.FREE]


def descendants_in_other_chunks(plan: Plan, ancestors: list[set[int]]) -> list[set[int]]:
    """Return for every token its descendants outside its chunk; each token is in one chunk."""
    chunk_of = np.full(plan.forest.num_tokens, -1)
    for i, chunk in enumerate(plan.chunks):
        assert (chunk_of[chunk.tokens] == -1).all(), "a token is in two chunks"
        chunk_of[chunk.tokens] = i
    assert (chunk_of >= 0).all(), "a token is in no chunk"
    outside: list[set[int]] = [set() for _ in ancestors]
    for token, above in enumerate(ancestors):
        for a in above:
            if chunk_of[a] != chunk_of[token]:
                outside[a].add(token)
    return outside


def check_terms(plan: Plan) -> None:
    """Every edge and every term is in the one chunk that holds the edge's source."""
    forest = plan.forest
    for chunk in plan.chunks:
        sources = chunk.tokens[chunk.source_rows]
        assert len(set(sources.tolist())) == len(sources)
        assert np.array_equal(sources[chunk.edge_source], forest.parent[forest.edges[chunk.edges]])
        assert np.array_equal(chunk.edges[chunk.term_edge], forest.term_edge[chunk.terms])
        assert set(chunk.edge_source.tolist()) == set(range(len(sources))), "a head row without an edge"
        assert (np.diff(chunk.edge_source) >= 0).all(), "the head takes edges in the order of their rows"
    assert sorted(e for c in plan.chunks for e in c.edges.tolist()) == list(range(len(forest.edges)))
    assert sorted(t for c in plan.chunks for t in c.terms.tolist()) == list(range(len(forest.term_target)))


def check(plan: Plan, multiple: int = 1, slots: Slots | None = None) -> None:
    """Check that a plan can run as it is, and trains every term once."""
    Replay(plan, multiple, slots).run()
    check_terms(plan)
