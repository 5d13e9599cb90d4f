"""Run one model on many layouts inside one spawn of processes, each against each sequence alone on process 0.

    python tests/parallel/cells.py '{"kind": "dense", "cells": [["tp2 sp", {"tensor": 2, "sequence": true}]]}'

Prints one JSON line per cell, forest and budget on process 0. What a cell may have besides axes: `forests` (only
these), `recompute`, `sabotage` (one of `sabotage.BY_NAME`: the comparison must fail), `steps` (so many updates in
place of gradients), `aux` and `z` (router losses).
"""

import hashlib
import json
import sys
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_dta.axes import Axes
from megatron_dta.checkpoint.open_model import DTYPES, TINY
from megatron_dta.config import OptimizerSection
from megatron_dta.control.communicator import Communicator
from megatron_dta.data.samples import Sample
from megatron_dta.engine.engine import TreeEngine
from megatron_dta.engine.experts import RouterLosses
from megatron_dta.engine.flat import FlatEngine
from megatron_dta.engine.optimizer import make_optimizer
from megatron_dta.mcore import parallel
from megatron_dta.mcore.model import TreeModel, build_model
from megatron_dta.mcore.shards import gather_whole
from megatron_dta.model_config import ModelConfig, parse_model_config
from megatron_dta.processes import joined
from megatron_dta.verify import Pass, difference, logprob_difference, prepared, random_objective, run_pass
from megatron_dta.verify_parallel import ParallelRun
from tests.batches import batch, trained
from tests.parallel import sabotage

