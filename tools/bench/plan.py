"""How good plans are and how long planning takes, on recorded and on synthetic batches, as tables.

    python -m tools.bench.plan [SET ...] [--data FOLDER] [--large N] [--out FILE]

A SET is FILE:FORM, a rollout file of the folder without its ending and one of the forms whole, turn and comb; left out,
it is every file in every form. Each is planned for several numbers of ranks and compared with contiguous cuts and with
longest-first packing of subtrees, whose ranks are packed into chunks by the same planner.
"""

import argparse
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import MARKDOWN
from rich.console import Console
from rich.progress import track
from rich.table import Table

from megatron_dta.data.forms import FORMS
from megatron_dta.data.rollouts import read_rollouts
from megatron_dta.errors import UsageError
from megatron_dta.model_config import read_model_config
from megatron_dta.tree.budget import capacity_of
from megatron_dta.tree.cost import CostModel, open_cost
from megatron_dta.tree.fill import longest_first
from megatron_dta.tree.forest import Forest
from megatron_dta.tree.layout import Layout, group_by
from megatron_dta.tree.outline import Outline, build_outline
from megatron_dta.tree.packing import Packing
from megatron_dta.tree.planner import BatchPlan, Settings, build_plan, plan_batch
from megatron_dta.tree.ranks import Packer, node_work
from tools.bench.baselines import contiguous
from tools.bench.synthetic import Sequences, levels, skewed

ROOT = Path(__file__).parents[2]


def packing_of(outline: Outline, forest: Forest, chunk_of: np.ndarray) -> Packing:
    """Return any legal assignment of a forest's tokens to chunks, int [T], as a packing of its outline."""
    layout = Layout(forest, chunk_of)
    chunk = np.argsort(layout.order())[layout.chunk_of]
    node = np.repeat(np.arange(outline.num_nodes), outline.length)
    begins = np.concatenate([[True], (node[1:] != node[:-1]) | (chunk[1:] != chunk[:-1])])
    start = np.flatnonzero(begins[: len(node)])
    return Packing(outline=outline, node=node[start], length=np.diff(start, append=len(node)), chunk=chunk[start])


def packer_of(outline: Outline, settings: Settings) -> Packer:
    """Return what packs a rank's sequences, as `plan_batch` does it."""
    return Packer(
        outline=outline,
        work=node_work(outline, settings.cost),
        cost=settings.cost,
        budget=settings.budget,
        multiple=settings.multiple,
        state_limit=settings.state_limit,
    )


def slowest(packer: Packer, rank_of: np.ndarray, num_ranks: int) -> float:
    """Return the predicted seconds of the slowest rank when each rank's sequences are packed."""
    return max(packer.pack(sequences).prediction.seconds for sequences in group_by(rank_of, num_ranks))


def least_pushed(outline: Outline, capacity: int) -> int:
    """Return how many tokens have to be pushed at least: those whose own subtree exceeds a chunk."""
    return int(np.clip(outline.size - capacity, 0, outline.length).sum())


@dataclass(frozen=True, kw_only=True)
class Row:
    """One batch on one number of ranks."""

    name: str
    settings: Settings
    plan: BatchPlan
    seconds: tuple[float, float, float]
    """Outline, plan, build of all ranks."""
    least_pushed: int
    contiguous: float
    longest_first: float
    """Slowest rank of the simpler ways to spread."""

    def cells(self) -> list[str]:
        plan, slowest = self.plan, float(self.plan.seconds.max())
        chunks = sum(len(p.rows) for p in plan.predictions)
        pushed = sum(p.pushed_tokens for p in plan.predictions)
        total = int(plan.rank_tokens.sum())
        return [
            self.name,
            str(self.settings.ranks),
            *(f"{s:.2f}" for s in self.seconds),
            f"{slowest:.3f}",
            f"{slowest / plan.seconds.mean():.3f}",
            f"{slowest / plan.bound_seconds:.3f}",
            f"{total / plan.tree_tokens:.3f}",
            f"{chunks:,}",
            f"{pushed / total:.2%} ({self.least_pushed / total:.2%})",
            f"{self.contiguous / slowest:.3f}",
            f"{self.longest_first / slowest:.3f}",
        ]


