"""Time single calls of a model on the machine at hand: the data that a cost model is fitted to.

Shapes: R rows of a call (its tokens, then padding), C context tokens.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from megatron_dta.attention.api import Backend
from megatron_dta.engine.executor import Executor, Grads
from megatron_dta.engine.optimizer import MasterAdamW
from megatron_dta.mcore.model import TreeModel
from megatron_dta.mcore.params import Mode
from megatron_dta.tree.deal import ShardEdges
from megatron_dta.tree.forest import Forest, build_forest
from megatron_dta.tree.plan import Call, Kind, Operation, Plan, Push, StageOperation, StageProgram
from megatron_dta.tree.schedule import schedule

SHORT = 64
"""Tokens of a short branch; also the fewest rows that are measured, where the padding allows it."""
SPARSE = 32
"""One row in so many reaches the LM head where few do."""
MOST_SIZES = 8
"""Different numbers of rows: every kernel may be compiled or tuned once for each."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A call to measure: branches side by side, each a chain of tokens."""

    rows: int
    length: int
    """Tokens of a branch; the last one may be shorter."""
    every: int
    """One edge in so many within a branch bears a loss."""
    context: int = 0
    """Tokens of one path above the first branch, held in the cache."""
    shared: bool = False
    """All branches hang below the context; else the others are trees of their own, and few rows see it."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The counts of a call and what it took, as a chunk and as a push; a push has no sources."""

    rows: int
    """Padding included."""
    pairs: int
    context: int
    sources: int
    chunk_seconds: float
    """Forward with gradient, and backward."""
    push_seconds: float


