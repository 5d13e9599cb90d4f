"""A batch's plans as one page to look at: when each rank runs what, and which part of its forest is in which chunk.

The page is self-contained: `drawing.html` beside this file, with `drawing.js` and the numbers, one array per column,
put into it.
"""

import html
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dta.tree.cost import CostModel
from megatron_dta.tree.plan import Call, Chunk, Kind, Plan

MOST_PIECES = 700_000
"""Pieces that one page holds, ten bytes each. The ranks that take longest come first; the page names the others."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Pieces:
    """The forest of a plan cut where the segment, the chunk or the pushed flag changes: P pieces, in preorder."""

    first: np.ndarray
    """int32 [P]: first tree token."""
    count: np.ndarray
    """int32 [P]: tokens, at least 1; the pieces are back to back."""
    depth: np.ndarray
    """int32 [P]: depth of the first token."""
    end: np.ndarray
    """int32 [P]: one past the last token of the piece's subtree."""
    chunk: np.ndarray
    """int32 [P]: index into `Plan.chunks`, which is the order of execution."""
    pushed: np.ndarray
    """bool [P]: whether the tokens are pushed: they have descendants in other chunks."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Calls:
    """The C calls of a plan in the order of its operations, a chunk where its backward runs."""

    chunk: np.ndarray
    """int32 [C]: index into `Plan.chunks`, -1 for a push."""
    rows: np.ndarray
    """int64 [C]: rows that run, padding included."""
    tokens: np.ndarray
    """int64 [C]: tree tokens among them."""
    pairs: np.ndarray
    """int64 [C]: visible (query, key) pairs; a padding row sees itself."""
    context: np.ndarray
    """int64 [C]: context tokens."""
    sources: np.ndarray
    """int64 [C]: rows that reach the LM head."""
    seconds: np.ndarray
    """float64 [C]: predicted time, of a chunk forward and backward."""


def pieces_of(plan: Plan) -> Pieces:
    """Cut a plan's forest into maximal runs of tokens with one segment, one chunk and one pushed flag."""
    forest = plan.forest
    chunk_of = np.full(forest.num_tokens, -1, np.int32)
    is_pushed = np.zeros(forest.num_tokens, bool)
    for index, chunk in enumerate(plan.chunks):
        chunk_of[chunk.tokens] = index
    for push in plan.pushes:
        is_pushed[push.tokens] = True
    starts = np.zeros(forest.num_tokens, bool)
    starts[forest.segment_start] = True
    starts[1:] |= (chunk_of[1:] != chunk_of[:-1]) | (is_pushed[1:] != is_pushed[:-1])
    first = np.flatnonzero(starts).astype(np.int32)
    return Pieces(
        first=first,
        count=np.diff(first, append=np.int32(forest.num_tokens)),
        depth=forest.depth[first],
        end=forest.subtree_end[first],
        chunk=chunk_of[first],
        pushed=is_pushed[first],
    )


def calls_of(plan: Plan, cost: CostModel) -> Calls:
    """Count a plan's calls and predict their seconds."""
    operations = [operation for operation in plan.operations if operation.kind in (Kind.PUSH, Kind.BACKWARD)]
    is_push = np.array([operation.kind == Kind.PUSH for operation in operations], bool)
    index = np.array([operation.index for operation in operations], np.int32)
    counts = np.zeros((5, len(operations)), np.int64)
    for k, operation in enumerate(operations):
        call: Call = (plan.pushes if is_push[k] else plan.chunks)[operation.index]
        # A token sees its depth + 1 keys, a padding row one: in sum the depths and one for each row.
        pairs = int(plan.forest.depth[call.tokens].sum(dtype=np.int64)) + call.size
        sources = len(call.source_rows) if isinstance(call, Chunk) else 0
        counts[:, k] = call.size, len(call.tokens), pairs, len(call.context), sources
    rows, tokens, area, context, heads = counts
    numbers = rows, area, context, heads
    return Calls(
        chunk=np.where(is_push, np.int32(-1), index),
        rows=rows,
        tokens=tokens,
        pairs=area,
        context=context,
        sources=heads,
        seconds=np.where(is_push, cost.push.seconds(*numbers), cost.chunk.seconds(*numbers)),
    )


def draw_plans(plans: Sequence[Plan], cost: CostModel, *, title: str, facts: Mapping[str, str]) -> str:
    """Return an HTML page, in one file and without network access, that shows the plans of the data-parallel ranks.

    plans: one per rank, each over its own forest. facts: what the page's head tells, label to text. Raises ValueError
    without a plan.
    """
    if not plans:
        raise ValueError("there is no plan to draw; expected one per data-parallel rank")
    calls = [calls_of(plan, cost) for plan in plans]
    pieces: list[Pieces | None] = [None] * len(plans)
    costliest_first = sorted(range(len(plans)), key=lambda rank: -calls[rank].seconds.sum())
    room = MOST_PIECES
    for rank in costliest_first:
        found = pieces_of(plans[rank])
        if rank == costliest_first[0] or len(found.first) <= room:  # the page opens with the costliest
            pieces[rank] = found
            room = max(room - len(found.first), 0)
    numbers = {
        "machine": cost.machine,
        "in_flight": max(plan.in_flight for plan in plans),
        "ranks": [_rank_numbers(*parts) for parts in zip(plans, calls, pieces)],
    }
    parts = {
        "title": html.escape(title),
        "facts": "".join(f"<tr><th>{html.escape(k)}</th><td>{html.escape(v)}</td></tr>" for k, v in facts.items()),
        # Inside a script element only "<" could end it.
        "numbers": json.dumps(numbers, separators=(",", ":")).replace("<", "\\u003c"),
        "script": _beside("drawing.js"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda name: parts[name[1]], _beside("drawing.html"))


def _beside(name: str) -> str:
    """Read a file of this folder."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _rank_numbers(plan: Plan, calls: Calls, pieces: Pieces | None) -> dict[str, Any]:
    """Return what the page holds of one rank."""
    forest = plan.forest
    return {
        "trees": int((forest.parent < 0).sum()),
        "segments": len(forest.segment_start),
        "sequences": forest.num_sequences,
        "chunk": calls.chunk.tolist(),
        "rows": calls.rows.tolist(),
        "tokens": calls.tokens.tolist(),
        "context": calls.context.tolist(),
        "sources": calls.sources.tolist(),
        "seconds": [float(f"{seconds:.4g}") for seconds in calls.seconds.tolist()],
        "pieces": None if pieces is None else _piece_numbers(pieces),
    }


def _piece_numbers(pieces: Pieces) -> dict[str, list[int]]:
    """Return what the page cannot derive: first tokens and subtree ends follow from counts and depths.

    `back` is how far a piece starts above the end of the one before it: 0 for a first child.
    """
    below = np.append(0, pieces.depth + pieces.count)[: len(pieces.depth)]
    return {
        "count": pieces.count.tolist(),
        "back": (below - pieces.depth).tolist(),
        "code": (2 * pieces.chunk + pieces.pushed).tolist(),
    }
