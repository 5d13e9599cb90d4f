"""Pipelines over random forests: the order of their steps, the plans of their parts, and what is in flight."""

from dataclasses import fields, is_dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table

from megatron_dta.errors import UsageError
from megatron_dta.tree.cost import CallCost, CostModel
from megatron_dta.tree.outline import build_outline
from megatron_dta.tree.pipeline import Pipeline, Step, in_flight, parts_in_flight, steps
from megatron_dta.tree.plan import Kind, Plan, StageProgram
from megatron_dta.tree.planner import Settings, build_plan, build_program, plan_batch
from megatron_dta.tree.rehearsal import Rehearsal, rehearse
from megatron_dta.tree.schedule import stage_program
from tests.forests import forest_of, random_batch
from tests.pipelines import PIPELINES, RUN, cases, chain_case
from tests.replay import check


def leaves(value) -> list:
    """Flatten dataclasses and tuples; arrays as type and values."""
    if is_dataclass(value):
        return [leaf for field in fields(value) for leaf in leaves(getattr(value, field.name))]
    if isinstance(value, tuple):
        return [len(value), *(leaf for part in value for leaf in leaves(part))]
    return [(value.dtype, value.shape, value.tolist())] if isinstance(value, np.ndarray) else [value]


CACHE_ROWS = ("context_state", "store_state", "context_grad", "fresh_grad", "own_grad")


def without_rows(plan: Plan) -> list:
    """Return what a plan's calls are, but for their cache rows."""
    calls = (*plan.pushes, *plan.chunks)
    return [leaf for c in calls for f in fields(c) if f.name not in CACHE_ROWS for leaf in leaves(getattr(c, f.name))]


def ran(program: StageProgram, *kinds: Kind) -> list[tuple[Kind, int, int]]:
    """Return a program's operations of some kinds as (kind, index, part)."""
    steps = [(s.operation.kind, s.operation.index, s.part) for s in program.operations]
    return [step for step in steps if step[0] in kinds]


@settings(derandomize=True, deadline=None, database=None, max_examples=120)
@given(cases())
def test_any_forest_on_any_pipeline(case):
    pipeline, plan, programs = case.pipeline, case.plan(), case.programs()
    check_rehearsal(pipeline, rehearse(programs))
    expected = {(Kind.PUSH, i) for i in range(len(plan.pushes))}
    expected |= {(kind, i) for i in range(len(plan.chunks)) for kind in (Kind.FORWARD, Kind.BACKWARD)}
    for program in programs:
        assert program.forest is case.forest
        found = ran(program, Kind.PUSH, Kind.FORWARD, Kind.BACKWARD)
        assert sorted(found) == sorted((*call, part) for call in expected for part in range(pipeline.virtual))
        assert ran(program, *RUN) == ran(programs[0], *RUN), "links are first in, first out"
        assert ran(program, Kind.BACKWARD) == ran(programs[0], Kind.BACKWARD)
        for number, part in enumerate(program.plans):
            own = tuple(s.operation for s in program.operations if s.part == number and s.operation.transfer is None)
            assert own == part.operations
            assert without_rows(part) == without_rows(plan), "every part of the model runs the same calls"
            assert part.grad_rows == plan.grad_rows, "backwards have one order"


def check_rehearsal(pipeline: Pipeline, seen: Rehearsal) -> None:
    for stage in range(pipeline.stages):
        assert seen.parts_in_flight[stage] <= parts_in_flight(pipeline, stage=stage)
        predicted = [in_flight(pipeline, stage=stage, part=part) for part in range(pipeline.virtual)]
        assert all(most <= bound for most, bound in zip(seen.in_flight[stage], predicted))


@settings(derandomize=True, deadline=None, database=None, max_examples=40)
@given(cases(), st.randoms(use_true_random=False))
def test_every_part_replays_alone(case, random):
    """The checks that hold plans of one stage hold what any part of any stage runs, token by token."""
    stage, part = random.randrange(case.pipeline.stages), random.randrange(case.pipeline.virtual)
    program = stage_program(case.forest, case.chunk_of, pipeline=case.pipeline, stage=stage, **case.options)
    check(program.plans[part], case.options["multiple"], case.options.get("slots"))


@settings(derandomize=True, deadline=None, database=None, max_examples=40)
@given(cases())
def test_one_part_per_stage_is_a_schedule_with_as_many_chunks_in_flight_as_stages_to_come(case):
    pipeline = Pipeline(stages=case.pipeline.stages)
    for stage, program in enumerate(replace(case, pipeline=pipeline).programs()):
        (plan,) = program.plans
        assert leaves(plan) == leaves(case.plan(in_flight=pipeline.stages - stage))


@settings(derandomize=True, deadline=None, database=None, max_examples=40)
@given(cases())
def test_one_stage_runs_the_plan_as_it_is(case):
    (program,) = replace(case, pipeline=Pipeline()).programs()
    plan = case.plan()
    assert leaves(program.plans) == leaves((plan,))
    assert leaves(tuple(s.operation for s in program.operations)) == leaves(plan.operations)
    assert {(s.part, s.operation.transfer) for s in program.operations} <= {(0, None)}


