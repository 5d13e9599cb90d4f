"""What every process runs for the field cases of parallel axes: `python ranks_cases.py FOLDER CASE...`.

Each case runs samples on all processes and compares with each sequence alone on process 0. Prints "CASE ok" where all
processes passed. FOLDER holds what `train` needs.
"""

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_dta import train as training
from megatron_dta.axes import Axes
from megatron_dta.checkpoint.open_model import DTYPES
from megatron_dta.config import load_config
from megatron_dta.data.samples import Sample, columns
from megatron_dta.engine.base import NO_LOSSES, StepResult
from megatron_dta.engine.batch import scope_of
from megatron_dta.engine.calls import Calls
from megatron_dta.engine.engine import TreeEngine
from megatron_dta.engine.experts import RouterLosses
from megatron_dta.engine.flat import FlatEngine
from megatron_dta.engine.optimizer import make_optimizer
from megatron_dta.mcore import parallel
from megatron_dta.mcore.gradients import Gradients
from megatron_dta.mcore.model import TreeModel, build_model
from megatron_dta.mcore.shards import gather_whole
from megatron_dta.processes import Processes, joined
from megatron_dta.tree.budget import padded
from megatron_dta.tree.forest import build_forest
from megatron_dta.tree.plan import Plan
from megatron_dta.tree.schedule import stage_program
from megatron_dta.verify import (
    EXACT,
    ROUTER_EXACT,
    Pass,
    difference,
    main_grads,
    prepared,
    random_objective,
    run_pass,
    with_random_advantages,
)
from megatron_dta.verify_parallel import ParallelRun
from tests.batches import batch, trained
from tests.parallel.cells import OPTIMIZER, TEMPERATURE, config_of, samples_of

TP_SP = Axes(tensor=2, sequence=True)
COMMS = ("a2a", "allgather")
ROUTER = RouterLosses(aux_coef=0.1, z_coef=0.01)
CHAIN = [trained(list(range(1, 25)), [False] + [True] * 23)]
SEVEN = batch([[1, 2, 3, 4], [1, 2, 3, 5, 6], [1, 7]], seed=5, p_trained=0.9)
"""One tree of 7 tokens."""
ONE_AND_FIVE = [
    *batch([[*range(1, 20), k, k + 1] for k in range(20, 25)], seed=2, p_trained=0.9),
    *batch([[30 + k, 1, 2] for k in range(5)], seed=3, p_trained=0.9),
]
"""A large tree, and five small ones that fit one chunk."""
TWIGS = batch([[*range(1, 9), 11, 12], [*range(1, 9), 13], [*range(1, 5), 14]], seed=6)
"""One tree of 12 tokens."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """The processes and what each sequence alone gives."""

    processes: Processes
    only: dist.ProcessGroup
    """Process 0 alone."""
    folder: Path

    @property
    def is_first(self) -> bool:
        return self.processes.launch.rank == 0

    def model(self, kind: str, axes: Axes, dtype: str = "fp64", **config) -> TreeModel:
        """Lay the processes out and build this one's share of a model."""
        parallel.initialize(axes=axes)
        shape = replace(config_of(kind), **config)
        return build_model(shape, dtype=DTYPES[dtype], device=parallel.initialize(seed=1), seed=3)

    def flat(self, kind: str, losses: RouterLosses, dtype: str = "fp64", **config) -> FlatEngine | None:
        """Return the engine of each sequence alone on process 0; routers count over what it runs alone."""
        parallel.initialize(axes=Axes())
        if not self.is_first:
            return None
        model = self.model(kind, Axes(), dtype, **config)
        model = replace(model, groups=replace(model.groups, dp=self.only))
        return FlatEngine(model, temperature=TEMPERATURE, router_losses=losses)

    def alone(self, kind: str, samples: Sequence[Sample], losses: RouterLosses = NO_LOSSES, **options) -> Pass | None:
        engine = self.flat(kind, losses, **options)
        return None if engine is None else run_pass(engine.model, engine, samples)

    def run(
        self,
        kind: str,
        axes: Axes,
        samples: Sequence[Sample],
        budget: int | str = "whole",
        losses: RouterLosses = NO_LOSSES,
        **options,
    ) -> ParallelRun:
        model = self.model(kind, axes, **options)
        engine = TreeEngine(
            model, budget=budget, temperature=TEMPERATURE, router_losses=losses, poison_cache=True
        )  # fmt: skip
        return ParallelRun(engine, samples, self.processes.communicator)

    def everywhere(self, numbers) -> list:
        """Return what every process says, on all of them."""
        told = self.processes.communicator.allgather(json.dumps(numbers).encode())
        return [json.loads(bytes(part)) for part in told]


