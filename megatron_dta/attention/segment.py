"""The backend for CPUs, and for fp64 anywhere: each run of queries against the keys that it sees.

What lives beside the inputs: one run's keys and values, a block of scores, and every run's list of key numbers. Keys
may be any, in any order, seen or not; every query sees at least one.

Shapes: T query rows, C keys, N query heads, K key/value heads, G = N / K, H head size, n rows and m keys of a block.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from megatron_dta.attention.mask import TreeMask

MAX_SCORES = 2**21
"""Scores alive at once, over all heads: the block of query rows is chosen to stay near it."""
MAX_OPENING = 256
"""Keys that may turn visible inside a block of query rows: the earlier rows compute their scores for nothing."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """Query rows start .. stop, in which keys turn visible but none is lost."""

    start: int
    stop: int
    keys: torch.Tensor
    """int64: the keys that its last row sees, in the order in which they turn visible."""
    opening: np.ndarray
    """int32: the rows after `start` at which the last of them turn visible, increasing; the others are from `start`."""


class Block(NamedTuple):
    """Query rows of a run, and the first of its keys: `known` that all of the rows see, `seen` that the last sees."""

    rows: slice
    known: int
    seen: int
    opening: np.ndarray
    """int32 [seen - known]: the row at which each of the others turns visible."""


def query_runs(mask: TreeMask) -> list[Run]:
    """Cut the query rows where the interval of a visible key ends, and collect the keys of each run."""
    visible_from, visible_to = mask.visible_from.cpu().numpy(), mask.visible_to.cpu().numpy()
    num_queries, is_seen = mask.num_queries, visible_from < visible_to
    ends = np.unique(visible_to[is_seen])
    bounds = np.concatenate([[0], ends[(ends > 0) & (ends < num_queries)], [num_queries]])
    in_order = np.flatnonzero(is_seen)[np.argsort(visible_from[is_seen], kind="stable")]
    opened = np.searchsorted(visible_from[in_order], bounds)
    runs, keys, used = [], in_order[:0], 0
    for start, stop, count in zip(bounds[:-1].tolist(), bounds[1:].tolist(), opened[1:].tolist()):
        fresh, used = in_order[used:count], count
        keys = np.concatenate([keys, fresh])
        keys = keys[visible_to[keys] > start]
        opening = visible_from[fresh]
        opening = opening[opening.searchsorted(start, side="right") :]
        on_device = torch.from_numpy(keys).to(mask.visible_from.device)
        runs.append(Run(start=start, stop=stop, keys=on_device, opening=opening))
    return runs


class SegmentBackend:
    """Eager matrix products per run, in fp32 for lower precisions; scores are worked on in place."""

    def forward(self, q, k, v, mask: TreeMask, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Backend`."""
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[1], q.shape[0], dtype=_wide(q))
        for run in _runs(mask):
            keys, values = _by_head(k, run.keys), _by_head(v, run.keys)
            for block in _blocks(run, q.shape[1]):
                rows, seen = block.rows, block.seen
                p = _scores(_by_group(q[rows], k.shape[1]) * scale, keys[:, :seen], block)
                largest = p.amax(-1, keepdim=True)
                total = p.sub_(largest).exp_().sum(-1, keepdim=True)
                out[rows] = _to_rows((p @ values[:, :seen]).div_(total), q.shape[1]).to(q.dtype)
                lse[:, rows] = (largest + total.log()).view(q.shape[1], -1)
        return out, lse

    def backward(self, dout, q, k, v, out, lse, mask: TreeMask, scale: float):
        """See `Backend`; dk and dv come in fp32 for lower precisions."""
        dq = torch.empty_like(q)
        dk, dv = (torch.zeros_like(x, dtype=_wide(q)) for x in (k, v))
        num_groups = k.shape[1]
        for run in _runs(mask):
            keys, values = _by_head(k, run.keys), _by_head(v, run.keys)
            run_dk, run_dv = torch.zeros_like(keys), torch.zeros_like(values)
            for block in _blocks(run, q.shape[1]):
                rows, seen = block.rows, block.seen
                queries, grads = _by_group(q[rows], num_groups) * scale, _by_group(dout[rows], num_groups)
                p = _scores(queries, keys[:, :seen], block).sub_(lse[:, rows].reshape(num_groups, -1, 1)).exp_()
                run_dv[:, :seen].baddbmm_(p.mT, grads)
                delta = (grads * _by_group(out[rows], num_groups)).sum(-1, keepdim=True)
                ds = (grads @ values[:, :seen].mT).sub_(delta).mul_(p)
                dq[rows] = _to_rows((ds @ keys[:, :seen]).mul_(scale), q.shape[1]).to(q.dtype)
                run_dk[:, :seen].baddbmm_(ds.mT, queries)
            dk.index_add_(0, run.keys, run_dk.transpose(0, 1))
            dv.index_add_(0, run.keys, run_dv.transpose(0, 1))
        return dq, dk, dv


def _runs(mask: TreeMask) -> list[Run]:
    return mask.cached("query_runs", lambda: query_runs(mask))


def _blocks(run: Run, num_heads: int) -> Iterator[Block]:
    """Cut a run into blocks whose scores, and whose scores for nothing, stay within the limits."""
    opening = run.opening
    num_known = len(run.keys) - len(opening)
    rows_at_once = max(1, MAX_SCORES // (len(run.keys) * num_heads))
    start, first = run.start, 0
    while start < run.stop:
        stop = min(start + rows_at_once, run.stop)
        if first + MAX_OPENING < len(opening):
            stop = min(stop, int(opening[first + MAX_OPENING]))
        last = len(opening) if stop == run.stop else int(opening.searchsorted(stop))
        yield Block(slice(start, stop), num_known + first, num_known + last, opening[first:last])
        start, first = stop, int(opening.searchsorted(stop, side="right"))


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _by_head(x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """[C, K, H] -> the chosen keys, [K, m, H], at least fp32."""
    return x.index_select(0, chosen).to(_wide(x)).transpose(0, 1).contiguous()


def _by_group(x: torch.Tensor, num_groups: int) -> torch.Tensor:
    """[n, N, H] -> [K, G n, H], at least fp32: query heads of one key head side by side."""
    n, num_heads, head_size = x.shape
    return x.to(_wide(x)).transpose(0, 1).reshape(num_groups, num_heads // num_groups * n, head_size)


def _to_rows(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    """[K, G n, H] -> [n, N, H]"""
    return x.reshape(num_heads, -1, x.shape[-1]).transpose(0, 1)


def _scores(queries: torch.Tensor, keys: torch.Tensor, block: Block) -> torch.Tensor:
    """[K, G n, H], [K, m, H] -> masked scores [K, G n, m]."""
    scores = queries @ keys.mT
    if block.known < block.seen:
        rows = torch.arange(block.rows.start, block.rows.stop, device=keys.device)
        later = torch.from_numpy(block.opening).to(keys.device) > rows[:, None]
        scores.view(len(keys), -1, len(rows), block.seen)[..., block.known :].masked_fill_(later, -torch.inf)
    return scores
