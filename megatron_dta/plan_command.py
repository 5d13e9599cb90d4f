"""The `plan` command: what a rollout file saves and costs, on any number of ranks, in seconds and without torch."""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from megatron_dta.axes import Axes, check_axes
from megatron_dta.data.atomic import write_text
from megatron_dta.data.rollouts import read_rollouts
from megatron_dta.data.samples import Sample, columns
from megatron_dta.drawing import draw_plans
from megatron_dta.errors import UsageError
from megatron_dta.model_config import ModelConfig, parse_model_config, read_model_config
from megatron_dta.progress import say
from megatron_dta.tree.budget import WHOLE, capacity_of, row_multiple
from megatron_dta.tree.cost import open_cost
from megatron_dta.tree.outline import Outline, build_outline
from megatron_dta.tree.packing import least_pushed
from megatron_dta.tree.pipeline import Pipeline, in_flight, parts_in_flight
from megatron_dta.tree.plan import Plan
from megatron_dta.tree.planner import BatchPlan, Settings, build_plan, plan_batch
from megatron_dta.tree.ranks import node_work
from megatron_dta.tree.simulate import repeated
from megatron_dta.tree.statistics import (
    MemoryStatistics,
    PlanStatistics,
    WorkStatistics,
    memory_statistics,
    over_ranks,
    plan_statistics,
    work_statistics,
)
from megatron_dta.tree.step_time import step_timing
from megatron_dta.tree.timeline import Timing

ASSUMED = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}
"""The shape of an 8B model: what plans are made for where no model is named."""
SIMULATED_RANKS = (2, 8, 64, 512, 4096)
SAMPLES_PER_RANK = 8
"""A simulated batch is repeated until the most ranks have so many samples each, and tokens for a full chunk."""
MOST_NODES = 300_000
"""Size of a simulated batch, unless the user names the copies."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a job is laid out over devices, and what calls are padded to."""

    ranks: int = 1
    """Data-parallel ranks; all together ranks * tensor * context * pipeline devices."""
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    virtual: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    padding: int = 1
    fp8: str = "none"

    @property
    def axes(self) -> Axes:
        """What has no option here is as permissive as can be: rows are dealt, keys and values are gathered."""
        return Axes(
            tensor=self.tensor,
            sequence=self.tensor > 1,
            context=self.context,
            cp_comm="allgather",
            pipeline=self.pipeline,
            virtual=self.virtual,
            expert=self.expert,
            expert_tensor=self.expert_tensor,
        )

    @property
    def stages(self) -> Pipeline:
        return Pipeline(stages=self.pipeline, virtual=self.virtual)

    def timing(self, batch: BatchPlan) -> Timing:
        """Predict a step of a batch that was planned for this layout, on any number of ranks."""
        return step_timing(batch, self.stages, together=self.axes.together)

    @property
    def devices(self) -> int:
        return self.ranks * self.axes.replica_size

    @property
    def multiple(self) -> int:
        return row_multiple(block=self.padding, context=self.axes.multiple(), fp8=self.fp8)


