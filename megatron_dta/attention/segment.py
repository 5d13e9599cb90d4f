"""The backend for CPUs, and for fp64 anywhere: each run of queries against the keys of its path.

What lives beside the inputs: one run's keys and values, a block of scores, and every run's list of key numbers.

Shapes: T query rows, C keys, N query heads, K key/value heads, G = N / K, H head size, n rows and m keys of a block.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from megatron_dta.attention.mask import TreeMask

MAX_SCORES = 2**21
"""Scores alive at once, over all heads: the block of query rows is chosen to stay near it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """Query rows start .. stop, each seeing `keys` (its path before the run) and the run's rows up to itself."""

    start: int
    stop: int
    keys: torch.Tensor
    """int64: indices into the C keys: the path, then the run's own rows."""


def query_runs(mask: TreeMask) -> list[Run]:
    """Cut the query rows where a key's interval begins (context only) or ends, and collect each run's path."""
    visible_from, visible_to = mask.visible_from.cpu().numpy(), mask.visible_to.cpu().numpy()
    num_context, num_queries = mask.num_context, mask.num_queries
    starts = np.unique(np.concatenate([[0], visible_to, visible_from[:num_context]]))
    bounds = np.append(starts[(starts >= 0) & (starts < num_queries)], num_queries)
    opening = np.argsort(visible_from[:num_context], kind="stable")
    opened = np.searchsorted(visible_from[opening], bounds, side="right")
    runs, path, used = [], np.zeros(0, np.int64), 0
    for i, (start, stop) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist())):
        path = np.concatenate([opening[used : opened[i]], path])
        used = int(opened[i])
        path = path[visible_to[path] > start]
        keys = np.concatenate([path, np.arange(num_context + start, num_context + stop)])
        runs.append(Run(start=start, stop=stop, keys=torch.from_numpy(keys).to(mask.visible_from.device)))
        path = keys
    return runs


class SegmentBackend:
    """Eager matrix products per run, in fp32 for lower precisions; scores are worked on in place."""

    def forward(self, q, k, v, mask: TreeMask, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Backend`."""
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[1], q.shape[0], dtype=_wide(q))
        for run in _runs(mask):
            keys, values = _by_head(k, run.keys), _by_head(v, run.keys)
            for rows, seen in _blocks(run, q.shape[1]):
                p = _scores(_by_group(q[rows], k.shape[1]) * scale, keys[:, :seen], rows)
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
            for rows, seen in _blocks(run, q.shape[1]):
                queries, grads = _by_group(q[rows], num_groups) * scale, _by_group(dout[rows], num_groups)
                p = _scores(queries, keys[:, :seen], rows).sub_(lse[:, rows].reshape(num_groups, -1, 1)).exp_()
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


def _blocks(run: Run, num_heads: int) -> Iterator[tuple[slice, int]]:
    """Yield (query rows, how many of the run's keys the last of them sees): the last keys are the rows themselves."""
    num_path = len(run.keys) - (run.stop - run.start)
    rows_at_once = max(1, MAX_SCORES // (len(run.keys) * num_heads))
    for start in range(run.start, run.stop, rows_at_once):
        stop = min(start + rows_at_once, run.stop)
        yield slice(start, stop), num_path + stop - run.start


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


def _scores(queries: torch.Tensor, keys: torch.Tensor, rows: slice) -> torch.Tensor:
    """[K, G n, H], [K, m, H] -> masked scores [K, G n, m]; among the last n keys a row sees those up to its own."""
    n = rows.stop - rows.start
    scores = queries @ keys.mT
    if n > 1:
        later = torch.ones(n, n, dtype=torch.bool, device=keys.device).triu(1)
        scores.view(len(keys), -1, n, keys.shape[1])[..., -n:].masked_fill_(later, -torch.inf)
    return scores