COLUMNS = (
    "batch", "ranks", "outline s", "plan s", "build s", "slowest s", "max/mean", "max/bound", "tokens", "chunks",
    "pushed (least)", "contiguous", "longest first",
)  # fmt: skip


def measure(name: str, batch: Any, settings: Settings) -> Row:
    """Plan a batch, build the plans of all ranks, and spread it in simpler ways as well.

    batch: the arguments of `build_outline`.
    """
    start = time.perf_counter()
    outline = build_outline(*batch)
    outlined = time.perf_counter()
    plan = plan_batch(outline, settings)
    planned = time.perf_counter()
    for task in plan.tasks:
        own = ([values[i] for i in task.sequences] for values in batch)
        build_plan(task, *own, multiple=settings.multiple, in_flight=settings.in_flight)
    built = time.perf_counter()
    packer, ranks = packer_of(outline, settings), settings.ranks
    parts = (outline.part_of(task.sequences) for task in plan.tasks)
    return Row(
        name=name,
        settings=settings,
        plan=plan,
        seconds=(outlined - start, planned - outlined, built - planned),
        least_pushed=sum(
            least_pushed(part, capacity_of(part.num_tokens, settings.budget, settings.multiple)) for part in parts
        ),
        contiguous=slowest(packer, contiguous(outline, packer.work, ranks), ranks),
        longest_first=slowest(packer, longest_first(outline, packer.work, ranks), ranks),
    )


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """What planning one large batch took, in a process of its own."""

    sequences: int
    nodes: int
    tree_tokens: int
    input_bytes: int
    outline_seconds: float
    plan_seconds: float
    peak_bytes: int

    def cells(self) -> list[str]:
        seconds = self.outline_seconds + self.plan_seconds
        return [
            f"{self.sequences:,}",
            f"{self.tree_tokens:,}",
            f"{self.outline_seconds:.2f}",
            f"{self.plan_seconds:.2f}",
            f"{1e6 * seconds / (self.sequences * math.log2(self.sequences)):.2f}",
            f"{self.input_bytes / 2**30:.2f}",
            f"{self.peak_bytes / 2**30:.2f}",
        ]


SCALING_COLUMNS = (
    "sequences", "tree tokens", "outline s", "plan s", "us / (n log2 n)", "input GiB", "peak RSS GiB",
)  # fmt: skip


def scale(num_sequences: int, length: int, seed: int, settings: Settings) -> Scaling:
    """Plan a synthetic batch that is shared at several levels."""
    batch = levels(num_sequences, length, seed)
    start = time.perf_counter()
    outline = build_outline(batch.tokens, batch.loss_masks)
    outlined = time.perf_counter()
    plan_batch(outline, settings)
    planned = time.perf_counter()
    return Scaling(
        sequences=num_sequences,
        nodes=outline.num_nodes,
        tree_tokens=outline.num_tokens,
        input_bytes=sum(t.nbytes for t in batch.tokens),
        outline_seconds=outlined - start,
        plan_seconds=planned - outlined,
        peak_bytes=_peak_bytes(),
    )


def _peak_bytes() -> int:
    """Return the most memory of this process; getrusage would count what its parent had."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 0, or 2 after one line about what is wrong with the input."""
    options = _parse_arguments(argv)
    try:
        tables = [_quality_table(options), *([_scaling_table(options)] if options.large else [])]
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    terminal = Console()
    console = terminal if terminal.is_terminal else Console(width=_WIDE)
    for table in tables:
        console.print(table)
    if options.out:
        options.out.write_text("\n".join(_markdown(table) for table in tables))
    return 0


_WIDE = 240
"""Columns of output that is no terminal: no cell is cut."""


