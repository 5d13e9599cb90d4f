"""Times of planned steps: in a pipeline, what the programs of all stages of the last replica take."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_dta.tree.pipeline import Pipeline, in_flight
from megatron_dta.tree.planner import BatchPlan, Settings, build_program
from megatron_dta.tree.rehearsal import rehearse
from megatron_dta.tree.step_time import PLAYED, step_timing
from megatron_dta.tree.timeline import CallSeconds, Timing
from tests.forests import SHAPES, random_batch
from tests.tree.test_planner import COSTS, Case, batch_of

PIPELINES = [Pipeline(stages=2), Pipeline(stages=3), Pipeline(stages=2, virtual=2), Pipeline(stages=4, virtual=3)]


def case_of(batch, pipeline: Pipeline, **settings) -> Case:
    """Return a batch with what small chunks of it have to fit."""
    cost = COSTS["balanced"].on(pipeline=pipeline.stages)
    return Case(batch=batch, settings=Settings(cost=cost, budget=5, in_flight=in_flight(pipeline), **settings))


def rehearsed(case: Case, plan: BatchPlan, pipeline: Pipeline) -> list[Timing]:
    """Return how every group of ranks runs its real programs, each call as long as the longest of the group's."""
    together = case.settings.together
    found = []
    for first in range(0, len(plan.tasks), together):
        group = plan.predictions[first : first + together]
        programs = [
            [
                build_program(task, *case.part(task.sequences), multiple=1, pipeline=pipeline, stage=stage)
                for stage in range(pipeline.stages)
            ]
            for task in plan.tasks[first : first + together]
        ]
        calls = programs[0][0].plans[0]
        seconds = {"push": np.zeros(len(calls.pushes)), "chunk": np.zeros(len(calls.chunks))}
        for prediction in group:
            for name, own in (("push", prediction.push_seconds), ("chunk", prediction.chunk_seconds)):
                longest = seconds[name][: len(own)]
                np.maximum(longest, own * pipeline.stages, out=longest)
        whole = CallSeconds(push=seconds["push"], forward=seconds["chunk"] / 3, backward=seconds["chunk"] * 2 / 3)
        found += [rehearse(own, whole).timing for own in programs]
    return found


@pytest.mark.parametrize("pipeline", PIPELINES, ids=str)
@pytest.mark.parametrize(("ranks", "together"), [(1, 1), (3, 1), (4, 2)])
def test_a_step_takes_what_its_programs_take(pipeline, ranks, together):
    """Also where replicas share experts: calls of padding, and pushes where another rank needs one."""
    for seed in range(3):
        batch = random_batch(np.random.default_rng(seed), most=12, longest=12)
        case = case_of(batch, pipeline, ranks=ranks, together=together)
        plan = case.plan()
        slowest = max(timing.seconds for timing in rehearsed(case, plan, pipeline))
        found = step_timing(plan, pipeline, together=together)
        assert found.seconds == pytest.approx(slowest, rel=1e-12)
        assert found.seconds >= plan.seconds.max() * (1 - 1e-12)


def test_negative_control_pushes_are_made_where_they_are_needed():
    """The same calls with all pushes at the start take another time."""
    pipeline = Pipeline(stages=3)
    plan = case_of(random_batch(np.random.default_rng(0), most=12, longest=12), pipeline).plan()
    at_start = [replace(p, push_before=np.zeros_like(p.push_before)) for p in plan.predictions]
    early = step_timing(replace(plan, predictions=tuple(at_start)), pipeline)
    assert early.seconds != pytest.approx(step_timing(plan, pipeline).seconds, rel=1e-3)


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name):
    pipeline = Pipeline(stages=4, virtual=2)
    case = case_of(batch_of(*SHAPES[name]), pipeline, ranks=2)
    plan = case.plan()
    expected = max(timing.seconds for timing in rehearsed(case, plan, pipeline))
    assert step_timing(plan, pipeline).seconds == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("together", [1, 2])
def test_one_stage_waits_for_nothing(together):
    case = case_of(random_batch(np.random.default_rng(1)), Pipeline(), ranks=2, together=together)
    plan = case.plan()
    found = step_timing(plan, Pipeline(), together=together)
    assert (found.seconds, found.bubble, found.dense_bubble) == (plan.step_seconds, 0.0, 0.0)


def test_equal_chunks_have_the_bubble_of_the_textbook():
    """Eight sequences that share nothing, each a chunk."""
    batch = batch_of(*([10 * k + i for i in range(5)] for k in range(8)))
    for pipeline in (Pipeline(stages=4), Pipeline(stages=4, virtual=2)):
        found = step_timing(case_of(batch, pipeline).plan(), pipeline)
        assert found.bubble == pytest.approx(3 / (8 * pipeline.virtual + 3), rel=1e-12)
        assert found.bubble == pytest.approx(found.dense_bubble, rel=1e-12)


def test_of_many_ranks_those_with_most_work_are_played():
    """The last rank of those is at least as late as the one with most work."""
    pipeline = Pipeline(stages=2)
    batch = random_batch(np.random.default_rng(3), most=60, longest=20)
    case = case_of(batch, pipeline, ranks=3 * PLAYED)
    plan = case.plan()
    every = rehearsed(case, plan, pipeline)
    found = step_timing(plan, pipeline).seconds
    assert every[int(plan.seconds.argmax())].seconds * (1 - 1e-12) <= found
    assert found <= max(timing.seconds for timing in every) * (1 + 1e-12)


def test_no_sequence_at_all():
    case = case_of(batch_of(), Pipeline(stages=2), ranks=2)
    assert step_timing(case.plan(), Pipeline(stages=2)).seconds == 0.0
