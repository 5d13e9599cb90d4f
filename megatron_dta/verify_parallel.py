"""Are all parallel axes exact? The same samples on many processes, and each alone on one, compared."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megatron_dta.axes import Axes
from megatron_dta.control.communicator import Communicator, gather_numbers
from megatron_dta.control.wire import pack, unpack
from megatron_dta.data.samples import Sample, columns
from megatron_dta.engine.base import StepResult
from megatron_dta.engine.batch import merged_metrics, per_sequence, scope_of, term_index
from megatron_dta.engine.engine import TreeEngine
from megatron_dta.mcore import parallel
from megatron_dta.mcore.gradients import Gradients
from megatron_dta.mcore.model import TreeModel
from megatron_dta.mcore.shards import on_root
from megatron_dta.tree.outline import build_outline
from megatron_dta.tree.planner import Task, plan_batch
from megatron_dta.verify import (
    Pass,
    Reference,
    Verdict,
    difference,
    each_alone,
    logprob_difference,
    main_grads,
    prepared,
    random_objective,
)


def verify_parallel(
    open_: Callable[[str], TreeModel],
    samples: Sequence[Sample],
    axes: Axes,
    communicator: Communicator,
    *,
    dtype: str,
    budget: int | str,
    backend: str | None = None,
    padding: int = 1,
    temperature: float = 1.0,
    say: Callable[[str], object] = lambda message: None,
) -> Verdict | None:
    """Run samples over all processes, laid out on `axes`, and each alone on process 0; return process 0's verdict.

    Collective over all processes, which have the same samples. open_: opens this process's share of the model, in a
    given dtype, for the axes that are set up; the model is the same for any. Tolerances are those of `verify`. Raises
    UsageError for axes that the model refuses.
    """
    samples, trained = prepared(samples)
    options: dict[str, Any] = {"dtype": dtype, "temperature": temperature, "say": say}
    alone = on_process_0(open_, samples, communicator, **options)
    say(f"{len(samples)} samples, {trained:,} trained tokens on {axes.describe()}, {communicator.size} processes ...")
    parallel.initialize(axes=axes)
    engine = TreeEngine(open_(dtype), budget=budget, backend=backend, multiple=padding, temperature=temperature)
    return compare(engine, samples, communicator, alone)


def on_process_0(
    open_: Callable[[str], TreeModel], samples: Sequence[Sample], communicator: Communicator, **options
) -> Reference | None:  # fmt: skip
    """Run each sequence alone on process 0 while the others wait; what fails there is raised on all of them."""
    parallel.initialize(axes=Axes())
    found: dict[str, Reference] = {}

    def run() -> None:
        found["alone"] = each_alone(open_(options["dtype"]), open_, samples, **options)

    on_root(communicator, run)
    return found.get("alone")


def compare(
    engine: TreeEngine, samples: Sequence[Sample], communicator: Communicator, alone: Reference | None
) -> Verdict | None:  # fmt: skip
    """Run `prepared` samples twice on all processes and hold them to process 0's reference; return its verdict."""
    run = ParallelRun(engine, samples, communicator)
    try:
        found, again, swept = run.train(), run.train(), run.sweep()
    finally:
        run.gradients.release()
    if alone is None or found is None or again is None or swept is None:
        return None
    tolerance = alone.tolerance(found.reuse)
    return Verdict(
        tree=difference(found, alone.reference),
        sweep=logprob_difference(swept, found.logprobs),
        tolerance=tolerance,
        reuse=found.reuse,
        trained_tokens=run.scope.num_terms,
        repeat=difference(again, found).grad,
        repeat_allowed=0.0 if engine.model.device.type == "cpu" else max(tolerance.grads.values()),
    )


class ParallelRun:
    """Passes of this process's share; outcomes come together on process 0, None elsewhere."""

    def __init__(self, engine: TreeEngine, samples: Sequence[Sample], communicator: Communicator):
        """Plan for all replicas, on every process alike."""
        self.engine, self.communicator, self.all_samples = engine, communicator, samples
        self.axes, self.scope = engine.model.axes, scope_of(samples)
        replicas = self.axes.replicas(communicator.size)
        settings = replace(engine.settings, ranks=replicas, together=self.axes.together)
        self.tasks: Sequence[Task] = plan_batch(build_outline(*columns(samples)), settings).tasks
        self.task = self.tasks[self.axes.replica_of(communicator.rank, communicator.size)]
        self.samples = [samples[i] for i in self.task.sequences.tolist()]
        self.program = engine.program(self.task, self.samples)
        self.gradients = Gradients(engine.model.parts, engine.model.transformer, distributed_optimizer=False)

    def backward(self) -> StepResult:
        """Leave the finished gradient of one step in the main gradients; return this process's share of it."""
        self.gradients.begin()
        result = self.engine.train_batch(
            self.samples,
            random_objective(),
            scope=self.scope,
            plan=self.program,
            on_last_backward=self.gradients.last_backward,
        )
        self.gradients.finish()
        return result

    def train(self) -> Pass | None:
        """Run forward and backward once."""
        result = self.backward()
        values = result.term_logprobs.double().cpu().numpy()
        logprobs = self._in_order(per_sequence(self.samples, term_index(self.samples), values))
        grads = main_grads(self.engine.model, self.communicator)
        parts = gather_numbers(self.communicator, {"totals": result.totals, "executed": result.executed_tokens})
        if logprobs is None or grads is None:
            return None
        executed = sum(parts[leader]["executed"] for leader in self._leaders())
        return Pass(
            loss=merged_metrics([part["totals"] for part in parts], self.scope.num_terms)["loss"],
            logprobs=logprobs,
            grads=grads,
            reuse=sum(len(s.tokens) for s in self.all_samples) / max(executed, 1),
        )

    def sweep(self) -> list[np.ndarray] | None:
        """Return all samples' log-probs without gradient."""
        return self._in_order(self.engine.forward_batch(self.samples, plan=self.program))

    def _leaders(self) -> list[int]:
        size = self.communicator.size
        replicas = [self.axes.replica_of(process, size) for process in range(size)]
        return [replicas.index(replica) for replica in range(len(self.tasks))]

    def _in_order(self, values: list[np.ndarray]) -> list[np.ndarray] | None:
        """Bring every replica's values to process 0, in the samples' order."""
        gathered = self.communicator.gather(pack({"values": values}))
        if gathered is None:
            return None
        ordered: list[np.ndarray] = [np.zeros(0)] * len(self.all_samples)
        for leader, task in zip(self._leaders(), self.tasks):
            for place, value in zip(task.sequences.tolist(), unpack(gathered[leader])["values"]):
                ordered[place] = value
        return ordered
