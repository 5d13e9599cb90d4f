"""The `verify` command: open the model and the rollouts, compare, print a table."""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from megatron_dta.axes import Axes
from megatron_dta.checkpoint.open_model import open_model, tiny_model
from megatron_dta.control.launch import detect_launch
from megatron_dta.data.rollouts import read_rollouts
from megatron_dta.data.samples import Sample
from megatron_dta.mcore.model import TreeModel
from megatron_dta.processes import joined
from megatron_dta.progress import only_rank, say
from megatron_dta.verify import Verdict, verify
from megatron_dta.verify_parallel import verify_parallel


def run_verify(
    rollouts: str,
    *,
    hf_folder: str | None,
    hf_config: str | None,
    tiny: str,
    dtype: str,
    budget: int | str,
    padding: int,
    form: str,
    limit: int | None,
    truncate: int | None,
    mask: str,
    attention: str | None,
    temperature: float,
    axes: Axes | None,
) -> int:
    """Return 0 if trees train as each rollout alone would, 1 if not; `axes`: on all processes that were started."""
    options: dict[str, Any] = {
        "dtype": dtype,
        "budget": budget,
        "backend": attention,
        "padding": padding,
        "temperature": temperature,
        "say": say,
    }

    def opened() -> tuple[list[Sample], Callable[[str], TreeModel]]:
        samples = read_rollouts(rollouts, form=form, limit=limit, truncate=truncate, mask=mask, on_warning=say)
        if hf_folder or hf_config:
            return samples, lambda dtype: open_model(hf_folder=hf_folder, hf_config=hf_config, dtype=dtype)[0]
        samples, vocab_size = renumbered(samples)
        say(f"no --model or --config: a tiny random {tiny} model over the {vocab_size:,} ids that occur")
        longest = max(len(s.tokens) for s in samples)
        return samples, lambda dtype: tiny_model(tiny, vocab_size, dtype=dtype, max_positions=longest, axes=axes)

    if axes is None:
        samples, open_ = opened()
        return _report(verify(open_, samples, **options), f"budget {budget}")
    only_rank(detect_launch(os.environ).rank)
    with joined() as processes:  # before anything that may fail on one process alone
        samples, open_ = opened()
        verdict = verify_parallel(open_, samples, axes, processes.communicator, **options)
        title = f"budget {budget}, {processes.launch.size} process(es): {axes.describe()}"
        status = np.array([0 if verdict is None else _report(verdict, title)])
        return int(processes.communicator.broadcast(status)[0])


def _report(verdict: Verdict, title: str) -> int:
    Console().print(_table(verdict, title))
    return 0 if verdict.passed else 1


def renumbered(samples: list[Sample]) -> tuple[list[Sample], int]:
    """Number the ids that occur from 0: for a random model the same task, with a smaller vocabulary.

    Returns the samples and the number of ids.
    """
    ids = np.unique(np.concatenate([s.tokens for s in samples]))
    return [replace(s, tokens=np.searchsorted(ids, s.tokens).astype(np.int32)) for s in samples], len(ids)


def _table(verdict: Verdict, title: str) -> Table:
    tree, allowed = verdict.tree, verdict.tolerance
    table = Table(title=title)
    for name in ("tree against each alone", "difference", "tolerance"):
        table.add_column(name, overflow="fold")
    worst = verdict.worst_parameter
    rows = {
        "max |log-prob difference|": (tree.logprob, allowed.logprob),
        "the same, sweep to training": (verdict.sweep, allowed.logprob),
        "loss difference": (tree.loss, allowed.loss),
        f"worst relative gradient error ({worst})": (tree.grads[worst], allowed.grads[worst]),
    }
    if verdict.repeat is not None:
        rows["the step again, largest relative gradient difference"] = (verdict.repeat, verdict.repeat_allowed)
    for name, numbers in rows.items():
        table.add_row(name, *(f"{number:.3e}" for number in numbers))
    table.caption = (
        f"{verdict.trained_tokens:,} trained tokens, reuse {verdict.reuse:.2f}x. Tolerance, {allowed.why}. "
        + ("PASSED: trees train as each rollout alone." if verdict.passed else "FAILED: the tolerance is exceeded.")
    )
    return table