VOCAB, LAYERS, TEMPERATURE = 41, 4, 0.7
P = list(range(1, 11))
FORESTS: dict[str, tuple[list[Sample], tuple[int | str, ...]]] = {
    "one token and chain": ([*batch([[3]]), *batch([list(np.arange(23) % VOCAB)])], ("whole",)),
    "star": (batch([[7, 8, *range(9, 12), k] for k in range(12)]), (8,)),
    "comb": (batch([[*P, *([21, 22, 23] * turn), 8, 8, 9] for turn in range(6)], seed=1), ("whole", 8)),
    "deep": (batch([[*range(1, 31)[:k], 31, 32] for k in range(2, 30, 3)], seed=2), (12,)),
    "several trees": (
        batch([[1, 2, 3, 4], [2, 3, 4], [2, 3, 5, 6, 7], [5], [6, 6, 6, 6, 6], [1, 2, 9], [1, 2, 3, 4]], seed=3),
        (8,),
    ),
    # chunks of the long prompt have no loss-bearing edge, one sample has no response at all
    "prompt only": (
        [
            *(trained([*range(1, 30), k, k + 1], [False] * 29 + [True] * 2, str(k)) for k in range(30, 34)),
            trained([*range(1, 30)], [False] * 29, "empty"),
        ],
        (8,),
    ),
    "one term": ([trained([*range(1, 20), k], [False] * 19 + [k == 21], str(k)) for k in range(20, 26)], (8,)),
}
"""Forests and the budgets they run with; calls with fewer tokens than an axis has ranks are in most of them."""
_HEADS = {"num_key_value_heads": 4, "num_attention_heads": 8, "num_hidden_layers": LAYERS}
MODELS: dict[str, dict[str, Any]] = {
    "dense": _HEADS,
    "tied": _HEADS | {"tie_word_embeddings": True},
    "moe": {
        **_HEADS,
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}
OPTIMIZER = OptimizerSection(lr=1e-3, clip_norm=0.5, weight_decay=0.1)


def config_of(kind: str) -> ModelConfig:
    """Return a small model's shape, with weights large enough for gradients to flow."""
    raw = TINY | {"model_type": "qwen3", "vocab_size": VOCAB, "max_position_embeddings": 64, "initializer_range": 0.3}
    return parse_model_config(raw | MODELS[kind])


def open_model(kind: str, recompute: str = "none") -> TreeModel:
    """Build this process's share for the axes that are set up."""
    device = parallel.initialize(seed=1)
    return build_model(config_of(kind), dtype=DTYPES["fp64"], device=device, recompute=recompute, seed=3)


def samples_of(name: str) -> list[Sample]:
    """Return a forest's samples with random advantages and names of their own."""
    return prepared([replace(s, sample_id=str(i)) for i, s in enumerate(FORESTS[name][0])])[0]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A layout with what is to be run on it."""

    label: str
    axes: Axes
    forests: tuple[str, ...]
    recompute: str
    sabotage: str | None
    steps: int
    losses: RouterLosses


def cell_of(label: str, options: dict[str, Any]) -> Cell:
    """Read a cell's options; what is left are axes."""
    options = dict(options)
    return Cell(
        label=label,
        forests=tuple(options.pop("forests", FORESTS)),
        recompute=options.pop("recompute", "none"),
        sabotage=options.pop("sabotage", None),
        steps=options.pop("steps", 0),
        losses=RouterLosses(aux_coef=options.pop("aux", 0.0), z_coef=options.pop("z", 0.0)),
        axes=Axes(**options),
    )


def run(kind: str, cells: list[Cell]) -> None:
    """Run all cells on all processes that the launcher started; process 0 runs each sequence alone before."""
    with joined() as processes:
        known = {}
        only = dist.new_group([0])  # all processes make it
        if processes.launch.rank == 0:
            asked = {(name, cell.losses, cell.steps) for cell in cells for name in cell.forests}
            known = {key: alone(kind, only, *key) for key in sorted(asked, key=str)}
        processes.communicator.barrier()
        for cell in cells:
            parallel.initialize(axes=cell.axes)
            for name in cell.forests:
                for budget in FORESTS[name][1]:
                    found = _compare(kind, cell, name, budget, processes.communicator, known)
                    if known:
                        line = {"cell": cell.label, "forest": name, "budget": budget, **found}
                        print(json.dumps(line), flush=True)


def alone(
    kind: str, only: dist.ProcessGroup, name: str, losses: RouterLosses, steps: int
) -> Pass | dict[str, torch.Tensor]:
    """Return one pass of each sequence alone, or the whole weights after so many updates; `only` has this process."""
    model = open_model(kind)
    model = replace(model, groups=replace(model.groups, dp=only))  # routers count over what this process runs
    engine = FlatEngine(model, temperature=TEMPERATURE, router_losses=losses)
    if not steps:
        return run_pass(model, engine, samples_of(name))
    optimizer = make_optimizer(model, OPTIMIZER, total_updates=steps)
    for _ in range(steps):
        engine.train_batch(samples_of(name), random_objective())
        optimizer.step()
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def _compare(
    kind: str, cell: Cell, name: str, budget: int | str, communicator: Communicator, known: dict
) -> dict[str, Any]:  # fmt: skip
    model = open_model(kind, cell.recompute)
    least = cell.axes.multiple()
    engine = TreeEngine(
        model,
        budget=budget if isinstance(budget, str) else -(-budget // least) * least,
        temperature=TEMPERATURE,
        router_losses=cell.losses,
        poison_cache=cell.sabotage is None,
    )
    expected = known.get((name, cell.losses, cell.steps))
    with sabotage.applied(cell.sabotage):
        whole = ParallelRun(engine, samples_of(name), communicator)
        if cell.steps:
            weights = _train(whole, cell.steps)
            copies = _copies_differ(model, communicator)
            return {} if weights is None else {"copies": copies, "weights": _distance(weights, expected)}
        found, again, swept = whole.train(), whole.train(), whole.sweep()
    whole.gradients.release()
    if found is None:
        return {}
    d, plan = difference(found, expected), whole.program.plans[0]
    return {
        "chunks": len(plan.chunks),
        "pushes": len(plan.pushes),
        "logprob": d.logprob,
        "loss": d.loss,
        "grad": d.grad,
        "worst": max(d.grads, key=lambda n: d.grads[n]),
        "sweep": logprob_difference(swept, found.logprobs),
        "repeat": difference(again, found).grad,
    }


def _train(whole: ParallelRun, steps: int) -> dict[str, torch.Tensor] | None:
    """Update the weights so many times; return them on process 0."""
    model = whole.engine.model
    optimizer = make_optimizer(whole.gradients, OPTIMIZER, total_updates=steps, groups=model.groups)
    for _ in range(steps):
        whole.backward()
        optimizer.step()
    return gather_whole(lambda shard: shard.parameter.detach(), model, whole.communicator)


def _copies_differ(model: TreeModel, communicator: Communicator) -> int:
    """Count parameters of which two processes hold different copies, bit for bit."""
    own = {
        f"{name} {vars(p).get('tensor_model_parallel', False) and model.groups.tp.rank()}": p.detach().numpy().tobytes()
        for name, p in model.named_parameters()
    }
    differ = 0
    digests = {name: hashlib.blake2b(data).hexdigest() for name, data in own.items()}
    every = [json.loads(bytes(part)) for part in communicator.allgather(json.dumps(digests).encode())]
    for name in {name for digests in every for name in digests}:
        differ += len({digests[name] for digests in every if name in digests}) > 1
    return differ


def _distance(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the largest absolute difference of a weight; padded vocabulary rows are not in `weights`."""
    return max(float((w - expected[name][: len(w)]).abs().max()) for name, w in weights.items())


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    run(asked["kind"], [cell_of(label, options) for label, options in asked["cells"]])