def shapes(budget: int, multiple: int, max_positions: int) -> list[Shape]:
    """Choose at most 32 shapes of up to `budget` rows and as much context, smaller ones first.

    Equal rows come as short trees and as one path, with few sources and with all, with contexts that all rows or few
    of them see: no two counts grow together. No path is longer than `max_positions`.
    """
    sizes = row_sizes(budget, multiple)
    chosen = []
    for rows in sizes:
        path, short = min(rows, max_positions), min(SHORT, rows, max_positions)
        chosen += [Shape(rows=rows, length=short, every=1), Shape(rows=rows, length=path, every=SPARSE)]
        if rows in sizes[-4:]:
            half, most = (min(size, max_positions - short) for size in (budget // 2, budget))
            part = min(max(rows // 4, 1), max_positions)
            quarter = min(budget // 4, max_positions - part)
            chosen += [
                Shape(rows=rows, length=part, every=2, context=quarter, shared=True),
                Shape(rows=rows, length=short, every=SPARSE, context=half, shared=True),
                Shape(rows=rows, length=short, every=SPARSE, context=most),
                Shape(rows=rows, length=short, every=1, context=most, shared=True),
            ]
    return sorted(dict.fromkeys(chosen), key=lambda shape: (shape.rows, shape.context))


def row_sizes(budget: int, multiple: int) -> list[int]:
    """Return increasing numbers of rows up to the budget, geometric, in full multiples of the padding."""
    largest = budget // multiple * multiple
    smallest = min(max(SHORT, multiple), largest)
    count = min(MOST_SIZES, 1 + int(np.ceil(np.log2(largest / smallest))))
    sizes = np.geomspace(smallest, largest, count) if count > 1 else np.array([largest])
    return sorted({max(round(size / multiple), 1) * multiple for size in sizes.tolist()})


def shape_plan(shape: Shape, *, vocab_size: int, capacity: int, multiple: int, seed: int) -> Plan:
    """Plan a forest of random tokens whose first chunk is the shape, with its context pushed before.

    The same call is also the plan's last push, which is in no operation: its states have cache rows of their own.
    """
    forest, chunk_of = _forest(shape, vocab_size, np.random.default_rng(seed))
    plan = schedule(forest, chunk_of, capacity=capacity, multiple=multiple)
    chunk = plan.chunks[0]
    push = Push(
        tokens=chunk.tokens,
        size=chunk.size,
        context=chunk.context,
        context_state=chunk.context_state,
        visible_from=chunk.visible_from,
        visible_to=chunk.visible_to,
        store_state=np.arange(plan.state_rows, plan.state_rows + len(chunk.tokens), dtype=np.int32),
    )
    return replace(plan, pushes=(*plan.pushes, push), state_rows=plan.state_rows + len(chunk.tokens))


def call_pairs(call: Call) -> int:
    """Count the visible (query, key) pairs of a call; every padding row sees itself."""
    return int((call.visible_to.astype(np.int64) - call.visible_from).sum())


def measure(
    model: TreeModel,
    optimizer: MasterAdamW,
    chosen: Sequence[Shape],
    *,
    budget: int,
    multiple: int,
    backend: Backend,
    temperature: float,
    repeats: int,
    on_warning: Callable[[str], None],
) -> Iterator[Measured]:
    """Yield each shape's median times; `optimizer` takes the gradients, as in training, and none are left in it.

    Where a GPU's memory does not hold a shape, `on_warning` says so and nothing larger is tried.
    """
    capacity = budget // multiple * multiple
    for number, shape in enumerate(chosen):
        plan = shape_plan(
            shape, vocab_size=model.model_config.vocab_size, capacity=capacity, multiple=multiple, seed=number
        )
        try:
            measured = _measure(model, plan, backend, temperature, repeats)
        except torch.OutOfMemoryError:
            on_warning(
                f"out of memory at {shape.rows:,} rows with {shape.context:,} context tokens; "
                f"the fit uses the {number} shapes before"
            )
            return
        finally:
            optimizer.zero_grad()
        yield measured


def _forest(shape: Shape, vocab_size: int, rng: np.random.Generator) -> tuple[Forest, np.ndarray]:
    """Return the forest and its assignment: chunk 0 is the context, chunk 1 the branches.

    Tags keep branches apart whose random tokens happen to be the same.
    """
    above = rng.integers(0, vocab_size, shape.context)
    tokens, trained, tags = [], [], []
    for branch, start in enumerate(range(0, shape.rows, shape.length)):
        own = rng.integers(0, vocab_size, min(shape.length, shape.rows - start))
        context = above if shape.shared or branch == 0 else above[:0]
        place = np.arange(-len(context), len(own))
        tokens.append(np.concatenate([context, own]))
        trained.append((place > 0) & (place % shape.every == 0))
        tags.append(np.where(place < 0, 0, branch + 1))
    forest = build_forest(tokens, trained, tags)
    chunk_of = np.ones(forest.num_tokens, np.int32)
    chunk_of[forest.path(0)[: shape.context]] = 0
    return forest, chunk_of


def _measure(model: TreeModel, plan: Plan, backend: Backend, temperature: float, repeats: int) -> Measured:
    """Time a plan of `shape_plan`; its caches are gone on return, so that the next shape has their memory."""
    operations = tuple(StageOperation(part=0, operation=operation) for operation in plan.operations)
    program = StageProgram(plans=(plan,), operations=operations)
    executor = Executor(model, program, Mode.TRAIN, backend=backend, temperature=temperature)
    for entry in program.operations:
        if entry.operation.kind is not Kind.PUSH:  # the first chunk's forward: its context is in the cache
            break
        executor.execute(entry, _constant_loss)
    chunk = plan.chunks[0]
    push = [Operation(kind=Kind.PUSH, index=len(plan.pushes) - 1)]
    both = [Operation(kind=Kind.FORWARD, index=0), Operation(kind=Kind.BACKWARD, index=0)]
    return Measured(
        rows=chunk.size,
        pairs=call_pairs(chunk),
        context=len(chunk.context),
        sources=len(chunk.source_rows),
        chunk_seconds=_median_seconds(executor, both, repeats),
        push_seconds=_median_seconds(executor, push, repeats),
    )


def _median_seconds(executor: Executor, operations: list[Operation], repeats: int) -> float:
    """Run the operations once to warm up (kernels are compiled and tuned per shape), then `repeats` times."""
    seconds = []
    for _ in range(1 + repeats):
        _wait(executor.device)
        start = time.perf_counter()
        for operation in operations:
            executor.execute(StageOperation(part=0, operation=operation), _constant_loss)
        _wait(executor.device)
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds[1:]))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _constant_loss(edges: ShardEdges, logprobs: torch.Tensor, entropies: torch.Tensor) -> Grads:
    """Stand in for an objective: the mean log-prob; its own few operations on [M] are not part of the model's time."""
    return torch.full_like(logprobs, -1 / max(len(logprobs), 1)), None
