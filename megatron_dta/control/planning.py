"""What the planner process does: a batch's token ids in, every rank's task out, as messages."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from megatron_dta.data.samples import Sample
from megatron_dta.tree.cost import CallCost, CostModel
from megatron_dta.tree.outline import build_outline
from megatron_dta.tree.planner import BatchPlan, Settings, Task, plan_batch
from megatron_dta.tree.schedule import Slots

HANDLER = "megatron_dta.control.planning:answer"


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What was predicted of a step; R ranks."""

    seconds: tuple[float, ...]
    """Time of every rank's own operations, [R]."""
    step_seconds: float
    bound_seconds: float
    tree_tokens: int
    """Distinct tokens of the whole batch."""
    rank_tokens: tuple[int, ...]
    """Tree tokens of every rank, [R]."""

    @property
    def imbalance(self) -> float:
        """The slowest rank over the mean."""
        return max(self.seconds) * len(self.seconds) / max(sum(self.seconds), 1e-300)


def structure_of(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the message with what planning needs of some samples: ids, which tokens are trained, identity tags."""
    return {
        "tokens": [s.tokens.astype(np.int32, copy=False) for s in samples],
        "loss_masks": [s.loss_mask for s in samples],
        "identities": [None if s.identity is None else s.identity.astype(np.int64, copy=False) for s in samples],
    }


def request(structures: Sequence[dict[str, Any]], settings: Settings) -> dict[str, Any]:
    """Put the structures of all ranks together, in their order, with what the plan has to fit."""
    joined = {name: [entry for part in structures for entry in part[name]] for name in _STRUCTURE}
    return {**joined, "settings": asdict(settings)}


_STRUCTURE = ("tokens", "loss_masks", "identities")


def answer(message: dict[str, Any]) -> dict[str, Any]:
    """Plan a batch: the handler of the planner process."""
    settings = _settings(message["settings"])
    plan = plan_batch(build_outline(*(message[name] for name in _STRUCTURE)), settings)
    return {
        **{name: [getattr(task, name) for task in plan.tasks] for name in _ARRAYS},
        "capacity": [[task.capacity, task.push_capacity] for task in plan.tasks],
        "slots": [None if task.slots is None else list(task.slots.pushes) for task in plan.tasks],
        "forecast": {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(forecast_of(plan)).items()},
    }


_ARRAYS = ("sequences", "parts", "run_length", "run_chunk", "lengths")


def forecast_of(plan: BatchPlan) -> Forecast:
    """Return what a plan predicts, as plain numbers."""
    return Forecast(
        seconds=tuple(plan.seconds.tolist()),
        step_seconds=float(plan.step_seconds),
        bound_seconds=float(plan.bound_seconds),
        tree_tokens=plan.tree_tokens,
        rank_tokens=tuple(plan.rank_tokens.tolist()),
    )


def tasks_in(message: dict[str, Any]) -> list[Task]:
    """Read the tasks of all ranks from an answer."""
    return [
        Task(
            **{name: message[name][rank] for name in _ARRAYS},
            capacity=capacity,
            push_capacity=push_capacity,
            slots=None if slots is None else Slots(pushes=tuple(slots)),
        )
        for rank, ((capacity, push_capacity), slots) in enumerate(zip(message["capacity"], message["slots"]))
    ]


def forecast_in(message: dict[str, Any]) -> Forecast:
    """Read the forecast from an answer."""
    raw = message["forecast"]
    return Forecast(**raw | {name: tuple(raw[name]) for name in ("seconds", "rank_tokens")})


def _settings(raw: dict[str, Any]) -> Settings:
    cost = raw["cost"]
    calls = {name: CallCost(**cost[name]) for name in ("chunk", "push")}
    return Settings(**raw | {"cost": CostModel(machine=cost["machine"], fit=cost["fit"], **calls)})
