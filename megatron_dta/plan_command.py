"""The `plan` command: what a rollout file would save and cost, in seconds and without torch."""

import json
import time
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_dta.data.atomic import replaced
from megatron_dta.data.rollouts import read_rollouts
from megatron_dta.errors import UsageError
from megatron_dta.model_config import read_model_config
from megatron_dta.progress import say
from megatron_dta.tree.forest import build_forest
from megatron_dta.tree.schedule import make_plan
from megatron_dta.tree.statistics import (
    MemoryStatistics,
    PlanStatistics,
    WorkStatistics,
    as_json,
    memory_statistics,
    plan_statistics,
    work_statistics,
)


def run_plan(
    rollouts: str,
    *,
    budget: int | str,
    padding: int = 1,
    form: str = "whole",
    limit: int | None = None,
    truncate: int | None = None,
    mask: str = "full",
    model: str | None = None,
    dtype: str = "bf16",
    json_file: str | None = None,
) -> None:
    """Plan a rollout file and print the statistics; `model` names a Hugging Face config.json for work and memory."""
    start = time.perf_counter()
    config = read_model_config(model) if model else None
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
    forest = build_forest([s.tokens for s in samples], [s.loss_mask for s in samples], [s.identity for s in samples])
    plan = make_plan(forest, budget, multiple=padding)
    counts = plan_statistics(plan)
    work = work_statistics(plan, counts, config) if config else None
    memory = memory_statistics(counts, config, dtype) if config else None
    planned = time.perf_counter()
    Console().print(_table(counts, work, memory))
    say(f"read in {read - start:.2f} s, planned in {planned - read:.2f} s")
    if json_file:
        _write(Path(json_file), json.dumps(as_json(counts, work, memory), indent=2) + "\n")


def _table(counts: PlanStatistics, work: WorkStatistics | None, memory: MemoryStatistics | None) -> Table:
    table = Table(show_header=False)
    c = counts
    rows = {
        "sequences, trees, segments": f"{c.sequences:,}, {c.trees:,}, {c.segments:,} (longest path {c.longest_path:,})",
        "tokens: sequences -> tree": f"{c.sequence_tokens:,} -> {c.tree_tokens:,} ({c.token_ratio:.2f}x)",
        "attention area: sequences -> tree": f"{c.sequence_area:,} -> {c.tree_area:,} ({c.area_ratio:.2f}x)",
        "trained tokens -> LM head rows": f"{c.trained_tokens:,} -> {c.head_rows:,}",
        "chunks": f"{c.chunks:,} of at most {c.budget:,} rows, filled {c.fill:.3f}",
        "pushed tokens": f"{c.pushed_tokens:,} in {c.pushes:,} pushes ({c.pushed_share:.2%} of the tree)",
        "cache at the peak": f"{c.state_rows:,} states, {c.grad_rows:,} accumulators",
    }
    if work:
        rows["work: sequences -> tree"] = (
            f"{work.sequence_flops / 1e12:,.1f} -> {work.tree_flops / 1e12:,.1f} TFLOP ({work.flop_ratio:.2f}x), "
            f"pushes {work.push_flops / 1e12:,.1f}"
        )
    if memory:
        parts = asdict(memory)
        shown = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in parts.items() if name != "total")
        rows["predicted memory"] = f"{memory.total / 2**30:.2f} GiB ({shown})"
    for name, value in rows.items():
        table.add_row(name, value)
    if not work:
        table.add_row("work and memory", "name a model's config.json with --config")
    return table


def _write(path: Path, text: str) -> None:
    try:
        with replaced(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise UsageError(f"{path}: cannot write ({error.strerror})") from None
