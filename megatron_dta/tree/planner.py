"""Plan a batch for all ranks: who trains which sequence, in which chunks; then each rank builds its own plan.

The decision needs structure only and is made in one place; its result for a rank is a small `Task`. From its own
sequences and its task a rank builds the arrays of its plan, `build_plan`. Both are pure functions of their arguments.

Shapes: N nodes, S sequences, R ranks, n sequences of one rank, K chunks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_dta.errors import UsageError
from megatron_dta.tree.budget import WHOLE
from megatron_dta.tree.cost import CostModel
from megatron_dta.tree.forest import Forest, build_forest
from megatron_dta.tree.layout import group_by
from megatron_dta.tree.loads import lower_bound
from megatron_dta.tree.moves import moves_from
from megatron_dta.tree.outline import Outline
from megatron_dta.tree.pipeline import Pipeline
from megatron_dta.tree.plan import Plan, StageProgram
from megatron_dta.tree.prediction import Prediction
from megatron_dta.tree.ranks import Packer, RankPacking, node_work
from megatron_dta.tree.schedule import Slots, schedule, stage_program
from megatron_dta.tree.spread import spread

_ROUNDS = 3
_EVALUATIONS = 96
_TRIALS = 128
"""Ranks packed while spreading, at least one round of all, and moves tried after: what bounds planning time."""
_NODES = 300_000
"""Nodes packed while spreading, at least one round."""
_CANDIDATES = 8
"""Ways to spread that are packed, where that is cheap."""
_EVEN = 1.002
"""Slowest over mean where no move is worth its search."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a plan has to fit."""

    cost: CostModel
    budget: int | str = WHOLE
    """Most rows with gradient per chunk, padding included, or `whole`."""
    multiple: int = 1
    """Rows of every call are padded to it."""
    ranks: int = 1
    """Data-parallel ranks."""
    together: int = 1
    """Neighbouring ranks that share collectives inside the model (experts): they run equally many operations."""
    in_flight: int = 1
    state_limit: int | None = None
    """Most cached states alive at once on a rank."""

    def __post_init__(self):
        for name in ("ranks", "together", "in_flight", "multiple"):
            if getattr(self, name) < 1:
                shown = "padding multiple" if name == "multiple" else name
                raise UsageError(f"{shown} is {getattr(self, name)}; expected at least 1")
        if self.state_limit is not None and self.state_limit < 0:
            raise UsageError(f"state_limit is {self.state_limit}; expected a number of cached states, at least 0")
        if self.ranks % self.together:
            raise UsageError(
                f"{self.ranks} data-parallel ranks do not divide into groups of {self.together} that share "
                f"collectives; choose a multiple of {self.together}"
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """What one rank does with a batch."""

    sequences: np.ndarray
    """int32 [n]: the sequences it trains, by number in the whole batch, increasing."""
    parts: np.ndarray
    """int32 [n]: sequences of different parts share nothing, where copying a prefix is cheaper than sharing it."""
    run_length: np.ndarray
    run_chunk: np.ndarray
    """int64: chunks of its tree tokens in preorder, run-length encoded."""
    lengths: np.ndarray
    """int64 [n]: tokens of each sequence, to know them by."""
    capacity: int
    push_capacity: int
    slots: Slots | None
    """Operations it runs where ranks share collectives, or where it has no sequence."""


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchPlan:
    """The tasks of all ranks, with what was predicted of them."""

    tasks: tuple[Task, ...]
    predictions: tuple[Prediction, ...]
    seconds: np.ndarray
    """float64 [R]: predicted time of every rank's own operations."""
    step_seconds: float
    """Predicted time until the last rank is done, waits inside groups included."""
    bound_seconds: float
    """No spreading has a slowest rank below this, even if every rank ran one full chunk without a push."""
    tree_tokens: int
    """Distinct tokens of the whole batch."""
    rank_tokens: np.ndarray
    """int64 [R]: tree tokens of every rank; above `tree_tokens` in sum where a path is on several."""


def plan_batch(outline: Outline, settings: Settings) -> BatchPlan:
    """Decide who trains what in which chunks.

    Raises UsageError for a budget below one padded row, or where no plan was found within the state limit.
    """
    work = node_work(outline, settings.cost)
    packer = Packer(
        outline=outline,
        work=work,
        cost=settings.cost,
        budget=settings.budget,
        multiple=settings.multiple,
        state_limit=settings.state_limit,
        in_flight=settings.in_flight,
    )
    best = _settle(packer, _spread(packer, settings))
    _search_slowest(packer, best)
    slots: list[Slots | None] = [None if len(p.sequences) else _ONE_SLOT for p in best]
    step_seconds = [p.prediction.seconds for p in best]
    if settings.together > 1:
        best, slots, step_seconds = _align(packer, best, settings)
    _check_states(best, settings.state_limit)
    return BatchPlan(
        tasks=tuple(_task(outline, p, s) for p, s in zip(best, slots)),
        predictions=tuple(p.prediction for p in best),
        seconds=np.array([p.prediction.seconds for p in best]),
        step_seconds=max(step_seconds),
        bound_seconds=_bound(outline, work, settings),
        tree_tokens=outline.num_tokens,
        rank_tokens=np.array([p.num_tokens for p in best]),
    )


def _check_states(packed: list[RankPacking], limit: int | None) -> None:
    most = max(packed, key=lambda p: p.prediction.state_rows)
    if limit is not None and most.prediction.state_rows > limit:
        raise UsageError(
            f"state_limit is {limit}; the fewest cached states found for a rank of {most.num_tokens} tree tokens, "
            f"{len(most.sequences)} sequences, are {most.prediction.state_rows}: raise the limit or the budget, or "
            "spread the batch over more ranks"
        )


def _bound(outline: Outline, work: np.ndarray, settings: Settings) -> float:
    """Return the least time of the fullest rank in one call that costs its tokens and no more."""
    call = settings.cost.chunk
    return max(call.launch, call.fixed + lower_bound(outline, work, settings.ranks)) if outline.num_nodes else 0.0


_ONE_SLOT = Slots(pushes=(0,))
_NO_PIPELINE = Pipeline()


def _spread(packer: Packer, settings: Settings) -> list[RankPacking]:
    """Spread by work, then by what packed ranks were found to take; by tokens too, where ranks have few chunks."""
    outline, ranks = packer.outline, settings.ranks
    best: list[RankPacking] = []

    def attempt(weight: np.ndarray, factors: np.ndarray, candidates: int) -> list[RankPacking]:
        nonlocal best
        found = spread(outline, weight, factors)[:candidates]
        tried = [[packer.pack(own, search=False) for own in group_by(rank_of, ranks)] for rank_of in found]
        best = min([*([best] if best else []), *tried], key=lambda ranks: _score(packer, ranks))
        return tried[0]

    packed = attempt(packer.work, np.ones(ranks), _CANDIDATES if ranks * outline.num_nodes < _NODES else 1)
    rounds = min(_ROUNDS, _EVALUATIONS // ranks, _NODES // max(outline.num_nodes, 1)) if ranks > 1 else 1
    for _ in range(rounds - 1):
        # A rank's true cost over its work: chunks that are not full, pushes, contexts.
        factors = np.array([p.prediction.seconds / p.work if p.work else 1.0 for p in packed])
        packed = attempt(packer.work, factors, 1)
    if ranks > 1 and max(p.num_chunks for p in best) in (2, 3):
        attempt(outline.length.astype(np.float64), np.ones(ranks), 1)
    return best


def _search_slowest(packer: Packer, packed: list[RankPacking]) -> None:
    """Search a better packing of the slowest rank while that makes another the slowest, in place."""
    searched: set[int] = set()
    while (slowest := int(np.argmax([p.prediction.seconds for p in packed]))) not in searched:
        searched.add(slowest)
        found = packer.pack(packed[slowest].sequences)
        if _score(packer, [found]) < _score(packer, [packed[slowest]]):
            packed[slowest] = found


def _settle(packer: Packer, packed: list[RankPacking]) -> list[RankPacking]:
    """Move subtrees off the slowest rank while packing both ranks anew shows that it helps.

    Loads are proportional to work, packed ranks are not: one token too many makes a chunk more.
    """
    packed, outline, work = list(packed), packer.outline, packer.work
    rank_of = np.zeros(len(outline.last), np.int64)
    for rank, p in enumerate(packed):
        rank_of[p.sequences] = rank
    trials = min(4 * len(packed), _TRIALS) if len(packed) > 1 else 0
    while trials > 0:
        seconds = np.array([p.prediction.seconds for p in packed])
        factors = np.array([p.prediction.seconds / p.work if p.work else 1.0 for p in packed])
        full = int(seconds.argmax())
        if seconds[full] <= _EVEN * seconds.mean():
            break
        capacity = packed[full].capacity
        excess = (packed[full].num_tokens - 1) % capacity + 1
        per_token = packed[full].work / max(packed[full].num_tokens, 1)
        options = moves_from(outline, work, rank_of, seconds, factors, full)
        options += moves_from(outline, work, rank_of, seconds, factors, full, least=excess * per_token)
        for move in sorted(set(options), key=lambda move: move.worst):
            trials -= 1
            moving = move.sequences(outline, rank_of, full)
            target = packed[move.target]
            given = packer.pack(np.setdiff1d(packed[full].sequences, moving, assume_unique=True), search=False)
            taken = packer.pack(np.union1d(target.sequences, moving), search=False)
            excess_after, slower = _score(packer, [given, taken])
            if slower < seconds[full] * (1 - 1e-6) and excess_after <= _excess(packer, [packed[full], target]):
                packed[full], packed[move.target] = given, taken
                rank_of[moving] = move.target
                break
        else:
            break
    return packed


def _score(packer: Packer, packed: Sequence[RankPacking]) -> tuple[int, float]:
    """Return states above the limit, then the time of the slowest rank: less is better."""
    return _excess(packer, packed), max(p.prediction.seconds for p in packed)


def _align(packer: Packer, packed: list[RankPacking], settings: Settings):
    """Give the ranks of every group equally many chunk slots, of alike chunks, and equally many pushes between them."""
    aligned: list[RankPacking] = []
    slots: list[Slots | None] = []
    seconds: list[float] = []
    for start in range(0, len(packed), settings.together):
        own, group_slots = _alike(packer, packed[start : start + settings.together])
        aligned += own
        slots += [group_slots] * len(own)
        seconds.append(_group_seconds(own, len(group_slots.pushes)))
    return aligned, slots, seconds


def _alike(packer: Packer, group: list[RankPacking]) -> tuple[list[RankPacking], Slots]:
    """Choose how many chunks the ranks of a group run, and pack them evenly if that is faster for all."""
    most = max(1, *(p.num_chunks for p in group))
    fewest = max(1, *(-(-p.num_tokens // max(p.capacity, 1)) for p in group))
    choices = [_in_slots(packer, group, most)]
    for num_slots in range(fewest, most + 2):
        even = [packer.balanced(p, num_slots) for p in group]
        if max(p.num_chunks for p in even) <= num_slots:
            choices.append(_in_slots(packer, even, num_slots))

    def key(choice: tuple[list[RankPacking], Slots]) -> tuple[int, float]:
        ranks, slots = choice
        return _excess(packer, ranks), _group_seconds(ranks, len(slots.pushes))

    return min(choices, key=key)


def _in_slots(packer: Packer, group: list[RankPacking], num_slots: int) -> tuple[list[RankPacking], Slots]:
    """Make pushes where the first rank of the group needs one; states are cached from then on."""
    pushes = np.max([_pushes_before(p.prediction, num_slots) for p in group], axis=0)
    slot_of = np.repeat(np.arange(num_slots), np.diff(pushes, prepend=0))
    ranks = [packer.with_pushes_before(p, slot_of[: len(p.prediction.push_rows)]) for p in group]
    return ranks, Slots(pushes=tuple(np.diff(pushes, prepend=0).tolist()))


def _excess(packer: Packer, packed: Sequence[RankPacking]) -> int:
    """Return the cached states above the limit on the rank that has most."""
    most = max(p.prediction.state_rows for p in packed)
    return 0 if packer.state_limit is None else max(0, most - packer.state_limit)


def _pushes_before(prediction: Prediction, num_slots: int) -> np.ndarray:
    """Count the pushes that a rank makes up to each chunk slot, int64 [slots]."""
    return np.searchsorted(prediction.push_before, np.arange(num_slots), side="right")


def _group_seconds(group: list[RankPacking], num_slots: int) -> float:
    """Return the time of ranks that wait for each other at every call."""
    chunks = [np.pad(p.prediction.chunk_seconds, (0, num_slots - p.num_chunks)) for p in group]
    most = max(len(p.prediction.push_seconds) for p in group)
    pushes = [np.pad(p.prediction.push_seconds, (0, most - len(p.prediction.push_seconds))) for p in group]
    return float(np.max(chunks, axis=0).sum() + np.max(pushes, axis=0).sum())


def _task(outline: Outline, packed: RankPacking, slots: Slots | None) -> Task:
    last = outline.last[packed.sequences]
    return Task(
        sequences=packed.sequences.astype(np.int32),
        parts=packed.parts.astype(np.int32),
        run_length=packed.run_length.astype(np.int64),
        run_chunk=packed.run_chunk.astype(np.int64),
        lengths=outline.depth[last] + outline.length[last],
        capacity=packed.capacity,
        push_capacity=packed.prediction.push_capacity,
        slots=slots,
    )


def build_plan(
    task: Task,
    tokens: Sequence[np.ndarray],
    loss_masks: Sequence[np.ndarray] | None,
    identities: Sequence[np.ndarray | None] | None,
    *,
    multiple: int,
    in_flight: int = 1,
) -> Plan:
    """Build a rank's plan from its own sequences, in the order of `task.sequences`.

    Raises ValueError where they are not the sequences that the task was made for.
    """
    forest, chunk_of = _own_forest(task, tokens, loss_masks, identities)
    return schedule(
        forest,
        chunk_of,
        capacity=task.capacity,
        push_capacity=task.push_capacity,
        multiple=multiple,
        in_flight=in_flight,
        slots=task.slots,
    )


def build_program(
    task: Task,
    tokens: Sequence[np.ndarray],
    loss_masks: Sequence[np.ndarray] | None,
    identities: Sequence[np.ndarray | None] | None,
    *,
    multiple: int,
    pipeline: Pipeline = _NO_PIPELINE,
    stage: int = 0,
) -> StageProgram:
    """Build what one pipeline stage of a rank runs, from the rank's own sequences in the order of `task.sequences`.

    Raises ValueError where they are not the sequences that the task was made for.
    """
    forest, chunk_of = _own_forest(task, tokens, loss_masks, identities)
    return stage_program(
        forest,
        chunk_of,
        capacity=task.capacity,
        push_capacity=task.push_capacity,
        multiple=multiple,
        pipeline=pipeline,
        stage=stage,
        slots=task.slots,
    )


def _own_forest(
    task: Task,
    tokens: Sequence[np.ndarray],
    loss_masks: Sequence[np.ndarray] | None,
    identities: Sequence[np.ndarray | None] | None,
) -> tuple[Forest, np.ndarray]:
    """Build the forest of a task's sequences; return it with the chunk of every token, int64 [T]."""
    forest = build_forest(tokens, loss_masks, identities, parts=task.parts)
    if forest.num_tokens != task.run_length.sum() or not np.array_equal(forest.lengths, task.lengths):
        raise ValueError(
            f"these {len(tokens)} sequences have {forest.num_tokens} distinct tokens; the task was planned for "
            f"{len(task.lengths)} with {task.run_length.sum()}, or for others of other lengths: not the same batch"
        )
    return forest, np.repeat(task.run_chunk, task.run_length)
