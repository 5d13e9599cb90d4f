"""Pipelines against the clock: the longest path, the textbook's bubble, and stages that wait for ever."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dta.tree.pipeline import Pipeline, Step, steps, with_transfers
from megatron_dta.tree.plan import Flow, Kind, Operation, Plan, StageOperation
from megatron_dta.tree.rehearsal import rehearse
from megatron_dta.tree.timeline import CallSeconds, play, timing
from tests.pipelines import PIPELINES, RUN, cases, chain_case, stream_of


def free_of_charge(stage: int, step: StageOperation) -> float:
    return 0.0


def test_a_message_that_nobody_receives_is_refused():
    """Stage 0 leaves its last backward and the message for it away."""
    first, second = (program.operations for program in chain_case(Pipeline(stages=2)).programs())
    last = max(i for i, step in enumerate(first) if step.operation.kind is Kind.RECV)
    with pytest.raises(ValueError, match="nobody sends, receives or uses"):
        play([first[:last], second], free_of_charge, Pipeline(stages=2))


@pytest.mark.parametrize("virtual", [2, 4])
def test_stages_that_do_not_agree_on_the_order_are_refused(virtual):
    """Groups of another size on one stage: what arrives is not what it expects."""
    pipeline, stream = Pipeline(stages=4, virtual=virtual), [Kind.FORWARD] * 8
    programs = [program_of(steps(stream, pipeline, stage), pipeline, stage) for stage in range(4)]
    play(programs, free_of_charge, pipeline)
    programs[1] = program_of(in_groups([8], pipeline, 1), pipeline, 1)
    with pytest.raises(ValueError, match=r"wait for each other for ever|and gets"):
        play(programs, free_of_charge, pipeline)


def program_of(order: list[Step], pipeline: Pipeline, stage: int) -> tuple[StageOperation, ...]:
    """Add transfers to steps."""
    parts = [[s for s in order if s.part == part] for part in range(pipeline.virtual)]
    operations = [[Operation(kind=s.kind, index=s.index) for s in part] for part in parts]
    return with_transfers(order, operations, pipeline, stage)


def in_groups(sizes: Sequence[int], pipeline: Pipeline, stage: int) -> list[Step]:
    """Order chunks as Megatron does, in groups of any sizes that make no idle turns."""
    table, first = [], 0
    for size in sizes:
        table += [(part, first + i) for part in range(pipeline.virtual) for i in range(size)]
        first += size
    forwards = [Step(kind=Kind.FORWARD, index=index, part=part) for part, index in table]
    backwards = [Step(kind=Kind.BACKWARD, index=i, part=pipeline.virtual - 1 - part) for part, i in table]
    ahead = min(pipeline.warm_up(stage), len(table))
    both = [step for pair in zip(forwards[ahead:], backwards) for step in pair]
    return [*forwards[:ahead], *both, *backwards[len(table) - ahead :]]


@pytest.mark.parametrize(("stages", "virtual", "num_chunks"), [(4, 3, 5), (5, 2, 7), (8, 2, 20), (8, 4, 9)])
def test_a_small_last_group_without_idle_turns_waits_for_ever(stages, virtual, num_chunks):
    """Why a last group keeps the turns of a full one."""
    pipeline = Pipeline(stages=stages, virtual=virtual)
    sizes = [stages] * (num_chunks // stages) + [num_chunks % stages]
    for is_padded in (True, False):
        orders = [
            steps([Kind.FORWARD] * num_chunks, pipeline, stage) if is_padded else in_groups(sizes, pipeline, stage)
            for stage in range(stages)
        ]
        programs = [program_of(order, pipeline, stage) for stage, order in enumerate(orders)]
        if is_padded:
            play(programs, free_of_charge, pipeline)
        else:
            with pytest.raises(ValueError, match="stages wait for each other for ever: stage 0 for"):
                play(programs, free_of_charge, pipeline)


@pytest.mark.parametrize("pipeline", PIPELINES, ids=str)
def test_a_sweep_leaves_gradients_away(pipeline):
    """Forward only: the same programs without backwards, frees and the gradients' transfers."""
    kept = [
        [
            s
            for s in program.operations
            if s.operation.kind not in (Kind.BACKWARD, Kind.FREE)
            and (s.operation.transfer is None or s.operation.transfer.flow is Flow.ACTIVATION)
        ]
        for program in chain_case(pipeline).programs()
    ]
    play(kept, free_of_charge, pipeline)


def calls_seconds(plan: Plan, rng: np.random.Generator) -> CallSeconds:
    return CallSeconds(
        push=rng.uniform(0.1, 1, len(plan.pushes)),
        forward=rng.uniform(0.1, 2, len(plan.chunks)),
        backward=rng.uniform(0.1, 4, len(plan.chunks)),
    )


