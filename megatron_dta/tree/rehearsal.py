"""Rehearse the programs of all stages of a pipeline without a model: that they finish, and that every step is legal.

Shapes: P stages, V model parts of each, T tree tokens.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_dta.tree.pipeline import Pipeline
from megatron_dta.tree.plan import Call, Kind, Operation, Plan, StageOperation, StageProgram
from megatron_dta.tree.timeline import CallSeconds, Timing, dense_seconds, play, shares


@dataclass(frozen=True, kw_only=True, eq=False)
class Rehearsal:
    """What was seen of programs that finished."""

    timing: Timing
    parts_in_flight: tuple[int, ...]
    """[P]: most parts of chunks between forward and backward on each stage."""
    in_flight: tuple[tuple[int, ...], ...]
    """[P][V]: most chunks between forward and backward on each part."""


def rehearse(programs: Sequence[StageProgram], seconds: CallSeconds | None = None) -> Rehearsal:
    """Run the programs of all stages, in order of stages, on token numbers instead of states and gradients.

    seconds: what calls take; by default none takes any time. Raises ValueError, beside what `play` refuses, where a
    call reads a state that is not there, a row is given to two living tokens, a gradient is consumed before all of it
    has arrived, a row is freed too early or never, backwards run in another order than forwards, a call does not run
    exactly once, or a cache is not as large as the most alive in it.
    """
    pipeline = Pipeline(stages=len(programs), virtual=len(programs[0].plans))
    parts = [[_Part(plan) for plan in program.plans] for program in programs]
    most = [0] * len(programs)
    seconds = seconds or _no_seconds(programs[0].plans[0])
    duration = shares(seconds, pipeline)

    def act(stage: int, step: StageOperation) -> float:
        parts[stage][step.part].run(step.operation)
        most[stage] = max(most[stage], sum(len(part.waiting) for part in parts[stage]))
        return duration(stage, step)

    taken, busy = play([program.operations for program in programs], act, pipeline)
    for part in (part for own in parts for part in own):
        part.finish()
    return Rehearsal(
        timing=Timing(seconds=taken, busy=busy, dense_seconds=dense_seconds(seconds, pipeline)),
        parts_in_flight=tuple(most),
        in_flight=tuple(tuple(part.most_waiting for part in own) for own in parts),
    )


def _no_seconds(plan: Plan) -> CallSeconds:
    chunks = np.zeros(len(plan.chunks))
    return CallSeconds(push=np.zeros(len(plan.pushes)), forward=chunks, backward=chunks)


class _Rows:
    """Which token has which row of a cache."""

    def __init__(self, name: str, size: int):
        self.name, self.token = name, np.full(size, -1)
        self.alive = self.most = 0

    def give(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        taken = self.token[rows] >= 0
        if taken.any() or len(np.unique(rows)) < len(rows):
            raise ValueError(f"{self.name} rows {rows.tolist()} are given to {tokens.tolist()}; some are another's")
        self.token[rows] = tokens
        self.alive += len(rows)
        self.most = max(self.most, self.alive)

    def check(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        if not np.array_equal(self.token[rows], tokens):
            found = self.token[rows].tolist()
            raise ValueError(f"{self.name} rows {rows.tolist()} hold tokens {found}; expected {tokens.tolist()}")

    def free(self, rows: np.ndarray, may_go: np.ndarray) -> None:
        tokens = self.token[rows]
        if (tokens < 0).any() or not may_go[tokens].all() or len(np.unique(rows)) < len(rows):
            raise ValueError(f"{self.name} rows {rows.tolist()} of tokens {tokens.tolist()} may not be freed now")
        self.token[rows] = -1
        self.alive -= len(rows)

    def finish(self) -> None:
        if self.alive or self.most != len(self.token):
            raise ValueError(f"{self.alive} {self.name} rows are left; {self.most} of {len(self.token)} were used")


class _Part:
    """One model part of a stage: what its caches hold, and which chunks wait for their backward."""

    def __init__(self, plan: Plan):
        self.plan = plan
        num_tokens = plan.forest.num_tokens
        self.states, self.grads = _Rows("state", plan.state_rows), _Rows("accumulator", plan.grad_rows)
        self.readers_left = np.zeros(num_tokens, np.int64)
        for chunk in plan.chunks:
            self.readers_left[chunk.context] += 1
        self.is_read = self.readers_left > 0
        self.is_stored, self.is_done = np.zeros(num_tokens, bool), np.zeros(num_tokens, bool)
        self.begun = {Kind.PUSH: 0, Kind.FORWARD: 0}
        self.waiting: deque[int] = deque()
        self.most_waiting = 0

    def run(self, operation: Operation) -> None:
        actions = {
            Kind.PUSH: self._push,
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.FREE: self._free,
        }
        actions[operation.kind](operation)

    def _push(self, operation: Operation) -> None:
        self._begin(operation)
        push = self.plan.pushes[operation.index]
        self._read(push)
        if self.is_stored[push.tokens].any():
            raise ValueError(f"push {operation.index} stores tokens that were pushed before")
        self.is_stored[push.tokens] = True
        self.states.give(push.store_state, push.tokens)

    def _forward(self, operation: Operation) -> None:
        self._begin(operation)
        self._read(self.plan.chunks[operation.index])
        self.waiting.append(operation.index)
        self.most_waiting = max(self.most_waiting, len(self.waiting))
        if self.most_waiting > self.plan.in_flight:
            raise ValueError(f"{self.most_waiting} chunks are in flight; the plan has at most {self.plan.in_flight}")

    def _begin(self, operation: Operation) -> None:
        """Count a call; they begin in the order of their numbers."""
        if operation.index != self.begun[operation.kind]:
            raise ValueError(
                f"{operation.kind} of call {operation.index} runs where {self.begun[operation.kind]} is next"
            )
        self.begun[operation.kind] += 1

    def _read(self, call: Call) -> None:
        self.states.check(call.context_state, call.context)

    def _backward(self, operation: Operation) -> None:
        if not self.waiting or self.waiting.popleft() != operation.index:
            raise ValueError(f"backward of chunk {operation.index} runs; backwards run in the order of the forwards")
        chunk = self.plan.chunks[operation.index]
        self._read(chunk)
        fresh = np.isin(chunk.context_grad, chunk.fresh_grad)
        self.grads.give(chunk.fresh_grad, chunk.context[fresh])
        self.grads.check(chunk.context_grad, chunk.context)
        own = chunk.tokens[chunk.own_rows]
        self.grads.check(chunk.own_grad, own)
        if self.readers_left[chunk.tokens].any() or self.is_read[chunk.tokens].sum() != len(own):
            raise ValueError(
                f"backward of chunk {operation.index} lacks gradients of some of its tokens {own.tolist()}"
            )
        self.readers_left[chunk.context] -= 1
        self.is_done[chunk.tokens] = True

    def _free(self, operation: Operation) -> None:
        if operation.free_state is not None:
            self.states.free(operation.free_state, self.readers_left == 0)
        if operation.free_grad is not None:
            self.grads.free(operation.free_grad, self.is_done)

    def finish(self) -> None:
        """Raise ValueError where something is left."""
        expected = {Kind.PUSH: len(self.plan.pushes), Kind.FORWARD: len(self.plan.chunks)}
        if self.begun != expected or self.waiting or not self.is_done.all():
            raise ValueError(f"calls ran {self.begun} of {expected}; {len(self.waiting)} wait for their backward")
        self.states.finish()
        self.grads.finish()