def run_plan(
    rollouts: str,
    *,
    budget: int | str,
    layout: Layout,
    form: str = "whole",
    limit: int | None = None,
    truncate: int | None = None,
    mask: str = "full",
    model: str | None = None,
    dtype: str = "bf16",
    cost: str = "h200",
    state_limit: int | None = None,
    json_file: str | None = None,
    html_file: str | None = None,
    simulate: Sequence[int] | None = None,
    repeat: int | None = None,
) -> None:
    """Plan a rollout file and print what it takes; `model` names a Hugging Face config.json for work and memory.

    json_file: also write the numbers; html_file: also draw the plans; simulate: instead, predict steps of the batch
    `repeat` times, on these numbers of data-parallel ranks (empty: `SIMULATED_RANKS`).
    """
    start = time.perf_counter()
    config = read_model_config(model) if model else None
    shape = config or parse_model_config(ASSUMED)
    if repeat is not None and simulate is None:
        raise UsageError(f"repeat is {repeat} without simulate; it says how often a simulated batch is repeated")
    if simulate is not None and html_file:
        raise UsageError("simulate draws nothing; leave --html away, or plan the batch itself")
    axes = layout.axes
    if simulate is not None:
        layout = replace(layout, ranks=axes.together)  # those to simulate are multiples
    if config:
        check_axes(axes, config, layout.devices)
    settings = Settings(
        cost=open_cost(cost, shape).on(tensor=axes.tensor, context=axes.context, pipeline=axes.pipeline),
        budget=budget,
        multiple=layout.multiple,
        ranks=layout.ranks,
        together=axes.together,
        in_flight=in_flight(layout.stages),
        state_limit=state_limit,
    )
    samples = read_rollouts(
        rollouts,
        form=form,
        limit=limit,
        truncate=truncate,
        mask=mask,
        vocab_size=config.vocab_size if config else None,
        on_warning=say,
    )
    read = time.perf_counter()
    outline = build_outline(*columns(samples))
    if not config:
        say("planned for the shape of an 8B model")
    if simulate is not None:
        _simulate(outline, settings, layout, simulate, repeat, json_file)
        return
    batch = plan_batch(outline, settings)
    planned = time.perf_counter()
    plans = [_built(samples, task, settings) for task in batch.tasks]
    built = time.perf_counter()
    report = _Report.of(outline, batch, plans, layout, config, dtype)
    facts = _facts(report)
    Console().print(_table(facts, with_model=config is not None))
    say(f"read in {read - start:.2f} s, planned in {planned - read:.2f} s, built in {built - planned:.2f} s")
    if json_file:
        write_text(Path(json_file), json.dumps(report.as_json(), indent=2) + "\n")
    if html_file:
        write_text(Path(html_file), draw_plans(plans, settings.cost, title=Path(rollouts).name, facts=facts))
        say(f"drawn: {html_file}")


def _built(samples: Sequence[Sample], task, settings: Settings) -> Plan:
    own = [samples[i] for i in task.sequences.tolist()]
    return build_plan(task, *columns(own), multiple=settings.multiple, in_flight=settings.in_flight)


@dataclass(frozen=True, kw_only=True)
class _Schedule:
    """What is predicted of the ranks together."""

    ranks: int
    devices: int
    padding: int
    unsplit_tokens: int
    """Distinct tokens of the batch; ranks compute a path that is on several of them each."""
    copied_share: float
    """Tokens that ranks compute beyond those, over them."""
    least_pushed: int
    """Tokens that have to be pushed at this budget, on any ranks' own forests."""
    padded_share: float
    """Rows of padding over all rows with gradient."""
    step_seconds: float
    """Until the last rank is done, waits in its pipeline included."""
    slowest_seconds: float
    mean_seconds: float
    imbalance: float
    """The slowest rank over the mean."""
    bound_seconds: float
    """No spreading over these ranks is faster."""
    bubble: float
    """Share of the last rank's time that the busiest stage of its pipeline waits ..."""
    dense_bubble: float
    """... and would with the same work in as many equal chunks, without a push."""
    chunks: tuple[int, ...]
    """Chunks of every rank."""