def _markdown(table: Table) -> str:
    title, table.title, table.box = table.title, None, MARKDOWN
    console = Console(width=_WIDE, file=StringIO())
    with console.capture() as captured:
        console.print(table)
    lines = [line.rstrip() for line in captured.get().splitlines()]
    return "\n".join([f"{title}", "", *(line for line in lines if line)]) + "\n"


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.plan", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("sets", nargs="*", metavar="SET", help="FILE:FORM (default: every file in every form)")
    data = Path(os.environ.get("MEGATRON_DTA_DATA") or ROOT.parent / "shared" / "data")
    parser.add_argument("--data", type=Path, default=data, metavar="FOLDER", help="recorded rollouts, *.npz")
    parser.add_argument("--config", type=Path, metavar="JSON", help="config.json of the model (default: Qwen3-8B's)")
    parser.add_argument("--cost", default="h200", help="a shipped machine, or a file that `profile` wrote")
    parser.add_argument("--budget", type=int, default=16384, help="most rows of a chunk")
    parser.add_argument("--padding", type=int, default=128, help="rows of every call are a multiple of it")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 8, 64, 512], metavar="R")
    parser.add_argument(
        "--skewed", type=int, metavar="N", help="also a synthetic batch of N sequences in skewed groups"
    )
    parser.add_argument(
        "--large", type=int, metavar="N", help="also the time of N/8, N/4, N/2 and N synthetic sequences"
    )
    parser.add_argument("--length", type=int, default=2000, help="tokens of each of those")
    parser.add_argument("--seed", type=int, default=0, help="of synthetic batches")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the tables as markdown")
    return parser.parse_args(argv)


def _cost(options: argparse.Namespace) -> CostModel:
    config = options.config or options.data / "hf_configs" / "Qwen3-8B.json"
    return open_cost(options.cost, read_model_config(config))


def _settings(options: argparse.Namespace, ranks: int) -> Settings:
    return Settings(cost=_cost(options), budget=options.budget, multiple=options.padding, ranks=ranks)


def _quality_table(options: argparse.Namespace) -> Table:
    batches = dict(_recorded(options))
    if options.skewed:
        batches[f"skewed {options.skewed:,}"] = _arguments(skewed(options.skewed, options.seed))
    cases = [(name, batch, ranks) for name, batch in batches.items() for ranks in options.ranks]
    console = Console(stderr=True)
    rows = [measure(name, batch, _settings(options, ranks)) for name, batch, ranks in track(cases, console=console)]
    title = (
        f"Plans of {options.cost}, budget {options.budget:,}, padding {options.padding}; tokens: of all ranks over "
        "distinct ones; contiguous, longest first: their slowest rank over ours"
    )
    return _table(title, COLUMNS, [row.cells() for row in rows])


def _recorded(options: argparse.Namespace) -> list[tuple[str, tuple]]:
    files = sorted(options.data.glob("*.npz"))
    names = options.sets or [f"{file.name.partition('.')[0]}:{form}" for file in files for form in FORMS]
    found = []
    for name in names:
        stem, _, form = name.partition(":")
        matching = [file for file in files if file.name.partition(".")[0] == stem]
        if form not in FORMS or len(matching) != 1:
            known = ", ".join(file.name.partition(".")[0] for file in files)
            raise UsageError(f"set is {name!r}; expected FILE:FORM with FILE one of {known}; FORM: {', '.join(FORMS)}")
        samples = read_rollouts(matching[0], form=form, on_warning=lambda _: None)
        if samples:
            columns = zip(*((s.tokens, s.loss_mask, s.identity) for s in samples))
            found.append((name.replace(":", " "), tuple(list(column) for column in columns)))
    return found


def _arguments(batch: Sequences) -> tuple:
    return batch.tokens, batch.loss_masks, [None] * len(batch.tokens)


def _scaling_table(options: argparse.Namespace) -> Table:
    settings = _settings(options, max(options.ranks))
    sizes = [options.large // part for part in (8, 4, 2, 1)]
    context = multiprocessing.get_context("spawn")
    rows = []
    for size in sizes:
        with ProcessPoolExecutor(1, mp_context=context) as pool:  # a process each: its peak memory is this size's
            rows.append(pool.submit(scale, size, options.length, options.seed, settings).result())
    title = f"Planning n synthetic sequences of {options.length:,} tokens for {settings.ranks} ranks"
    return _table(title, SCALING_COLUMNS, [row.cells() for row in rows])


def _table(title: str, columns: Sequence[str], rows: list[list[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


if __name__ == "__main__":
    sys.exit(main())
