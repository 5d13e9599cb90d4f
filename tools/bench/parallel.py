"""Every axis on real processes against one: `torchrun --nproc-per-node 2 -m tools.bench.parallel ROLLOUTS --config C`.

Each layout runs the same samples in each dtype and is held to each sequence alone on process 0: in fp32 to twice the
distance of fp32 alone from fp64, in bf16 to twice that of bf16 alone from fp32. Prints a Markdown table; status 1 if a
layout fails.
"""

import argparse
import gc
import platform
import sys
from collections.abc import Iterator

import torch

from megatron_dta.axes import Axes, violations
from megatron_dta.checkpoint.open_model import open_model
from megatron_dta.control.communicator import Communicator
from megatron_dta.data.rollouts import read_rollouts
from megatron_dta.engine.engine import TreeEngine
from megatron_dta.mcore import parallel
from megatron_dta.model_config import read_model_config
from megatron_dta.processes import joined
from megatron_dta.progress import only_rank, quiet_host, say
from megatron_dta.verify import Verdict, prepared
from megatron_dta.verify_parallel import compare, on_process_0

LAYOUTS = (
    Axes(),
    Axes(tensor=2),
    Axes(tensor=2, sequence=True),
    Axes(context=2),
    Axes(context=2, cp_comm="allgather"),
    Axes(pipeline=2),
    Axes(pipeline=2, virtual=2),
    Axes(expert=2),
    Axes(expert=2, tensor=2, sequence=True),
)
"""What two processes can be; axes that the model refuses are left out. On more processes the rest is data-parallel."""


NAMES = [axes.describe() for axes in LAYOUTS]


def main(argv: list[str]) -> int:
    """Run all layouts; return 1 if one of them is not exact."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rollouts")
    parser.add_argument("--config", required=True, help="a model's config.json; weights are random")
    parser.add_argument("--form", default="comb")
    parser.add_argument("--limit", type=int, default=1)
    parser.add_argument("--truncate", type=int)
    parser.add_argument("--budget", type=int, default=4096)
    parser.add_argument("--padding", type=int, default=128, help="rows a call is padded to on each context rank")
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--only", nargs="*", metavar="LAYOUT", help='only these, such as tp2 or "tp2 sp"')
    args = parser.parse_args(argv)
    quiet_host()
    with joined() as processes:
        only_rank(processes.launch.rank)
        failed = 0
        for line, passed in results(args, processes.communicator):
            if processes.launch.rank == 0:
                print(line, flush=True)
            failed += not passed
        return int(failed > 0)


def results(args: argparse.Namespace, communicator: Communicator) -> Iterator[tuple[str, bool]]:
    """Yield the table's lines, each with whether it passed."""
    config = read_model_config(args.config)
    samples, trained = prepared(
        read_rollouts(
            args.rollouts, form=args.form, limit=args.limit, truncate=args.truncate, vocab_size=config.vocab_size
        )
    )

    def open_(dtype: str):
        gc.collect()
        return open_model(hf_config=args.config, dtype=dtype)[0]

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    yield f"{communicator.size} processes, {device}, torch {torch.__version__}; {len(samples)} samples,", True
    yield f"{sum(len(s.tokens) for s in samples):,} tokens, {trained:,} trained, {config.num_layers} layers\n", True
    yield "| layout | dtype | log-probs (allowed) | loss | worst gradient over allowed | step again | |", True
    yield "|---|---|---|---|---|---|---|", True
    for dtype in args.dtypes:
        alone = on_process_0(open_, samples, communicator, dtype=dtype, temperature=1.0, say=say)
        for axes in LAYOUTS:
            if any(violations(axes, config, communicator.size)) or axes.describe() not in (args.only or NAMES):
                continue
            say(f"{dtype}: {axes.describe()}")
            parallel.initialize(axes=axes)
            engine = TreeEngine(open_(dtype), budget=args.budget, multiple=args.padding * axes.context)
            verdict = compare(engine, samples, communicator, alone)
            del engine
            told = communicator.broadcast(b"" if verdict is None else bytes([verdict.passed]))
            yield "" if verdict is None else row(axes, dtype, verdict), bool(told[0])


def row(axes: Axes, dtype: str, verdict: Verdict) -> str:
    """Return a layout's line of the table."""
    tree, allowed, worst = verdict.tree, verdict.tolerance, verdict.worst_parameter
    ratio = tree.grads[worst] / allowed.grads[worst]
    fields = (
        axes.describe(),
        dtype,
        f"{tree.logprob:.1e} ({allowed.logprob:.1e})",
        f"{tree.loss:.1e}",
        f"{ratio:.2f} ({worst}: {tree.grads[worst]:.1e})",
        f"{verdict.repeat:.1e}",
        "passed" if verdict.passed else "FAILED",
    )
    return f"| {' | '.join(fields)} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
