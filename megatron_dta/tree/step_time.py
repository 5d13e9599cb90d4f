"""How long a step of a planned batch takes: the slowest replica's calls, in a pipeline with what its stages wait.

Shapes: G replicas that run together, Q pushes and K chunks of each.
"""

from collections.abc import Sequence

import numpy as np

from megatron_dta.tree.pipeline import Pipeline
from megatron_dta.tree.plan import Kind
from megatron_dta.tree.planner import BatchPlan
from megatron_dta.tree.prediction import Prediction
from megatron_dta.tree.schedule import Slots
from megatron_dta.tree.timeline import CallSeconds, Timing, timing

PLAYED = 8
"""Groups of replicas, those with most work, whose pipelines are played through."""
_FORWARD = 1 / 3
"""A forward's share of a chunk's time."""


def step_timing(batch: BatchPlan, pipeline: Pipeline, *, together: int = 1) -> Timing:
    """Return how the last replica runs a batch that was planned for these stages, with `together` as in `Settings`."""
    if pipeline.stages == 1:
        seconds = batch.step_seconds
        return Timing(seconds=seconds, busy=np.array([seconds]), dense_seconds=seconds)
    groups = np.arange(len(batch.tasks)).reshape(-1, together)
    order = np.argsort(-batch.seconds[groups].max(axis=1), kind="stable")
    found = [
        _play([batch.predictions[rank] for rank in group], batch.tasks[group[0]].slots, pipeline)
        for group in groups[order[:PLAYED]]
    ]
    return max(found, key=lambda timing: timing.seconds)


def _play(group: Sequence[Prediction], slots: Slots | None, pipeline: Pipeline) -> Timing:
    """Run the calls of replicas that wait for each other at every one on all stages of their pipelines."""
    own = np.bincount(group[0].push_before, minlength=len(group[0].rows)).tolist()
    pushes = own if slots is None else slots.pushes
    stream = [kind for count in pushes for kind in [Kind.PUSH] * count + [Kind.FORWARD]]
    # predictions are of one stage's share
    push = _slowest([p.push_seconds for p in group], sum(pushes)) * pipeline.stages
    chunk = _slowest([p.chunk_seconds for p in group], len(pushes)) * pipeline.stages
    return timing(stream, pipeline, CallSeconds(push=push, forward=chunk * _FORWARD, backward=chunk * (1 - _FORWARD)))


def _slowest(seconds: Sequence[np.ndarray], num_calls: int) -> np.ndarray:
    """Return the longest time of every call over a group, float64 [calls]; who has fewer runs padding."""
    return np.max([np.pad(own, (0, num_calls - len(own))) for own in seconds], axis=0)