def equals(found: Pass | None, expected: Pass | None, bound: float = EXACT) -> None:
    """Hold the outcome on process 0 to the reference."""
    if found is not None and expected is not None:
        d = difference(found, expected)
        assert all(far <= bound for far in (d.logprob, d.loss, d.grad)), d


def finished(run: ParallelRun) -> Pass | None:
    found = run.train()
    run.gradients.release()
    return found


def in_chunks(run: ParallelRun, sizes: Sequence[int]) -> tuple[Plan, ...]:
    """Cut this replica's tokens into chunks of these sizes, the last tokens of the preorder first."""
    forest, multiple = build_forest(*columns(run.samples)), run.engine.multiple
    chunk_of = np.repeat(np.arange(len(sizes)), sizes)[::-1]
    run.program = stage_program(
        forest,
        chunk_of,
        capacity=padded(max(sizes), multiple),
        multiple=multiple,
        pipeline=run.engine.pipeline,
        stage=run.engine.model.groups.stage,
    )
    return run.program.plans


def b11_a_replica_without_a_trained_token(bench: Bench) -> None:
    """B11: the gradient is that of the others; where nobody trains a token it is zero and nothing is computed."""
    trains = with_random_advantages(batch([[1, 2, 3, 4, 5], [1, 2, 3, 6]], seed=1))
    silent = with_random_advantages([trained([7, 8, 9, *range(10, 10 + k)], [False] * (3 + k)) for k in (2, 3)])
    expected = bench.alone("dense", [*trains, *silent])
    engine = TreeEngine(bench.model("dense", Axes()), temperature=TEMPERATURE)
    gradients = Gradients(engine.model.parts, engine.model.transformer)

    def step(own: list[Sample], every: list[Sample]) -> StepResult:
        gradients.begin()
        result = engine.train_batch(own, random_objective(), scope=scope_of(every))
        gradients.finish()
        return result

    result = step(trains if bench.is_first else silent, [*trains, *silent])
    grads = main_grads(engine.model, bench.processes.communicator)
    told = bench.everywhere([result.num_terms, result.executed_tokens, result.totals["value"]])
    assert told[0][0] > 0 == told[1][0] < told[1][1], told
    if expected is not None and grads is not None:
        equals(replace(expected, loss=told[0][2] + told[1][2], grads=grads), expected)
    assert step(silent, [*silent, *silent]).executed_tokens == 0
    assert not any(grad.any() for grad in gradients.main_grads)
    gradients.release()


def b12_one_trained_token(bench: Bench) -> None:
    """B12: all terms on one context rank; the gradient is neither halved nor doubled."""
    samples = samples_of("one term")
    expected = bench.alone("dense", samples)
    for comm in COMMS:
        run = bench.run("dense", Axes(context=2, cp_comm=comm), samples)
        values = bench.everywhere(run.backward().totals["value"])
        assert sum(value != 0.0 for value in values) == 1, values
        equals(finished(run), expected)


def b15_context_ranks_in_single_precision(bench: Bench) -> None:
    """B15: every parameter's gradient, two context ranks to one, in fp32."""
    samples = samples_of("comb")
    expected = bench.alone("dense", samples, dtype="fp32")
    for comm in COMMS:
        equals(finished(bench.run("dense", Axes(context=2, cp_comm=comm), samples, 8, dtype="fp32")), expected, 1e-5)


def _wide_tree() -> list[Sample]:
    """Return a tree of 320 tokens, all trained: more than one tile a rank, and no padding."""
    sequences = [[*range(1, 21), 20 + k, *(np.arange(49) * (k + 2) % 41).tolist()] for k in range(6)]
    return with_random_advantages(batch([tokens[: 20 + 50] for tokens in sequences], p_trained=1.0))


def _borders(run: ParallelRun) -> np.ndarray:
    """Return the edges of a one-chunk plan whose source row and target row are on different context ranks."""
    (chunk,) = run.program.plans[0].chunks
    calls = Calls(run.program.forest, run.axes, run.engine.model.groups, run.engine.backend, run.engine.model.device)
    rank_of = np.empty(chunk.size, np.int64)
    for rank, rows in enumerate(calls.rows(chunk)):
        rank_of[rows] = rank
    forest = run.program.forest
    return np.flatnonzero(rank_of[forest.edges] != rank_of[forest.parent[forest.edges]])


@contextmanager
def rolled_labels():
    """Predict the token of a rank's own next row in place of the chunk's next row, as labels rolled after the split."""
    edges_of = Calls.edges

    def broken(self, chunk, own):
        edges = edges_of(self, chunk, own)
        source = own[edges.source_rows[edges.edge_source]]
        following = np.roll(own, -1)[edges.source_rows[edges.edge_source]]
        is_next = self.forest.edges[edges.edges] == source + 1
        rolled = np.searchsorted(self.forest.edges, following).clip(0, len(self.forest.edges) - 1)
        return replace(edges, edges=np.where(is_next, rolled, edges.edges))

    with mock.patch.object(Calls, "edges", broken):
        yield