@dataclass(frozen=True, kw_only=True)
class _Report:
    """Everything that `plan` tells."""

    plan: PlanStatistics
    schedule: _Schedule
    work: WorkStatistics | None
    memory: MemoryStatistics | None

    @staticmethod
    def of(outline: Outline, batch: BatchPlan, plans: list[Plan], layout: Layout, config, dtype: str) -> "_Report":
        counts = over_ranks([plan_statistics(plan) for plan in plans])
        tokens, step = max(batch.tree_tokens, 1), layout.timing(batch)
        schedule = _Schedule(
            ranks=layout.ranks,
            devices=layout.devices,
            padding=layout.multiple,
            unsplit_tokens=batch.tree_tokens,
            copied_share=float(batch.rank_tokens.sum()) / tokens - 1 if batch.tree_tokens else 0.0,
            least_pushed=sum(least_pushed(outline.part_of(task.sequences), task.capacity) for task in batch.tasks),
            padded_share=1 - counts.tree_tokens / counts.rows if counts.rows else 0.0,
            step_seconds=step.seconds,
            slowest_seconds=float(batch.seconds.max()),
            mean_seconds=float(batch.seconds.mean()),
            imbalance=_imbalance(batch),
            bound_seconds=batch.bound_seconds,
            bubble=step.bubble,
            dense_bubble=step.dense_bubble,
            chunks=tuple(len(plan.chunks) for plan in plans),
        )
        return _Report(
            plan=counts,
            schedule=schedule,
            work=work_statistics(plans, counts, config) if config else None,
            memory=_memory(counts, layout, config, dtype) if config else None,
        )

    def as_json(self) -> dict[str, Any]:
        parts: dict[str, Any] = {"plan": self.plan, "schedule": self.schedule}
        parts |= {"work": self.work, "memory_bytes": self.memory}
        return {name: asdict(part) for name, part in parts.items() if part is not None}


def _imbalance(batch: BatchPlan) -> float:
    mean = float(batch.seconds.mean())
    return float(batch.seconds.max()) / mean if mean else 1.0


def _memory(counts: PlanStatistics, layout: Layout, config: ModelConfig, dtype: str) -> MemoryStatistics:
    """Predict a device's memory; of a chunk in flight, not all parts of the model hold activations at once."""
    alive = parts_in_flight(layout.stages) / (layout.virtual * in_flight(layout.stages))
    counts = replace(counts, rows_in_flight=math.ceil(counts.rows_in_flight * alive))
    sizes = {name: getattr(layout, name) for name in ("tensor", "context", "pipeline", "expert", "expert_tensor")}
    return memory_statistics(counts, config, dtype, **sizes)


def _facts(report: _Report) -> dict[str, str]:
    """Return what a user should know, label by label."""
    c, s, work, memory = report.plan, report.schedule, report.work, report.memory
    chunks = f"{c.chunks:,} of at most {c.budget:,} rows, filled {c.fill:.3f}"
    if s.ranks > 1:
        chunks += f"; {min(s.chunks)} to {max(s.chunks)} a rank"
    unavoidable = f"; {s.least_pushed:,} is the least" if c.pushed_tokens else ""
    rows = {
        "sequences, trees, segments": f"{c.sequences:,}, {c.trees:,}, {c.segments:,} (longest path {c.longest_path:,})",
        "tokens: sequences -> tree": f"{c.sequence_tokens:,} -> {c.tree_tokens:,} ({c.token_ratio:.2f}x)",
        "attention area: sequences -> tree": f"{c.sequence_area:,} -> {c.tree_area:,} ({c.area_ratio:.2f}x)",
        "trained tokens -> LM head rows": f"{c.trained_tokens:,} -> {c.head_rows:,}",
        "chunks": chunks,
        "pushed tokens": f"{c.pushed_tokens:,} in {c.pushes:,} pushes ({c.pushed_share:.2%} of the tree{unavoidable})",
        "padding": f"calls are multiples of {s.padding} rows; {s.padded_share:.2%} of all rows are padding",
        "cache at the peak": f"{c.state_rows:,} states, {c.grad_rows:,} accumulators",
    }
    if s.ranks > 1:
        rows["ranks"] = (
            f"{s.ranks:,} data-parallel, {s.devices:,} devices; slowest over mean {s.imbalance:.4f}, tokens computed "
            f"on several ranks {s.copied_share:.2%}"
        )
    if work:
        rows["work: sequences -> tree"] = (
            f"{work.sequence_flops / 1e12:,.1f} -> {work.tree_flops / 1e12:,.1f} TFLOP ({work.flop_ratio:.2f}x), "
            f"pushes {work.push_flops / 1e12:,.1f}"
        )
        rows["predicted step"] = (
            f"{s.step_seconds:.3f} s (slowest rank {s.slowest_seconds:.3f}, mean {s.mean_seconds:.3f}, "
            f"no plan is below {s.bound_seconds:.3f})"
        )
    if s.dense_bubble:
        rows["pipeline"] = (
            f"stages wait {s.bubble:.2%} of the step; in equal chunks without pushes {s.dense_bubble:.2%}"
        )
    if memory:
        parts = asdict(memory)
        shown = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in parts.items() if name != "total")
        rows["predicted memory"] = f"{memory.total / 2**30:.2f} GiB a device ({shown})"
    return rows


