"""Forests for tests: random batches, named shapes, random legal chunk assignments, masks by definition."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_dta.attention.mask import TreeMask, tree_mask
from megatron_dta.tree.budget import capacity_of
from megatron_dta.tree.forest import Forest, build_forest
from megatron_dta.tree.plan import Call, Plan, StageOperation, StageProgram
from megatron_dta.tree.schedule import schedule
from tools.bench.baselines import aligned_cuts


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Sequences as `build_forest` takes them."""

    tokens: list[np.ndarray]
    loss_masks: list[np.ndarray]
    identities: list[np.ndarray | None] | None

    def forest(self) -> Forest:
        return build_forest(self.tokens, self.loss_masks, self.identities)


def forest_of(*sequences: Sequence[int]) -> Forest:
    """Build a forest that trains every token but each first one."""
    tokens = [np.array(sequence, np.int32) for sequence in sequences]
    return build_forest(tokens, [np.arange(len(t)) > 0 for t in tokens])


def random_batch(rng: np.random.Generator, *, most: int = 9, longest: int = 9, tagged: bool | None = None) -> Batch:
    """Draw sequences over few ids: duplicates, prefixes and extensions of earlier ones, several roots, tags."""
    tokens: list[np.ndarray] = []
    for _ in range(rng.integers(1, most + 1)):
        tail = rng.integers(0, 3, rng.integers(1, longest + 1)).astype(np.int32)
        base = tokens[rng.integers(len(tokens))] if tokens else tail
        kept = base[: rng.integers(1, len(base) + 1)]
        tokens.append([tail, base, kept, np.concatenate([kept, tail])][rng.integers(4)])
    is_tagged = rng.random() < 0.3 if tagged is None else tagged
    tags = [rng.integers(0, 2, len(t)) if rng.random() < 0.7 else None for t in tokens] if is_tagged else None
    return Batch(tokens=tokens, loss_masks=[rng.random(len(t)) < 0.6 for t in tokens], identities=tags)


def random_forest(seed: int, **limits) -> Forest:
    return random_batch(np.random.default_rng(seed), **limits).forest()


def random_assignment(forest: Forest, rng: np.random.Generator, num_chunks: int) -> np.ndarray:
    """Draw a legal assignment: the number never falls along a path, so no two chunks hold each other's ancestors."""
    chunk_of = np.zeros(forest.num_tokens, np.int64)
    for token, parent in enumerate(forest.parent):
        lowest = 0 if parent < 0 else chunk_of[parent]
        chunk_of[token] = rng.integers(lowest, num_chunks) if rng.random() < 0.3 else lowest
    return chunk_of


def ancestor_sets(forest: Forest) -> list[set[int]]:
    """Return every token's proper ancestors, one parent pointer at a time."""
    above: list[set[int]] = []
    for parent in forest.parent.tolist():
        above.append(set() if parent < 0 else above[parent] | {parent})
    return above


SHAPES: dict[str, list[list[int]]] = {
    "one token": [[7]],
    "chain": [list(range(13))],
    "star": [[0, i] for i in range(1, 8)],
    "comb": [[*range(i), 90 + i, 80] for i in range(1, 9)],
    "duplicates": [[1, 2, 3, 4]] * 3,
    "prefix": [[1, 2, 3, 4, 5, 6], [1, 2, 3], [1, 2, 3, 4, 5, 6]],
    "ragged tails": [[1, 2, *range(10 * i, 10 * i + i)] for i in range(1, 6)],
    "several trees": [[1, 2, 3], [1, 2, 4, 5], [6], [7, 8], [7, 9, 1, 1]],
}


def shaped(name: str) -> Forest:
    """Build one of SHAPES."""
    return forest_of(*SHAPES[name])


def caterpillar(length: int) -> list[np.ndarray]:
    """Return `length` nested prefixes of one path, each with a leaf of its own: every path token is a branch point."""
    path = np.arange(length, dtype=np.int32)
    return [np.append(path[: i + 1], np.int32(length + i)) for i in range(length)]


def star(num_children: int) -> list[np.ndarray]:
    """Return one root with `num_children` leaves."""
    return [np.array([0, i], np.int32) for i in range(1, num_children + 1)]


def broom(prefix: int, num_leaves: int, leaf: int) -> list[np.ndarray]:
    """Return a long shared prefix with `num_leaves` branches of `leaf` tokens."""
    path = np.arange(prefix, dtype=np.int32)
    return [np.concatenate([path, np.full(leaf, i, np.int32)]) for i in range(num_leaves)]


def make_plan(forest: Forest, budget: int | str, *, multiple: int = 1, in_flight: int = 1) -> Plan:
    """Plan a forest with aligned cuts, which need no cost model: small budgets give many odd chunks."""
    capacity = capacity_of(forest.num_tokens, budget, multiple)
    chunk_of = aligned_cuts(forest, capacity)
    return schedule(forest, chunk_of, capacity=capacity, multiple=multiple, in_flight=in_flight)


def program(plan: Plan) -> StageProgram:
    """Return what a process that holds the whole model runs of a plan."""
    operations = tuple(StageOperation(part=0, operation=operation) for operation in plan.operations)
    return StageProgram(plans=(plan,), operations=operations)


def visible_pairs(forest: Forest, call: Call) -> np.ndarray:
    """Return who sees whom in a call by definition, bool [R, C + R]: ancestors and oneself; padding sees itself."""
    above = ancestor_sets(forest)
    keys = [*call.context.tolist(), *call.tokens.tolist()]
    visible = np.zeros((call.size, len(call.context) + call.size), bool)
    for row, token in enumerate(call.tokens.tolist()):
        visible[row, : len(keys)] = [key == token or key in above[token] for key in keys]
    for row in range(len(call.tokens), call.size):
        visible[row, len(call.context) + row] = True
    return visible


def mask_of(call: Call) -> TreeMask:
    return tree_mask(call.visible_from, call.visible_to, call.size, "cpu")


def mask_of_subset(forest: Forest, rng: np.random.Generator) -> tuple[TreeMask, np.ndarray]:
    """Draw any sorted queries and any context; return their mask by the two-number rule, and pairs by definition."""
    is_query = rng.random(forest.num_tokens) < rng.uniform(0.2, 0.9)
    is_query[rng.integers(forest.num_tokens)] = True
    queries, others = np.flatnonzero(is_query), np.flatnonzero(~is_query)
    keys = np.concatenate([others[rng.random(len(others)) < 0.7], queries])
    ends = (np.searchsorted(queries, ends).astype(np.int32) for ends in (keys, forest.subtree_end[keys]))
    above = ancestor_sets(forest)
    return tree_mask(*ends, len(queries), "cpu"), np.array([[k == q or k in above[q] for k in keys] for q in queries])


class LargestTensor(TorchDispatchMode):
    """Record the most elements that any result of a torch operation has."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for part in result if isinstance(result, tuple | list) else (result,):
            if isinstance(part, torch.Tensor):
                self.numel = max(self.numel, part.numel())
        return result


def causal_mask(num_queries: int, device: torch.device | str) -> TreeMask:
    """Return the ordinary causal mask of one sequence in the same form."""
    rows = torch.arange(num_queries, dtype=torch.int32, device=device)
    return TreeMask(visible_from=rows, visible_to=torch.full_like(rows, num_queries), num_queries=num_queries)
