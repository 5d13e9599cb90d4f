"""The command line: thin; each command imports what it needs when it runs."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from megatron_dta import __version__
from megatron_dta.errors import UsageError
from megatron_dta.model_config import FAMILIES
from megatron_dta.progress import quiet_host


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; bad input ends with one line on standard error and status 2."""
    args = _parser().parse_args(argv)
    quiet_host()
    try:
        return args.run(args)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m megatron_dta", description="Train LLM policies on prefix trees.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    train = commands.add_parser("train", help="train on a rollout file as a TOML config says")
    train.add_argument("config", help="a TOML file; see configs/")
    train.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to the config")
    train.set_defaults(run=_train)
    verify = commands.add_parser("verify", help="compare trees with each rollout alone, on your own rollouts")
    _add_rollout_options(verify)
    source = verify.add_mutually_exclusive_group()
    source.add_argument("--model", metavar="HF_FOLDER", help="a Hugging Face folder with weights")
    source.add_argument("--config", metavar="HF_CONFIG_JSON", help="a config.json; weights are random")
    source.add_argument("--tiny", default="qwen3", choices=FAMILIES, help="a tiny random model")
    verify.add_argument("--dtype", default="fp64", choices=("bf16", "fp32", "fp64"))
    verify.add_argument("--attention", choices=("reference", "segment", "flash4"), help="by default fit to the machine")
    verify.add_argument("--temperature", type=float, default=1.0)
    verify.add_argument("--parallel", action="store_true", help="on all processes that torchrun or mpiexec started")
    verify.add_argument("--sp", action="store_true", help="sequence parallel over the tensor ranks")
    verify.add_argument("--cp-comm", default="a2a", choices=("a2a", "allgather"), help="how context ranks attend")
    _add_axes(verify)
    verify.set_defaults(run=_verify)
    plan = commands.add_parser("plan", help="what a rollout file saves and costs; needs no torch")
    _add_rollout_options(plan)
    plan.add_argument("--config", metavar="HF_CONFIG_JSON", help="for work and memory of that model")
    plan.add_argument("--dtype", default="bf16", choices=("bf16", "fp32", "fp64"))
    plan.add_argument("--ranks", type=int, default=1, metavar="N", help="data-parallel ranks")
    _add_axes(plan)
    plan.add_argument("--fp8", default="none", choices=("none", "fp8", "mxfp8"), help="rows that low precision needs")
    plan.add_argument("--cost", default="h200", metavar="NAME", help="h200, cpu, or a file that `profile` wrote")
    plan.add_argument("--state-limit", type=int, metavar="N", help="most cached states alive at once, in tokens")
    plan.add_argument("--json", metavar="FILE", help="also write the numbers as JSON")
    plan.add_argument("--html", metavar="FILE", help="also draw forests and the ranks' timeline, on one offline page")
    plan.add_argument(
        "--simulate", type=int, nargs="*", metavar="N", help="predict the batch repeated, on N ... ranks (2 to 4096)"
    )
    plan.add_argument("--repeat", type=int, metavar="K", help="how often --simulate repeats it; by default enough")
    plan.set_defaults(run=_plan)
    profile = commands.add_parser("profile", help="measure calls of a model on this machine, for planning by time")
    profile.add_argument("config", help="the training TOML; its model and engine matter, rollouts are not read")
    profile.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to the config")
    profile.add_argument("--out", metavar="FILE", default="outputs/cost_model.json", help="by default %(default)s")
    profile.add_argument("--repeats", type=int, default=3, metavar="N", help="the median of N timings counts")
    profile.set_defaults(run=_profile)
    return parser


def _add_axes(parser: argparse.ArgumentParser) -> None:
    for axis, name in (("tp", "tensor"), ("cp", "context"), ("pp", "pipeline"), ("ep", "expert")):
        parser.add_argument(f"--{axis}", type=int, default=1, metavar="N", help=f"{name}-parallel size")
    parser.add_argument("--vpp", type=int, default=1, metavar="N", help="model parts a pipeline stage interleaves")
    parser.add_argument("--etp", type=int, metavar="N", help="tensor ranks of an expert, by default those of --tp")


def _add_rollout_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("rollouts", help="a .jsonl or .npz rollout file")
    parser.add_argument("--budget", type=_budget, default=16384, help="rows with gradient per chunk, or 'whole'")
    parser.add_argument("--padding", type=int, default=1, help="rows of a chunk are padded to this multiple")
    parser.add_argument("--form", default="whole", choices=("whole", "turn", "comb"))
    parser.add_argument("--limit", type=int, metavar="G", help="only the first G groups")
    parser.add_argument("--truncate", type=int, metavar="N", help="only the first N tokens of each sample")
    parser.add_argument("--mask", default="full", choices=("full", "response"), help="what per-token lists cover")


def _rollout_options(args: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(args, name) for name in ("budget", "padding", "form", "limit", "truncate", "mask")}


def _budget(text: str) -> int | str:
    try:
        return text if text == "whole" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}; expected 'whole' or a whole number of rows") from None


def _train(args: argparse.Namespace) -> int:
    from megatron_dta.config import load_config

    config = load_config(args.config, args.overrides)
    from megatron_dta.train import train

    train(config)
    return 0


def _verify(args: argparse.Namespace) -> int:
    from megatron_dta.axes import Axes
    from megatron_dta.verify_command import run_verify

    axes = Axes(
        tensor=args.tp,
        sequence=args.sp,
        context=args.cp,
        cp_comm=args.cp_comm,
        pipeline=args.pp,
        virtual=args.vpp,
        expert=args.ep,
        expert_tensor=args.etp,
    )
    if axes != Axes() and not args.parallel:
        raise UsageError(f"{axes.describe()} without --parallel; add it, and start with torchrun or mpiexec")
    return run_verify(
        args.rollouts,
        hf_folder=args.model,
        hf_config=args.config,
        tiny=args.tiny,
        dtype=args.dtype,
        **_rollout_options(args),
        attention=args.attention,
        temperature=args.temperature,
        axes=axes if args.parallel else None,
    )


def _plan(args: argparse.Namespace) -> int:
    from megatron_dta.plan_command import Layout, run_plan

    options = _rollout_options(args)
    run_plan(
        args.rollouts,
        layout=Layout(
            ranks=args.ranks,
            tensor=args.tp,
            context=args.cp,
            pipeline=args.pp,
            virtual=args.vpp,
            expert=args.ep,
            expert_tensor=args.etp,
            padding=options.pop("padding"),
            fp8=args.fp8,
        ),
        **options,
        model=args.config,
        dtype=args.dtype,
        cost=args.cost,
        state_limit=args.state_limit,
        json_file=args.json,
        html_file=args.html,
        simulate=args.simulate,
        repeat=args.repeat,
    )
    return 0


def _profile(args: argparse.Namespace) -> int:
    from megatron_dta.config import load_config

    config = load_config(args.config, args.overrides)
    from megatron_dta.profile_command import run_profile

    run_profile(config, args.out, args.repeats)
    return 0
