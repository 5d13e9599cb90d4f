"""Rehearsals refuse what is broken: orders, rows, transfers."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from megatron_dta.tree.pipeline import Pipeline
from megatron_dta.tree.plan import Flow, Kind, StageOperation, StageProgram
from megatron_dta.tree.rehearsal import rehearse
from tests.forests import forest_of
from tests.pipelines import RUN, Case, chain_case

Broken = Callable[[list[StageOperation]], None]


def swap_backwards(operations: list[StageOperation]) -> None:
    first, second = positions(operations, Kind.BACKWARD)[:2]
    operations[first], operations[second] = operations[second], operations[first]


def last_in_first_out(operations: list[StageOperation]) -> None:
    """Run the backwards of a warm-up from the last to the first."""
    at = [i for i in positions(operations, Kind.BACKWARD) if operations[i].operation.index < 2]
    for one, two in zip(at, [operations[i] for i in reversed(at)]):
        operations[one] = two


def push_later(operations: list[StageOperation]) -> None:
    """Push right after the first chunk that reads it."""
    push, chunk = (positions(operations, kind)[0] for kind in RUN)
    operations.insert(chunk, operations.pop(push))


def drop(kind: Kind) -> Broken:
    return lambda operations: operations.remove(operations[positions(operations, kind)[-1]])


def twice(kind: Kind) -> Broken:
    return lambda operations: operations.append(operations[positions(operations, kind)[-1]])


def free_early(operations: list[StageOperation]) -> None:
    """Free before the backward that still reads."""
    free = positions(operations, Kind.FREE)[0]
    operations.insert(free - 2, operations.pop(free))


def positions(operations: list[StageOperation], kind: Kind) -> list[int]:
    return [i for i, step in enumerate(operations) if step.operation.kind is kind]


def broken(program: StageProgram, change: Broken) -> StageProgram:
    operations = list(program.operations)
    change(operations)
    return replace(program, operations=tuple(operations))


NOT_IN_ORDER = "backwards run in the order of the forwards"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (swap_backwards, NOT_IN_ORDER),
        (last_in_first_out, NOT_IN_ORDER),
        (push_later, r"state rows \[0\] hold tokens \[-1\]; expected \[0\]"),
        (drop(Kind.PUSH), "hold tokens"),
        (drop(Kind.FORWARD), NOT_IN_ORDER),
        (drop(Kind.BACKWARD), "may not be freed now"),
        (drop(Kind.FREE), "accumulator rows are left"),
        (twice(Kind.FREE), "may not be freed now"),
        (twice(Kind.BACKWARD), NOT_IN_ORDER),
        (free_early, "may not be freed now"),
    ],
)
def test_a_broken_stage_is_refused(change, message):
    """One stage, two chunks in flight: no link notices, the caches and the order do."""
    case = Case(
        forest=forest_of([0, 1], [0, 2], [0, 3]),
        chunk_of=np.array([3, 0, 1, 2]),
        options={"capacity": 1},
        pipeline=Pipeline(),
    )
    plan = case.plan(in_flight=2)
    operations = tuple(StageOperation(part=0, operation=operation) for operation in plan.operations)
    program = StageProgram(plans=(plan,), operations=operations)
    rehearse([program])
    with pytest.raises(ValueError, match=message):
        rehearse([broken(program, change)])


def with_chunks(program: StageProgram, change: Callable[[list], list]) -> StageProgram:
    (plan,) = program.plans
    return replace(program, plans=(replace(plan, chunks=tuple(change(list(plan.chunks)))),))


def with_plan(program: StageProgram, **changes) -> StageProgram:
    (plan,) = program.plans
    return replace(program, plans=(replace(plan, **changes),))


def test_chunks_before_their_descendants_are_refused():
    """The contents of the last two chunks exchanged: an ancestor's gradient is consumed before all of it has come."""
    (program,) = chain_case(Pipeline()).programs()
    rehearse([program])
    with pytest.raises(ValueError, match="lacks gradients"):
        rehearse([with_chunks(program, lambda chunks: [*chunks[:-2], chunks[-1], chunks[-2]])])


def test_wrong_rows_are_refused():
    (program,) = chain_case(Pipeline()).programs()
    (plan,) = program.plans
    pushes, chunks = plan.pushes, plan.chunks
    same_row = (pushes[0], replace(pushes[1], store_state=pushes[0].store_state), *pushes[2:])
    not_zeroed = (replace(chunks[0], fresh_grad=chunks[0].fresh_grad[1:]), *chunks[1:])
    again = (chunks[0], replace(chunks[1], fresh_grad=chunks[1].context_grad), *chunks[2:])
    kept = (chunks[0], replace(chunks[1], own_rows=chunks[1].own_rows[:0], own_grad=chunks[1].own_grad[:0]))
    for changes, message in [
        ({"pushes": same_row}, "state rows .* some are another's"),
        ({"chunks": not_zeroed}, "accumulator rows .* hold tokens"),
        ({"chunks": again}, "accumulator rows .* some are another's"),
        ({"chunks": (*kept, *chunks[2:])}, "lacks gradients"),
        ({"state_rows": plan.state_rows + 1}, "state rows are left; 11 of 12 were used"),
        ({"grad_rows": plan.grad_rows + 1}, "accumulator rows are left; 11 of 12 were used"),
        ({"pushes": (*pushes, pushes[0])}, "calls ran"),
    ]:
        with pytest.raises(ValueError, match=message):
            rehearse([with_plan(program, **changes)])


def test_more_chunks_in_flight_than_planned_are_refused():
    case = chain_case(Pipeline(stages=2))
    programs = case.programs()
    rehearse(programs)
    programs[0] = with_plan(programs[0], in_flight=1)
    with pytest.raises(ValueError, match="2 chunks are in flight; the plan has at most 1"):
        rehearse(programs)


def other_transfer(kind: Kind, **changes) -> Broken:
    """Change what the first transfer of a kind says."""

    def change(operations: list[StageOperation]) -> None:
        at = positions(operations, kind)[0]
        operation = operations[at].operation
        transfer = replace(operation.transfer, **changes)
        operations[at] = replace(operations[at], operation=replace(operation, transfer=transfer))

    return change


def swap_receives(operations: list[StageOperation]) -> None:
    first, second = positions(operations, Kind.RECV)[:2]
    operations[first], operations[second] = operations[second], operations[first]


@pytest.mark.parametrize(
    ("stage", "change", "message"),
    [
        (1, drop(Kind.RECV), "does not have it|and gets"),
        (1, drop(Kind.SEND), "wait for each other for ever"),
        (1, swap_receives, "expects .* and gets"),
        (0, other_transfer(Kind.SEND, peer=2), "wait for each other for ever|and gets"),
        (0, other_transfer(Kind.SEND, wraps=True), "does not have it"),
        (2, other_transfer(Kind.RECV, flow=Flow.GRADIENT), "wait for each other for ever|and gets"),
        (1, other_transfer(Kind.RECV, call=Kind.FORWARD), "expects .* and gets"),
        (2, twice(Kind.SEND), "does not have it"),
    ],
)
@pytest.mark.parametrize("virtual", [1, 2])
def test_broken_transfers_are_refused(stage, change, message, virtual):
    programs = chain_case(Pipeline(stages=3, virtual=virtual)).programs()
    rehearse(programs)
    programs[stage] = broken(programs[stage], change)
    with pytest.raises(ValueError, match=message):
        rehearse(programs)
