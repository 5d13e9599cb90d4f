"""The mask of a call: two numbers per key say which queries see it.

Shapes: T query rows, C keys: context first, then the rows of the call, all of them queries or (in a shard) some.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True, kw_only=True, eq=False)
class TreeMask:
    """Key j is visible to query i iff visible_from[j] <= i < visible_to[j]; no T x C tensor exists."""

    visible_from: torch.Tensor
    """int32 [C]"""
    visible_to: torch.Tensor
    """int32 [C]"""
    num_queries: int
    _cache: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def num_keys(self) -> int:
        return len(self.visible_from)

    def cached(self, key: Any, build: Callable[[], Any]) -> Any:
        """Build something once for all layers of a call: block lists, segment lists, padded vectors."""
        if key not in self._cache:
            self._cache[key] = build()
        return self._cache[key]


def tree_mask(
    visible_from: np.ndarray, visible_to: np.ndarray, num_queries: int, device: torch.device | str
) -> TreeMask:
    """Put a plan's two int32 vectors [C] on a device."""
    return TreeMask(
        visible_from=torch.as_tensor(visible_from, device=device),
        visible_to=torch.as_tensor(visible_to, device=device),
        num_queries=num_queries,
    )


def dense_mask(mask: TreeMask, start: int = 0, stop: int | None = None) -> torch.Tensor:
    """Return the bool tensor [stop - start, C] of query rows start .. stop: for oracles and tests only."""
    rows = torch.arange(start, mask.num_queries if stop is None else stop, device=mask.visible_from.device)[:, None]
    return (mask.visible_from <= rows) & (rows < mask.visible_to)