def b16_borders_between_context_ranks(bench: Bench) -> None:
    """B16: the log-prob of a token whose source is on another rank; labels rolled after the split fail there alone."""
    samples = _wide_tree()
    expected = bench.alone("dense", samples, max_positions=128)
    for comm in COMMS:
        run = bench.run("dense", Axes(context=2, cp_comm=comm), samples, max_positions=128)
        forest, borders = run.program.forest, _borders(run)
        assert len(borders) > 1, "there is nothing to see"
        found = run.train()
        equals(found, expected)
        with rolled_labels():
            broken = run.train()
        run.gradients.release()
        if found is None or broken is None or expected is None:
            continue
        far = np.concatenate([np.abs(a - b)[1:] for a, b in zip(broken.logprobs, expected.logprobs)])
        is_border = np.isin(forest.term_edge, borders)
        assert far[~is_border].max() <= EXACT
        assert far[is_border].max() > 0.1


def b19_router_whatever_the_chunks(bench: Bench) -> None:
    """B19: the router's gradient for one and two tensor ranks, one chunk and several, even and uneven."""
    samples = prepared(TWIGS)[0]
    expected = bench.alone("moe", samples, ROUTER)
    for sizes in ([12], [3, 3, 3, 3], [4, 4, 4], [6, 2, 4]):
        run = bench.run("moe", TP_SP, samples, losses=ROUTER)
        in_chunks(run, sizes)
        equals(finished(run), expected, ROUTER_EXACT)


def _shared_experts(bench: Bench, samples: list[Sample], trees: list[int]) -> None:
    """Run replicas that share experts; each has so many trees, and all make the same calls."""
    expected = bench.alone("moe", samples, ROUTER)
    run = bench.run("moe", Axes(expert=2), samples, 16, ROUTER)
    plan = run.program.plans[0]
    told = bench.everywhere([[len(plan.pushes), len(plan.chunks)], int((plan.forest.parent < 0).sum())])
    assert told[0][0] == told[1][0], told
    assert sorted(number for _, number in told) == trees, told
    parts = bench.everywhere(run.backward().totals)
    assert all(bool(part["value"]) == (number > 0) for part, (_, number) in zip(parts, told)), parts
    equals(finished(run), expected, ROUTER_EXACT)


def c01_one_tree_beside_five(bench: Bench) -> None:
    """C01: replicas with unequally many trees that share experts wait for each other in every call, never for ever."""
    _shared_experts(bench, prepared(ONE_AND_FIVE)[0], [1, 5])


def c02_a_replica_without_a_tree(bench: Bench) -> None:
    """C02: it runs calls of padding; metrics and gradients are as if it was not there."""
    _shared_experts(bench, prepared(batch([[1, 2, 3, 4, 5]], p_trained=1.0))[0], [0, 1])


def c05_every_chunk_another_length(bench: Bench) -> None:
    """C05: shapes between stages follow the plan, in order, also with tensor ranks on each stage."""
    samples = prepared(CHAIN)[0]
    expected = bench.alone("dense", samples)
    if bench.processes.launch.size == 2:
        layouts = [Axes(pipeline=2), Axes(pipeline=2, virtual=2)]
    else:
        layouts = [Axes(tensor=2, pipeline=2), Axes(tensor=2, sequence=True, pipeline=2, virtual=2)]
    for axes in layouts:
        run = bench.run("dense", axes, samples)
        for plan in in_chunks(run, [5, 1, 8, 2, 7, 1]):
            lengths = [call.size for call in (*plan.pushes, *plan.chunks)]
            assert len(set(lengths)) > 3, lengths
        equals(finished(run), expected)


def c08_rows_that_do_not_divide(bench: Bench) -> None:
    """C08: a tree of 7 tokens on two tensor ranks that deal rows: one row of padding, which adds nothing."""
    samples = prepared(SEVEN)[0]
    expected = bench.alone("dense", samples)
    run = bench.run("dense", TP_SP, samples)
    assert [call.size for call in run.program.plans[0].chunks] == [8]
    result = run.backward()
    assert (result.executed_tokens, result.num_terms) == (7, scope_of(samples).num_terms)
    equals(finished(run), expected)


def c12_padding_is_no_token_of_the_routers(bench: Bench) -> None:
    """C12: padding on one of two tensor ranks is in no statistic; where it is taken for a token, the step stops."""
    samples = prepared(SEVEN)[0]
    expected = bench.alone("moe", samples, ROUTER)
    run = bench.run("moe", TP_SP, samples, losses=ROUTER)
    equals(run.train(), expected, ROUTER_EXACT)
    routed = Calls._routed
    with (
        mock.patch.object(Calls, "_routed", lambda *args: routed(*args).clamp(min=0)),
        pytest.raises(ValueError, match="expert visits were counted"),
    ):
        run.train()
    run.gradients.release()


