"""Fit a roofline to measured calls: non-negative coefficients that minimise the squared relative error.

Shapes: n measured calls, K columns of the device part (a constant and the counts that are not 0 everywhere).
"""

import numpy as np
from scipy.optimize import nnls

from megatron_dta.errors import UsageError
from megatron_dta.tree.cost import CallCost

_DEVICE = ("fixed", "row", "pair", "context", "source")


def fit_calls(
    rows: np.ndarray, pairs: np.ndarray, context: np.ndarray, sources: np.ndarray, seconds: np.ndarray
) -> CallCost:
    """Fit the cost of one kind of call to its counts and measured seconds, arrays [n].

    The calls bound by the host are those with the least device time, so every split of the calls in that order is
    tried: the first part gives the launch floor, the second the device part, and the split with the least error of the
    whole roofline stays. The order is that of the measured times first, then that of the last fit, until nothing
    improves. A count that is 0 everywhere costs 0. Raises UsageError for times that are not positive, and for calls too
    few or too alike to tell the coefficients apart.
    """
    seconds = np.asarray(seconds, np.float64)
    columns = _columns(rows, pairs, context, sources)
    used = np.flatnonzero(columns.any(axis=0))
    _check(columns[:, used], seconds)
    relative = columns[:, used] / seconds[:, None]  # a residual of these against 1 is a relative error
    scale = np.linalg.norm(relative, axis=0)
    relative /= scale
    least, launch, device, order = np.inf, 0.0, np.zeros(len(used)), np.argsort(seconds, kind="stable")
    while True:
        found = min((_split(relative, seconds, order, k) for k in range(len(seconds) - len(used) + 1)), key=_error)
        if not _error(found) < least:
            break
        least, launch, device = found
        order = np.argsort(relative @ device * seconds, kind="stable")
    parts = dict.fromkeys(_DEVICE, 0.0) | {_DEVICE[i]: float(x) for i, x in zip(used, device / scale)}
    return CallCost(launch=launch, **parts)


def errors(
    cost: CallCost,
    rows: np.ndarray,
    pairs: np.ndarray,
    context: np.ndarray,
    sources: np.ndarray,
    seconds: np.ndarray,
) -> tuple[float, float]:
    """Return the median and the worst |predicted / measured - 1|; arrays [n]."""
    off = np.abs(cost.seconds(rows, pairs, context, sources) / np.asarray(seconds) - 1)
    return float(np.median(off)), float(off.max())


_Fit = tuple[float, float, np.ndarray]
"""Sum of squared relative errors, launch seconds, scaled device coefficients [K]."""


def _error(fit: _Fit) -> float:
    return fit[0]


def _split(relative: np.ndarray, seconds: np.ndarray, order: np.ndarray, num_floor: int) -> _Fit:
    """Fit the first `num_floor` calls of `order` by one floor and the others by `relative` [n, K]."""
    floor, bound = seconds[order[:num_floor]], order[num_floor:]
    launch = float((1 / floor).sum() / (1 / floor**2).sum()) if num_floor else 0.0
    device, _ = nnls(relative[bound], np.ones(len(bound)))
    off = np.maximum(launch / seconds, relative @ device) - 1
    return float(off @ off), launch, device


def _columns(*counts: np.ndarray) -> np.ndarray:
    """[n] each -> [n, 1 + number of counts]: a constant, then the counts."""
    return np.stack([np.ones(len(counts[0])), *(np.asarray(count, np.float64) for count in counts)], axis=1)


def _check(columns: np.ndarray, seconds: np.ndarray) -> None:
    if not (np.isfinite(seconds) & (seconds > 0)).all():
        raise UsageError(f"a measured time is {seconds.min()} s; expected positive times, measure again")
    num_calls, unknowns = len(seconds), columns.shape[1] + 1
    if num_calls < unknowns:
        raise UsageError(
            f"{num_calls} measured calls; a fit needs at least {unknowns}; measure more shapes ({_REMEDY})"
        )
    rank = np.linalg.matrix_rank(columns / np.linalg.norm(columns, axis=0))
    if rank < columns.shape[1]:
        raise UsageError(
            f"{num_calls} measured calls tell only {rank} of {columns.shape[1]} coefficients apart; "
            f"measure calls of several sizes ({_REMEDY})"
        )


_REMEDY = "raise engine.budget, or use a smaller model where memory ran out"
