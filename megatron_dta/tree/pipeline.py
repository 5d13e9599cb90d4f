"""In which order a stage of a pipeline runs its calls: one forward, one backward (1F1B), with one or several parts.

A model is cut into P * V parts. Stage s of P holds V of them: its part v is number v * P + s of all. Every stage runs
the same stream of calls: pushes, forward only, and chunks, forward and later backward.

A chunk and the pushes right before it are a unit. Units go in groups of P. Forwards run group by group, in a group part
by part, in a part unit by unit; backwards likewise, parts from the last to the first. A stage runs `warm_up` forwards
ahead, then a backward after each forward, then the backwards that are left. Forwards have the same order on all
stages, and so have backwards: every link between two stages is first in, first out.

Pushes have no backward and so make no turns: they belong to the chunk that they precede. A last group of less than P
units keeps the turns of a full one. If it did not, with V > 1 a stage would wait for itself: its next forward comes
from the stage before the wrap, which runs a backward first that waits for a later forward of this stage.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from megatron_dta.errors import UsageError
from megatron_dta.tree.plan import Flow, Kind, Operation, StageOperation, Transfer


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """How many stages share a model, and into how many parts each stage's share is cut."""

    stages: int = 1
    virtual: int = 1
    """Model parts on every stage: more of them idle less at the ends of a step and send more often."""

    def __post_init__(self):
        for name, value in (("stages", self.stages), ("virtual", self.virtual)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UsageError(f"pipeline {name} is {value!r}; expected a whole number, at least 1")
        if self.virtual > 1 and self.stages == 1:
            raise UsageError(
                f"pipeline virtual is {self.virtual} with one stage; expected 1, or at least 2 stages: "
                "a model that is on one stage is not cut into parts"
            )

    @property
    def parts(self) -> int:
        """Parts of the whole model."""
        return self.stages * self.virtual

    def warm_up(self, stage: int) -> int:
        """Return how many turns of forwards a stage runs before backwards alternate with them."""
        if not 0 <= stage < self.stages:
            raise UsageError(f"stage is {stage}; expected 0 to {self.stages - 1}")
        after = self.stages - stage - 1
        return after if self.virtual == 1 else 2 * after + (self.virtual - 1) * self.stages


@dataclass(frozen=True, kw_only=True)
class Step:
    """One call on one model part of a stage: kind PUSH, FORWARD or BACKWARD; `index` counts pushes or chunks."""

    kind: Kind
    index: int
    part: int


def steps(stream: Sequence[Kind], pipeline: Pipeline, stage: int) -> list[Step]:
    """Order a stage's calls. stream: PUSH and FORWARD as calls come; raises ValueError for other kinds."""
    forwards, backwards = _turns(_units(stream), pipeline)
    ahead = pipeline.warm_up(stage)
    order = [step for turn in forwards[:ahead] for step in turn]
    no_steps: list[Step] = []
    for turns in zip_longest(forwards[ahead:], backwards, fillvalue=no_steps):
        order += [step for turn in turns for step in turn]
    return order


def _units(stream: Sequence[Kind]) -> list[list[tuple[Kind, int]]]:
    """Cut a stream after every chunk; pushes at its end are a unit without one."""
    units: list[list[tuple[Kind, int]]] = [[]]
    counts = {Kind.PUSH: 0, Kind.FORWARD: 0}
    for kind in stream:
        if kind not in counts:
            raise ValueError(f"the stream holds {kind!r}; expected {Kind.PUSH!r} and {Kind.FORWARD!r}")
        units[-1].append((kind, counts[kind]))
        counts[kind] += 1
        if kind is Kind.FORWARD:
            units.append([])
    return units if units[-1] else units[:-1]


def _turns(units: list[list[tuple[Kind, int]]], pipeline: Pipeline) -> tuple[list[list[Step]], list[list[Step]]]:
    """Return the steps of every turn, forwards and backwards, in the order that all stages share."""
    forwards: list[list[Step]] = []
    backwards: list[list[Step]] = []
    for first in range(0, len(units), pipeline.stages):
        group = units[first : first + pipeline.stages]
        group += [[]] * (pipeline.stages - len(group))
        for part in range(pipeline.virtual):
            forwards += [[Step(kind=kind, index=index, part=part) for kind, index in unit] for unit in group]
        for part in reversed(range(pipeline.virtual)):
            chunks = [[index for kind, index in unit if kind is Kind.FORWARD] for unit in group]
            backwards += [[Step(kind=Kind.BACKWARD, index=index, part=part) for index in own] for own in chunks]
    return forwards, backwards


def in_flight(pipeline: Pipeline, *, stage: int = 0, part: int = 0) -> int:
    """Return the most chunks between forward and backward on one part of a stage, however many chunks there are.

    No part of any stage has more than part 0 of stage 0. A chunk's backward runs before the unit that many later.
    """
    done = np.arange(pipeline.parts)  # turns of backwards; all is the same again after one group
    begun = _chunks_of(part, done + pipeline.warm_up(stage) + 1, pipeline)
    return int((begun - _chunks_of(pipeline.virtual - 1 - part, done, pipeline)).max())


def parts_in_flight(pipeline: Pipeline, *, stage: int = 0) -> int:
    """Return the most parts of chunks between forward and backward on a stage, however many chunks there are.

    A part of a chunk keeps 1 / (P * V) of the activations of all layers. Stage 0 has most.
    """
    return pipeline.warm_up(stage) + 1


def _chunks_of(position: int, turns: np.ndarray, pipeline: Pipeline) -> np.ndarray:
    """Count among the first turns those of the part that comes at a position in every group."""
    full, rest = np.divmod(turns, pipeline.parts)
    return full * pipeline.stages + np.clip(rest - position * pipeline.stages, 0, pipeline.stages)


def with_transfers(
    order: Sequence[Step], operations: Sequence[Sequence[Operation]], pipeline: Pipeline, stage: int
) -> tuple[StageOperation, ...]:
    """Put the operations of a stage's parts in order, a RECV right before what needs it, a SEND right after its origin.

    operations: those of every part in its own order, a FREE after the operation it belongs to.
    """
    rest = [_with_frees(own) for own in operations]
    woven: list[StageOperation] = []
    for step in order:
        operation, *frees = next(rest[step.part])
        received = _transfers(Kind.RECV, step, pipeline, stage)
        sent = _transfers(Kind.SEND, step, pipeline, stage)
        own = [*received, operation, *sent, *frees]
        woven += [StageOperation(part=step.part, operation=operation) for operation in own]
    return tuple(woven)


def _with_frees(operations: Sequence[Operation]) -> Iterator[list[Operation]]:
    """Yield every operation with the FREE that follows it, if any."""
    starts = [number for number, operation in enumerate(operations) if operation.kind is not Kind.FREE]
    for start, end in zip(starts, [*starts[1:], len(operations)]):
        yield [*operations[start:end]]


def _transfers(kind: Kind, step: Step, pipeline: Pipeline, stage: int) -> list[Operation]:
    """Return the one SEND or RECV of a step, or none at the ends of the model."""
    flow = Flow.GRADIENT if step.kind is Kind.BACKWARD else Flow.ACTIVATION
    is_next = (flow is Flow.ACTIVATION) == (kind is Kind.SEND)
    other = step.part * pipeline.stages + stage + (1 if is_next else -1)
    if not 0 <= other < pipeline.parts:
        return []
    transfer = Transfer(
        flow=flow,
        call=Kind.PUSH if step.kind is Kind.PUSH else Kind.FORWARD,
        peer=other % pipeline.stages,
        wraps=other // pipeline.stages != step.part,
    )
    return [Operation(kind=kind, index=step.index, transfer=transfer)]
