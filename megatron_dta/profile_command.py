"""The `profile` command: measure calls of a model on this machine, fit their cost, print predicted and measured."""

import datetime
import os
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from megatron_dta.attention.api import get_backend
from megatron_dta.checkpoint.open_model import open_model
from megatron_dta.config import Config
from megatron_dta.data.atomic import write_text
from megatron_dta.engine.engine import default_backend
from megatron_dta.engine.measure import Measured, measure, shapes
from megatron_dta.engine.optimizer import MasterAdamW
from megatron_dta.errors import UsageError
from megatron_dta.profile_fit import errors, fit_calls
from megatron_dta.progress import say
from megatron_dta.tree.cost import CallCost, CostModel, cost_json, model_shape


def run_profile(config: Config, out: str | Path, repeats: int) -> CostModel:
    """Measure the config's model with its engine, write the fitted cost to `out`, print and return it.

    Rows and contexts go up to `engine.budget`. Raises UsageError before anything is measured for a config that cannot
    be profiled or a file that cannot be written, and afterwards if too few shapes fit the memory.
    """
    budget = _check(config, repeats)
    _check_writable(Path(out))
    model, _ = open_model(
        hf_folder=config.model.hf_folder,
        hf_config=config.model.hf_config,
        dtype=config.model.dtype,
        seed=config.model.seed,
        recompute=config.engine.recompute,
        experts=config.moe.experts,
    )
    attention = config.engine.attention or default_backend(model)
    backend = get_backend(attention)
    optimizer = MasterAdamW(model, config.optimizer, total_updates=1)  # its gradient buffers are part of a chunk's time
    chosen = shapes(budget, config.engine.padding, model.model_config.max_positions)
    machine = machine_name(model.device)
    say(f"{len(chosen)} shapes of up to {budget:,} rows on {machine}; attention by {type(backend).__name__}")
    measured = []
    for call in measure(
        model,
        optimizer,
        chosen,
        budget=budget,
        multiple=config.engine.padding,
        backend=backend,
        temperature=config.rl.temperature,
        repeats=repeats,
        on_warning=say,
    ):
        measured.append(call)
        say(
            f"shape {len(measured)}/{len(chosen)}: {call.rows:,} rows, {call.pairs:,} pairs, {call.context:,} context, "
            f"{call.sources:,} sources | chunk {call.chunk_seconds:.3g} s, push {call.push_seconds:.3g} s"
        )
    chunk, push = _fitted("chunk", measured), _fitted("push", measured)
    fit = {
        "source": "profile",
        "machine": machine,
        "model": model_shape(model.model_config),
        "dtype": config.model.dtype,
        "attention": attention,
        "recompute": config.engine.recompute,
        "budget": budget,
        "padding": config.engine.padding,
        "repeats": repeats,
        "torch": torch.__version__,
        "megatron_core": metadata.version("megatron-core"),
        "date": datetime.date.today().isoformat(),
        "shapes": len(measured),
        "errors": {"chunk": chunk.errors, "push": push.errors},
        "chunks": chunk.table,
        "pushes": push.table,
    }
    cost = CostModel(machine=machine, chunk=chunk.cost, push=push.cost, fit=fit)
    write_text(Path(out), cost_json(cost))
    Console().print(_table(chunk, push))
    for name, fitted in (("chunks", chunk), ("pushes", push)):
        say(f"{name}: median error {fitted.errors['median']:.1%}, worst {fitted.errors['worst']:.1%}")
    say(f"cost model: {out}")
    return cost


def machine_name(device: torch.device) -> str:
    """Return the GPU's name, or the CPU's with its number of threads: what a cost model is valid for."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{_cpu_model()}, {threads} thread{'s' if threads > 1 else ''}"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "CPU"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")


@dataclass(frozen=True, kw_only=True)
class _Fitted:
    """The cost of one kind of call with what it was fitted to."""

    cost: CallCost
    errors: dict[str, float]
    """`median` and `worst` relative error."""
    table: list[dict[str, Any]]
    """Per shape: rows, pairs, context, sources, seconds, predicted."""


def _fitted(kind: str, measured: list[Measured]) -> _Fitted:
    is_chunk = kind == "chunk"
    counts = [(m.rows, m.pairs, m.context, m.sources if is_chunk else 0) for m in measured]
    seconds = np.array([m.chunk_seconds if is_chunk else m.push_seconds for m in measured], np.float64)
    rows, pairs, context, sources = np.array(counts, np.float64).reshape(-1, 4).T
    cost = fit_calls(rows, pairs, context, sources, seconds)
    median, worst = errors(cost, rows, pairs, context, sources, seconds)
    predicted = cost.seconds(rows, pairs, context, sources)
    names = ("rows", "pairs", "context", "sources", "seconds", "predicted")
    table = [dict(zip(names, (*c, float(s), float(p)))) for c, s, p in zip(counts, seconds, predicted)]
    return _Fitted(cost=cost, errors={"median": median, "worst": worst}, table=table)


def _table(chunk: _Fitted, push: _Fitted) -> Table:
    table = Table(title="measured milliseconds, and how far the prediction is off")
    for name in ("rows", "pairs", "context", "sources", "chunk", "off", "push", "off"):
        table.add_column(name, justify="right")
    for c, p in zip(chunk.table, push.table):
        counts = [f"{c[name]:,}" for name in ("rows", "pairs", "context", "sources")]
        table.add_row(*counts, *_compared(c), *_compared(p))
    return table


def _compared(row: dict[str, Any]) -> tuple[str, str]:
    return f"{row['seconds'] * 1e3:,.2f}", f"{row['predicted'] / row['seconds'] - 1:+.1%}"


def _check(config: Config, repeats: int) -> int:
    """Return the budget in rows."""
    if repeats < 1:
        raise UsageError(f"repeats is {repeats}; expected at least 1")
    if config.engine.mode != "tree":
        raise UsageError(f"engine.mode is {config.engine.mode!r}; a profile measures tree calls, give engine.mode=tree")
    budget = config.engine.budget
    if not isinstance(budget, int):
        raise UsageError(
            f"engine.budget is {budget!r}; a profile needs the most rows to measure, give engine.budget=16384"
        )
    return budget


def _check_writable(path: Path) -> None:
    """Find out before the measurements, which take minutes."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{path}: cannot write ({error.strerror})") from None
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise UsageError(f"{path}: cannot write; expected the name of a file in a folder that can be written")
