"""Pipelines for tests: forests in many small chunks, on any stages and parts, with the programs of all stages."""

from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st

from megatron_dta.tree.forest import Forest, build_forest
from megatron_dta.tree.pipeline import Pipeline
from megatron_dta.tree.plan import Kind, Plan, StageProgram
from megatron_dta.tree.schedule import Slots, schedule, stage_program
from tests.forests import SHAPES, forest_of, random_assignment, random_batch, shaped
from tools.bench.baselines import aligned_cuts

PIPELINES = [Pipeline(stages=stages, virtual=virtual) for stages in (2, 3, 4, 8) for virtual in (1, 2, 3, 4)]
RUN = (Kind.PUSH, Kind.FORWARD)


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """A forest cut into chunks, and how its calls are made."""

    forest: Forest
    chunk_of: np.ndarray
    options: dict
    pipeline: Pipeline

    def plan(self, in_flight: int = 1) -> Plan:
        return schedule(self.forest, self.chunk_of, in_flight=in_flight, **self.options)

    def programs(self) -> list[StageProgram]:
        pipeline = self.pipeline
        return [
            stage_program(self.forest, self.chunk_of, pipeline=pipeline, stage=stage, **self.options)
            for stage in range(pipeline.stages)
        ]


def with_slots(case: Case, rng: np.random.Generator) -> Case:
    """Give a case the calls of a group that makes more of them: pushes earlier, and calls of padding."""
    before = [len(run) for run in "".join("p" if k is Kind.PUSH else "f" for k in stream_of(case.plan())).split("f")]
    pushes = [count + int(rng.integers(0, 2)) for count in before[:-1]] + rng.integers(0, 2, rng.integers(3)).tolist()
    pushes = pushes or [0]
    pushes[0] += int(rng.integers(0, 2))
    return replace(case, options=case.options | {"slots": Slots(pushes=tuple(pushes))})


@st.composite
def cases(draw) -> Case:
    """Draw a forest in many small chunks, on any pipeline, perhaps with slots."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    name = draw(st.sampled_from(["random"] * 6 + ["nothing", *SHAPES]))
    if name == "nothing":
        forest = build_forest([], [])
    else:
        forest = random_batch(rng, most=12, longest=12).forest() if name == "random" else shaped(name)
    multiple = draw(st.integers(1, 3))
    if draw(st.booleans()):
        chunk_of = random_assignment(forest, rng, draw(st.integers(1, 9)))
    else:
        chunk_of = aligned_cuts(forest, draw(st.integers(max(1, forest.num_tokens // 24), 9)))
    capacity = -(-int(np.bincount(chunk_of, minlength=1).max()) // multiple) * multiple
    options = {"capacity": capacity, "multiple": multiple, "push_capacity": draw(st.integers(1, capacity or 1))}
    stages = draw(st.integers(1, 8))
    pipeline = Pipeline(stages=stages, virtual=draw(st.integers(1, 4)) if stages > 1 else 1)
    case = Case(forest=forest, chunk_of=chunk_of, options=options, pipeline=pipeline)
    return with_slots(case, rng) if name == "nothing" or draw(st.integers(0, 2)) == 0 else case


def chain_case(pipeline: Pipeline, length: int = 12) -> Case:
    """Return a path of one-token chunks: the first push is read by all others, gradients go through every chunk."""
    forest = forest_of(list(range(length)))
    chunk_of = np.arange(length)[::-1]
    return Case(forest=forest, chunk_of=chunk_of, options={"capacity": 1, "push_capacity": 4}, pipeline=pipeline)


def stream_of(plan: Plan) -> list[Kind]:
    """Return a plan's calls as they start."""
    return [operation.kind for operation in plan.operations if operation.kind in RUN]