@pytest.mark.parametrize("pipeline", PIPELINES, ids=str)
@pytest.mark.parametrize("groups", [1, 3])
def test_equal_chunks_have_the_bubble_of_the_textbook(pipeline, groups):
    num_chunks = groups * pipeline.stages
    seconds = CallSeconds(push=np.zeros(0), forward=np.ones(num_chunks), backward=np.full(num_chunks, 2.0))
    found = timing([Kind.FORWARD] * num_chunks, pipeline, seconds)
    bubble = (pipeline.stages - 1) / (pipeline.virtual * num_chunks + pipeline.stages - 1)
    assert found.bubble == pytest.approx(bubble, rel=1e-12)
    assert found.dense_bubble == pytest.approx(bubble, rel=1e-12)
    np.testing.assert_allclose(found.busy, 3 * num_chunks / pipeline.stages, rtol=1e-12)


@pytest.mark.parametrize("stages", [2, 5, 8])
@pytest.mark.parametrize("num_chunks", [1, 7, 13])
def test_the_bubble_of_one_part_needs_no_full_group(stages, num_chunks):
    seconds = CallSeconds(push=np.zeros(0), forward=np.ones(num_chunks), backward=np.full(num_chunks, 2.0))
    found = timing([Kind.FORWARD] * num_chunks, Pipeline(stages=stages), seconds)
    assert found.bubble == pytest.approx((stages - 1) / (num_chunks + stages - 1), rel=1e-12)


def longest_path(orders: list[list[Step]], pipeline: Pipeline, share: Callable[[Step], float]) -> float:
    """Return when the last step ends, by relaxing the end of every step until nothing changes."""
    end: dict[tuple[Kind, int, int], float] = {}
    for _ in range(10_000):
        before = dict(end)
        for stage, order in enumerate(orders):
            clock = 0.0
            for step in order:
                place = step.part * pipeline.stages + stage
                origin = place + (1 if step.kind is Kind.BACKWARD else -1)
                clock = max(clock, end.get((step.kind, step.index, origin), 0.0)) + share(step)
                end[step.kind, step.index, place] = clock
        if end == before:
            return max(end.values())
    raise AssertionError("the steps wait for each other for ever")


@settings(derandomize=True, deadline=None, database=None, max_examples=40)
@given(cases(), st.integers(0, 2**32 - 1))
def test_the_time_is_the_longest_path(case, seed):
    pipeline, plan = case.pipeline, case.plan()
    seconds = calls_seconds(plan, np.random.default_rng(seed))
    found = timing(stream_of(plan), pipeline, seconds)
    of_kind = {Kind.PUSH: seconds.push, Kind.FORWARD: seconds.forward, Kind.BACKWARD: seconds.backward}
    orders = [steps(stream_of(plan), pipeline, stage) for stage in range(pipeline.stages)]
    if not plan.chunks:
        assert found.seconds == found.bubble == 0.0
        return
    expected = longest_path(orders, pipeline, lambda step: of_kind[step.kind][step.index] / pipeline.parts)
    assert found.seconds == pytest.approx(expected, rel=1e-12)
    work = sum(values.sum() for values in of_kind.values())
    np.testing.assert_allclose(found.busy, work / pipeline.stages, rtol=1e-12)
    assert 0.0 <= found.bubble < 1.0
    seen = rehearse(case.programs(), seconds).timing
    assert (seen.seconds, seen.dense_seconds) == (found.seconds, found.dense_seconds)


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_a_push_between_equal_chunks_takes_its_own_time_and_no_more(stages):
    """Every stage makes the push at its own time: the pipeline is not emptied for it."""
    chunks = 4 * stages
    seconds = CallSeconds(push=np.ones(1), forward=np.ones(chunks), backward=np.full(chunks, 2.0))
    stream = [Kind.FORWARD] * (chunks // 2) + [Kind.PUSH] + [Kind.FORWARD] * (chunks // 2)
    without = timing([Kind.FORWARD] * chunks, Pipeline(stages=stages), replace(seconds, push=np.zeros(0)))
    found = timing(stream, Pipeline(stages=stages), seconds)
    assert found.seconds - without.seconds == pytest.approx(1 / stages, rel=1e-9)


@pytest.mark.parametrize("pipeline", PIPELINES, ids=str)
def test_pushes_at_the_end_of_a_stream_and_streams_without_a_chunk(pipeline):
    for stream in ([], [Kind.PUSH], [Kind.PUSH] * 9, [Kind.FORWARD, Kind.PUSH, Kind.PUSH]):
        num_pushes, num_chunks = (stream.count(kind) for kind in RUN)
        seconds = CallSeconds(push=np.ones(num_pushes), forward=np.ones(num_chunks), backward=np.ones(num_chunks))
        assert timing(stream, pipeline, seconds).busy.sum() == pytest.approx(num_pushes + 2 * num_chunks)
