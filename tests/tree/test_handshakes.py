"""Stages with one model part get on even if every operation waits for all transfers posted before it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings

from megatron_dta.tree.pipeline import Pipeline
from megatron_dta.tree.plan import Flow, Kind, StageOperation, StageProgram
from megatron_dta.tree.schedule import Slots
from tests.pipelines import Case, cases, chain_case

Message = tuple[Flow, Kind, int, int]
"""What is sent, of which call, and the number of the model part that it is for."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """An operation that computes."""

    kind: Kind
    receives: list[Message]
    sends: list[Message]


def turns(program: StageProgram, pipeline: Pipeline, stage: int) -> list[Turn]:
    """Return a stage's turns."""
    found: list[Turn] = []
    receives: list[Message] = []
    for entry in program.operations:
        operation = entry.operation
        if operation.kind is Kind.RECV:
            receives.append(_message(entry, pipeline, stage))
        elif operation.kind is Kind.SEND:
            found[-1].sends.append(_message(entry, pipeline, stage))
        elif operation.kind is not Kind.FREE:
            found.append(Turn(kind=operation.kind, receives=receives, sends=[]))
            receives = []
    return found


def _message(entry: StageOperation, pipeline: Pipeline, stage: int) -> Message:
    transfer, part = entry.operation.transfer, entry.part * pipeline.stages + stage
    assert transfer is not None
    step = {Flow.ACTIVATION: 1, Flow.GRADIENT: -1}[transfer.flow] if entry.operation.kind is Kind.SEND else 0
    return transfer.flow, transfer.call, entry.operation.index, part + step


def with_its_pushes(own: Sequence[Turn]) -> list[int]:
    """Return for every turn how many are done when its receives are posted: a chunk's and its pushes' together."""
    first = list(range(len(own)))
    for number in range(1, len(own)):
        if own[number - 1].kind is Kind.PUSH:
            first[number] = first[number - 1]
    return first


def finishes(stages: Sequence[Sequence[Turn]], posted: Callable[[Sequence[Turn]], list[int]]) -> bool:
    """Say whether all stages finish where a turn starts only when all transfers posted before it are through.

    Receives are posted once so many turns as `posted` says are computed, before the last of them sends.
    """
    sent_by = {m: (s, i) for s, own in enumerate(stages) for i, turn in enumerate(own) for m in turn.sends}
    posted_at = [posted(own) for own in stages]
    taken = {
        m: (s, posted_at[s][i]) for s, own in enumerate(stages) for i, turn in enumerate(own) for m in turn.receives
    }
    done = [0] * len(stages)

    def is_free(stage: int) -> bool:
        own, number = stages[stage], done[stage]
        waits = [m for i, turn in enumerate(own) if posted_at[stage][i] <= number for m in turn.receives]
        sent = [m for turn in own[:number] for m in turn.sends]
        arrived = all(done[s] > i for s, i in map(sent_by.__getitem__, waits))
        return arrived and all(done[s] >= i for s, i in map(taken.__getitem__, sent))

    while free := [stage for stage, own in enumerate(stages) if done[stage] < len(own) and is_free(stage)]:
        for stage in free:
            done[stage] += 1
    return all(count == len(own) for count, own in zip(done, stages))


def turns_of(case: Case) -> list[list[Turn]]:
    return [turns(program, case.pipeline, stage) for stage, program in enumerate(case.programs())]


@settings(max_examples=100, deadline=None)
@given(case=cases().filter(lambda case: case.pipeline.virtual == 1))
def test_a_chunks_and_its_pushes_receives_posted_together(case):
    """As the executor posts them."""
    assert finishes(turns_of(case), with_its_pushes)


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("length", [1, 5, 8, 16, 23])
def test_long_pipelines(stages, length):
    assert finishes(turns_of(chain_case(Pipeline(stages=stages), length)), with_its_pushes)


def test_receives_of_each_turn_alone_may_wait_for_each_other():
    """Negative control: a push's receiver, busy sending a gradient, takes no second push."""
    case = chain_case(Pipeline(stages=2), 12)
    case = replace(case, options=case.options | {"push_capacity": 1, "slots": Slots(pushes=(11, *[2] * 11))})
    assert not finishes(turns_of(case), lambda own: list(range(len(own))))
    assert finishes(turns_of(case), with_its_pushes)


def test_earlier_receives_may_wait_for_each_other():
    """Negative control: a stage that waits for a receive before computing what leads to it waits for ever."""
    stages = turns_of(chain_case(Pipeline(stages=2), 8))
    assert not finishes(stages, lambda own: [max(0, number - 1) for number in range(len(own))])