def c17_overlapped_reductions(bench: Bench) -> None:
    """C17: four steps whose long prompt fills chunks without a loss; the second trains no token at all."""
    samples, axes = samples_of("prompt only"), [Axes(), Axes(pipeline=2, virtual=2)]
    silent = [replace(s, loss_mask=np.zeros_like(s.loss_mask)) for s in samples]
    expected = None
    if (engine := bench.flat("dense", NO_LOSSES)) is not None:
        optimizer = make_optimizer(engine.model, OPTIMIZER, total_updates=3)
        for _ in range(3):
            engine.train_batch(samples, random_objective())
            optimizer.step()
        expected = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
    for layout in axes:
        run = bench.run("dense", layout, samples, 8)
        assert any(len(chunk.terms) == 0 for chunk in run.program.plans[0].chunks)
        run.gradients.release()
        model = run.engine.model
        run.gradients = Gradients(model.parts, model.transformer, overlap=True)
        optimizer = make_optimizer(run.gradients, OPTIMIZER, total_updates=3, groups=model.groups)
        run.backward()
        optimizer.step()
        run.gradients.begin()
        run.engine.train_batch(
            [silent[i] for i in run.task.sequences], random_objective(), scope=scope_of(silent), plan=None
        )
        run.gradients.finish()
        for _ in range(2):
            run.backward()
            optimizer.step()
        weights = gather_whole(lambda shard: shard.parameter.detach(), model, bench.processes.communicator)
        if weights is not None and expected is not None:
            for name, weight in weights.items():
                torch.testing.assert_close(weight, expected[name][: len(weight)], rtol=0, atol=1e-8)


TRAINED = {
    "dp2": ("run.toml", Axes()),
    "tp2": ("run.toml", TP_SP),
    "pp2": ("run.toml", Axes(pipeline=2)),
    "cp2": ("run.toml", Axes(context=2)),
    "cp2 allgather": ("run.toml", Axes(context=2, cp_comm="allgather")),
    "ep2": ("moe.toml", Axes(expert=2)),
}
"""Small training runs of the whole loop: their configs and layouts."""


def c20_training_in_step(bench: Bench) -> None:
    """C20: in groups made at debug level DETAIL every collective is checked to be the same on all ranks."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    with pytest.raises(RuntimeError, match="mismatch"):
        dist.all_reduce(torch.zeros(2 + bench.processes.launch.rank), group=dist.new_group([0, 1]))

    @contextmanager
    def laid_out(axes):
        parallel.initialize(axes=axes)
        yield bench.processes

    for name, (config, axes) in TRAINED.items():
        assert axes != parallel.current_axes(), "groups are made anew"
        options = [f"train.output={bench.folder / name}"]
        with mock.patch.object(training, "joined", laid_out):
            training.train(replace(load_config(bench.folder / config, options), parallel=axes))
    dist.set_debug_level(dist.DebugLevel.OFF)


def c16_more_ranks_than_heads(bench: Bench) -> None:
    """C16: four context ranks share two key/value heads where keys are gathered; dealing heads is refused at start."""
    samples = samples_of("comb")
    expected = bench.alone("dense", samples, num_kv_heads=2)
    run = bench.run("dense", Axes(context=4, cp_comm="allgather"), samples, 8, num_kv_heads=2)
    equals(finished(run), expected)


CASES: dict[str, Callable[[Bench], None]] = {
    check.__name__: check
    for check in (
        b11_a_replica_without_a_trained_token,
        b12_one_trained_token,
        b15_context_ranks_in_single_precision,
        b16_borders_between_context_ranks,
        b19_router_whatever_the_chunks,
        c01_one_tree_beside_five,
        c02_a_replica_without_a_tree,
        c05_every_chunk_another_length,
        c08_rows_that_do_not_divide,
        c12_padding_is_no_token_of_the_routers,
        c17_overlapped_reductions,
        c20_training_in_step,
    )
}
FOUR: dict[str, Callable[[Bench], None]] = {
    check.__name__: check for check in (c05_every_chunk_another_length, c16_more_ranks_than_heads)
}
"""Cases of four processes."""


if __name__ == "__main__":
    with joined() as joined_processes:
        every = Bench(processes=joined_processes, only=dist.new_group([0]), folder=Path(sys.argv[1]))
        for case in sys.argv[2:]:
            (CASES | FOUR)[case](every)
            joined_processes.communicator.barrier()
            if every.is_first:
                print(case, "ok", flush=True)
