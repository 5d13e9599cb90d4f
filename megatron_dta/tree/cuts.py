"""Choose which tree tokens form a chunk."""

from numbers import Integral

import numpy as np

from megatron_dta.errors import UsageError
from megatron_dta.tree.forest import Forest

WHOLE = "whole"


def capacity_of(num_tokens: int, budget: int | str, multiple: int = 1) -> int:
    """Return the most tokens one chunk may hold: the budget (`whole`: all tokens) in full multiples of the padding.

    Raises UsageError if not one padded row fits the budget.
    """
    if multiple < 1:
        raise UsageError(f"padding multiple is {multiple}; expected a positive whole number")
    if budget == WHOLE:
        return -(-num_tokens // multiple) * multiple
    if isinstance(budget, bool | str) or not isinstance(budget, Integral) or int(budget) < multiple:
        raise UsageError(
            f"budget is {budget!r}; expected '{WHOLE}' or at least {multiple} tokens, the padding multiple of a chunk"
        )
    return int(budget) // multiple * multiple


def aligned_cuts(forest: Forest, capacity: int) -> np.ndarray:
    """Assign every tree token to a chunk of at most `capacity` tokens, int32 [T]: contiguous ranges of preorder.

    No cut crosses a subtree that fits a chunk, so only tokens whose own subtree exceeds the capacity can have
    descendants in another chunk: the least possible for that capacity.
    """
    num_tokens = forest.num_tokens
    token = np.arange(num_tokens)
    heavy = forest.subtree_end - token > capacity
    below_heavy = forest.parent < 0
    below_heavy[~below_heavy] = heavy[forest.parent[~below_heavy]]
    unit_start = np.append(token[heavy | below_heavy], num_tokens)
    cuts = [0]
    while unit_start[cuts[-1]] < num_tokens:
        limit = unit_start[cuts[-1]] + capacity
        cuts.append(int(np.searchsorted(unit_start, limit, side="right")) - 1)
    sizes = np.diff(unit_start[cuts])
    return np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