def _table(facts: dict[str, str], *, with_model: bool) -> Table:
    table = Table(show_header=False)
    for name, value in facts.items():
        table.add_row(name, value)
    if not with_model:
        table.add_row("work, time and memory", "name a model's config.json with --config")
    return table


def _simulate(
    outline: Outline,
    settings: Settings,
    layout: Layout,
    ranks: Sequence[int],
    repeat: int | None,
    json_file: str | None,
) -> None:
    """Predict steps of the batch repeated, on every number of ranks, and print them."""
    counts = sorted(set(ranks or SIMULATED_RANKS))
    together = layout.axes.together
    if counts[0] < 1 or any(count % together for count in counts):
        raise UsageError(
            f"ranks to simulate are {counts}; expected positive multiples of {together} that share experts"
        )
    if repeat is not None and repeat < 1:
        raise UsageError(f"repeat is {repeat}; expected at least 1")
    if outline.num_nodes == 0:
        raise UsageError("the rollout file has no sequence; there is nothing to simulate")
    batch = repeated(outline, repeat or _copies(outline, counts[-1], settings))
    copies = len(batch.last) // len(outline.last)
    work = float(node_work(batch, settings.cost).sum())
    say(
        f"the batch {copies:,} times, contents and lengths changed: {len(batch.last):,} sequences, "
        f"{batch.num_tokens:,} tree tokens"
    )
    table = Table(
        "ranks", "devices", "step, s", "slowest/mean", "copied tokens", "work/step", "chunks a rank", "plan, s"
    )
    rows = []
    for count in track(counts, description="planning", transient=True):
        start = time.perf_counter()
        plan = plan_batch(batch, replace(settings, ranks=count))
        step = layout.timing(plan).seconds
        chunks = [len(p.rows) for p in plan.predictions]
        row = {
            "ranks": count,
            "devices": layout.devices // layout.ranks * count,
            "step_seconds": step,
            "imbalance": _imbalance(plan),
            "copied_share": float(plan.rank_tokens.sum()) / plan.tree_tokens - 1,
            "efficiency": work / count / step,
            "chunks": float(np.mean(chunks)),
            "plan_seconds": time.perf_counter() - start,
        }
        rows.append(row)
        table.add_row(
            f"{count:,}", f"{row['devices']:,}", f"{step:.3f}", f"{row['imbalance']:.4f}", f"{row['copied_share']:.2%}",
            f"{row['efficiency']:.3f}", f"{row['chunks']:.1f}", f"{row['plan_seconds']:.2f}",
        )  # fmt: skip
    Console().print(table)
    say("work/step: time of the tokens alone, each computed once and spread evenly, over the predicted step")
    if json_file:
        write_text(Path(json_file), json.dumps({"copies": copies, "steps": rows}, indent=2) + "\n")


def _copies(outline: Outline, ranks: int, settings: Settings) -> int:
    chunk = capacity_of(outline.num_tokens, settings.budget, settings.multiple) if settings.budget != WHOLE else 0
    enough = (SAMPLES_PER_RANK * ranks / len(outline.last), ranks * chunk / outline.num_tokens)
    wanted = max(1, math.ceil(max(enough)))
    most = max(1, MOST_NODES // outline.num_nodes)
    if wanted > most:
        say(f"repeated {most:,} times, not the {wanted:,} that would fill all ranks: planning would take minutes; "
            "--repeat asks for more")  # fmt: skip
    return min(wanted, most)