@pytest.mark.parametrize("pipeline", PIPELINES, ids=str)
def test_the_order_is_megatrons(pipeline):
    """Without pushes and with full groups: warm-up, forwards and backwards as Megatron-Core has them."""
    stages, virtual = pipeline.stages, pipeline.virtual
    num_chunks = 3 * stages
    table = get_schedule_table(num_chunks, virtual, stages)
    forwards = [Step(kind=Kind.FORWARD, index=chunk, part=part) for chunk, part in table]
    backwards = [Step(kind=Kind.BACKWARD, index=chunk, part=virtual - 1 - part) for chunk, part in table]
    for stage in range(stages):
        communicator = SimpleNamespace(
            pp_group=SimpleNamespace(size=lambda: stages, rank=lambda rank=stage: rank),
            virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        )
        _, _, warm_up, _ = get_pp_rank_microbatches(num_chunks, virtual, stages, p2p_communicator=communicator)
        if virtual == 1:
            forwards = [Step(kind=Kind.FORWARD, index=chunk, part=0) for chunk in range(num_chunks)]
            backwards = [Step(kind=Kind.BACKWARD, index=chunk, part=0) for chunk in range(num_chunks)]
        steady = [step for both in zip(forwards[warm_up:], backwards) for step in both]
        left = backwards[len(forwards) - warm_up :]
        assert steps([Kind.FORWARD] * num_chunks, pipeline, stage) == [*forwards[:warm_up], *steady, *left]


@pytest.mark.parametrize("pipeline", PIPELINES, ids=str)
def test_chunks_in_flight_reach_what_is_predicted(pipeline):
    """With enough chunks the bounds are met, on every part of every stage, and those of stage 0 are the largest."""
    seen = rehearse(chain_case(pipeline, length=4 * pipeline.stages).programs())
    stages, parts = range(pipeline.stages), range(pipeline.virtual)
    assert seen.parts_in_flight == tuple(parts_in_flight(pipeline, stage=stage) for stage in stages)
    predicted = tuple(tuple(in_flight(pipeline, stage=stage, part=part) for part in parts) for stage in stages)
    assert seen.in_flight == predicted
    assert in_flight(pipeline) == max(most for own in predicted for most in own)
    assert parts_in_flight(pipeline) == max(seen.parts_in_flight)


def test_fewer_calls_than_stages():
    for pipeline in PIPELINES:
        for length in range(1, pipeline.stages):
            seen = rehearse(chain_case(pipeline, length).programs())
            assert max(most for own in seen.in_flight for most in own) <= length


def row_cost() -> CostModel:
    call = CallCost(launch=1, fixed=0.1, row=0.7, pair=0.05, context=0.01, source=0.1)
    return CostModel(machine="test", chunk=call, push=replace(call, source=0.0))


@pytest.mark.parametrize("together", [1, 2])
@pytest.mark.parametrize("pipeline", [Pipeline(), Pipeline(stages=2), Pipeline(stages=3, virtual=2)], ids=str)
def test_programs_of_a_planned_batch(pipeline, together):
    """A batch over ranks of one group, one rank without a sequence: states are within what was predicted."""
    for seed in range(6):
        batch = random_batch(np.random.default_rng(seed), most=5 if seed else 1, longest=14)
        given = Settings(
            cost=row_cost(), budget=4, multiple=2, ranks=2, together=together, in_flight=in_flight(pipeline)
        )
        plan = plan_batch(build_outline(batch.tokens, batch.loss_masks, batch.identities), given)
        calls = []
        for task, predicted in zip(plan.tasks, plan.predictions):
            own = [c and [c[i] for i in task.sequences] for c in (batch.tokens, batch.loss_masks, batch.identities)]
            programs = [
                build_program(task, *own, multiple=2, pipeline=pipeline, stage=stage)
                for stage in range(pipeline.stages)
            ]
            rehearse(programs)
            states = [[part.state_rows for part in program.plans] for program in programs]
            assert max(map(max, states)) <= predicted.state_rows
            assert pipeline.virtual > 1 or states[0] == [predicted.state_rows]
            assert {part.grad_rows for program in programs for part in program.plans} == {predicted.grad_rows}
            calls.append([ran(program, Kind.PUSH, Kind.FORWARD, Kind.BACKWARD) for program in programs])
            if pipeline.stages == 1:
                assert leaves(programs[0].plans[0]) == leaves(build_plan(task, *own, multiple=2))
        assert together == 1 or calls[0] == calls[1], "ranks of a group wait for each other for ever"


def test_a_program_of_other_sequences_is_refused():
    batch = [np.arange(5), np.arange(3)]
    (task,) = plan_batch(build_outline(batch, None), Settings(cost=row_cost(), budget=2)).tasks
    with pytest.raises(ValueError, match="not the same batch"):
        build_program(task, [np.arange(4), np.arange(3)], None, None, multiple=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": 0}, "pipeline stages is 0; expected a whole number, at least 1"),
        ({"stages": 2.0}, "pipeline stages is 2.0"),
        ({"stages": True}, "pipeline stages is True"),
        ({"stages": 2, "virtual": -1}, "pipeline virtual is -1"),
        ({"virtual": 2}, "pipeline virtual is 2 with one stage; expected 1, or at least 2 stages"),
    ],
)
def test_pipelines_that_cannot_be_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        Pipeline(**options)


@pytest.mark.parametrize("stage", [-1, 3])
def test_stages_that_are_not_there_are_refused(stage):
    pipeline = Pipeline(stages=3)
    with pytest.raises(UsageError, match=f"stage is {stage}; expected 0 to 2"):
        steps([Kind.FORWARD], pipeline, stage)
    with pytest.raises(UsageError, match=f"stage is {stage}; expected 0 to 2"):
        stage_program(forest_of([1, 2]), np.zeros(2), capacity=2, pipeline=pipeline, stage=stage)


def test_streams_of_other_kinds_are_refused():
    with pytest.raises(ValueError, match=r"the stream holds .*free"):
        steps([Kind.FORWARD, Kind.FREE], Pipeline(), 0)
