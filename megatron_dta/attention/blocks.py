"""Block lists for block-sparse kernels, from the two vectors of a mask.

Shapes: QB and KB blocks of query rows and keys.
"""

from dataclasses import dataclass

import torch

from megatron_dta.attention.mask import TreeMask

_NEVER = 2**31 - 1


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockIndex:
    """For each block of one side, the blocks of the other side to visit; listed first, the rest of a row is filler."""

    partial_count: torch.Tensor
    """int32 [A]: blocks where the kernel has to evaluate the mask."""
    partial_index: torch.Tensor
    """int32 [A, B]"""
    full_count: torch.Tensor
    """int32 [A]: blocks in which every query sees every key."""
    full_index: torch.Tensor
    """int32 [A, B]"""


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockLists:
    """The same classification from both sides."""

    forward: BlockIndex
    """Query blocks, with the key blocks of each."""
    backward: BlockIndex
    """Key blocks, with the query blocks of each."""


def classify_blocks(mask: TreeMask, block_q: int, block_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (partial, full), bool [QB, KB]: O(blocks) work from the extremes of the vectors per key block.

    No block with a visible pair is missed and every full block is fully visible, for any mask; both are exact where
    the keys of a block are consecutive preorder tokens. A ragged last key block is never full.
    """
    # A key that nobody sees, common in a shard, must not widen its block's extremes; it keeps it from being full.
    unseen = mask.visible_from >= mask.visible_to
    num_key_blocks = -(-mask.num_keys // block_k)
    tail = num_key_blocks * block_k - mask.num_keys

    def extreme(vector: torch.Tensor, filler: int, largest: bool) -> torch.Tensor:
        shown = vector.masked_fill(unseen, filler)
        padded = torch.nn.functional.pad(shown, (0, tail), value=filler).view(num_key_blocks, block_k)
        return padded.amax(1) if largest else padded.amin(1)

    first = torch.arange(0, mask.num_queries, block_q, device=mask.visible_from.device)[:, None]
    last = (first + block_q).clamp(max=mask.num_queries) - 1
    seen = (extreme(mask.visible_from, _NEVER, False) <= last) & (extreme(mask.visible_to, 0, True) > first)
    full = (extreme(mask.visible_from, _NEVER, True) <= first) & (extreme(mask.visible_to, 0, False) > last)
    return seen & ~full, full


def block_lists(mask: TreeMask, block_q: int, block_k: int) -> BlockLists:
    """Return the block lists of a mask for kernels with blocks of `block_q` query rows and `block_k` keys."""
    partial, full = classify_blocks(mask, block_q, block_k)
    return BlockLists(forward=_index(partial, full), backward=_index(partial.T, full.T))


def _index(partial: torch.Tensor, full: torch.Tensor) -> BlockIndex:
    return BlockIndex(
        partial_count=partial.sum(1, dtype=torch.int32),
        partial_index=_listed_first(partial),
        full_count=full.sum(1, dtype=torch.int32),
        full_index=_listed_first(full),
    )


def _listed_first(member: torch.Tensor) -> torch.Tensor:
    """Return for each row the column numbers, members first and increasing."""
    return torch.argsort(~member, dim=1, stable=True).to(torch.int32).contiguous()
