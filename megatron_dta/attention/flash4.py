"""The `flash4` backend: FlashAttention-4 (CuTe) kernels on Hopper and Blackwell, forward and backward as two calls.

Shape legend: T queries, C keys (context rows first, then own rows), N query heads, K key/value heads, H head size.
Importing this module needs neither a GPU nor the package; constructing `Flash4Backend` needs both.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_dta.attention.blocks import BlockIndex, block_lists
from megatron_dta.attention.mask import TreeMask
from megatron_dta.errors import UsageError

WRITTEN_FOR = "4.0.0b36"
"""The version of flash-attn-4 whose source this file was written against."""

REMEDY = f"pip install 'flash-attn-4[cu13]=={WRITTEN_FOR}'"

# Compute capability -> rows of one query block. A Blackwell forward tile holds two stages of 128 query rows and
# refuses shorter blocks; on Hopper 128 is what both directions can tile (64-row backward tiles go two to a block).
_QUERY_BLOCK = {9: 128, 10: 256}


def _key_block(head_size: int, capability: int) -> int:
    """Return the rows of one key block; on Hopper it must equal the kernels' own key tile in both directions.

    Raises:
        UsageError: no block size serves forward and backward with this head size.
    """
    if 8 <= head_size <= 128 and head_size % 8 == 0:
        return 128
    if head_size == 256 and capability == 9:
        return 64
    valid = "multiples of 8 up to 128" + (", or 256" if capability == 9 else "")
    raise UsageError(
        f"attention backend flash4 has no kernel with block lists for head size {head_size} on compute capability "
        f"{capability}.x (valid: {valid}); choose the backend segment"
    )


@dataclass(frozen=True, kw_only=True)
class _Kernels:
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    block_tensors: Callable[..., Any]
    dq_write_order: Callable[..., Any]
    visible: Callable[..., Any]


# Every argument given by name below: a release that renames one must fail here, not inside a training step.
_BLOCK_FIELDS = ("mask_block_cnt", "mask_block_idx", "full_block_cnt", "full_block_idx")
_SHARED_ARGUMENTS = ("q", "k", "v", "softmax_scale", "mask_mod", "aux_tensors", "block_sparse_tensors")
_EXPECTED_ARGUMENTS = {
    "_flash_attn_fwd": (*_SHARED_ARGUMENTS, "return_lse"),
    "_flash_attn_bwd": (*_SHARED_ARGUMENTS, "out", "dout", "lse", "deterministic"),
    "BlockSparseTensorsTorch": (*_BLOCK_FIELDS, "block_size", "dq_write_order", "dq_write_order_full", "spt"),
    "compute_dq_write_order": ("fwd_mask_cnt", "fwd_full_idx", "bwd_mask_cnt", "bwd_full_idx", "spt"),
}


def _package_error(reason: str) -> UsageError:
    def installed(package: str) -> str:
        try:
            return f"{package} {metadata.version(package)}"
        except metadata.PackageNotFoundError:
            return f"{package} not installed"

    found = ", ".join(installed(name) for name in ("flash-attn-4", "quack-kernels", "nvidia-cutlass-dsl"))
    return UsageError(f"attention backend flash4 cannot use its package ({reason}; found: {found}); run {REMEDY}")


@lru_cache(maxsize=1)
def _load_kernels() -> _Kernels:
    """Import flash-attn-4 and check the calls used here: the only place that knows the package.

    The public `flash_attn_func` is an autograd function that keeps q and the whole of k and v until backward, which
    is what the caller must avoid; only the two functions that it wraps give forward and backward apart.

    Raises:
        UsageError: the package is missing, or its calls do not take the arguments that they took in `WRITTEN_FOR`.
    """
    try:
        import cutlass
        import cutlass.cute as cute
        from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch, compute_dq_write_order
        from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd
        from flash_attn.cute.utils import scalar_to_ssa
    except ImportError as error:
        raise _package_error(str(error)) from error

    for call in (_flash_attn_fwd, _flash_attn_bwd, BlockSparseTensorsTorch, compute_dq_write_order):
        absent = set(_EXPECTED_ARGUMENTS[call.__name__]) - set(inspect.signature(call).parameters)
        if absent:
            raise _package_error(f"{call.__name__} takes no {', '.join(sorted(absent))}, it did in {WRITTEN_FOR}")

    # The kernels call this for each element of a partial block, with q_index in unpacked query rows also when the
    # heads of one group are packed into a tile. Key indices past C come in modulo C (and are masked by the kernel),
    # so neither vector needs padding. That holds for the last block of a list only: the lists must ascend.
    @cute.jit
    def visible(batch, head, q_index, k_index, seqlen_info, aux_tensors):
        first = scalar_to_ssa(aux_tensors[0][k_index[0]], cutlass.Int32)
        stop = scalar_to_ssa(aux_tensors[1][k_index[0]], cutlass.Int32)
        return (q_index >= first) & (q_index < stop)

    return _Kernels(
        forward=_flash_attn_fwd,
        backward=_flash_attn_bwd,
        block_tensors=BlockSparseTensorsTorch,
        dq_write_order=compute_dq_write_order,
        visible=visible,
    )


class _Lists(NamedTuple):
    forward: Any
    backward: Any


class Flash4Backend:
    """Tree attention by FlashAttention-4, with an explicit forward and backward and no autograd graph of its own.

    Gradients come back in the dtype of q: the kernels sum in fp32 and round once per call, also dk and dv.

    Args:
        deterministic: sum gradients in a fixed order. On compute capability 9.x the package can do so only without
            block lists, so that backward visits all T x C tiles: same result, slower by the share that is invisible.

    Raises:
        UsageError: no CUDA device of compute capability 9.x or 10.x, or no usable flash-attn-4.
    """

    def __init__(self, *, deterministic: bool = False) -> None:
        if not torch.cuda.is_available():
            found = "no CUDA device"
            self._capability = 0
        else:
            found = f"{torch.cuda.get_device_name()}, {'.'.join(map(str, torch.cuda.get_device_capability()))}"
            self._capability = torch.cuda.get_device_capability()[0]
        if self._capability not in _QUERY_BLOCK:
            raise UsageError(
                f"attention backend flash4 needs a CUDA device of compute capability 9.x or 10.x and the package "
                f"flash-attn-4 ({REMEDY}); found {found}; choose the backend segment or reference here"
            )
        self._kernels = _load_kernels()
        self.deterministic = deterministic

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: TreeMask, scale: float) -> tuple[Tensor, Tensor]:
        """Return softmax(scale q k^T) v over visible keys, and each row's natural log-sum-exp.

        Shapes: q [T, N, H], k and v [C, K, H] contiguous, N % K == 0, fp16 or bf16 -> out [T, N, H] like q, lse
        float32 [N, T].

        Raises:
            UsageError: another dtype, or a head size without a kernel.
            ValueError: q or k does not have the mask's number of rows.
        """
        lists = self._lists(q, k, v, mask)
        out, lse, *_ = self._kernels.forward(
            q=q[None],
            k=k[None],
            v=v[None],
            softmax_scale=scale,
            mask_mod=self._kernels.visible,
            aux_tensors=[mask.visible_from, mask.visible_to],
            block_sparse_tensors=lists.forward,
            return_lse=True,
        )
        return out[0], lse[0]

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        mask: TreeMask,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq [T, N, H], dk and dv [C, K, H] in the dtype of q; out and lse are what `forward` returned.

        Shapes: dout and out [T, N, H], lse float32 [N, T], the rest as in `forward`, whose errors it shares.
        """
        lists = self._lists(q, k, v, mask)
        without_lists = self.deterministic and self._capability == 9
        dq, dk, dv = self._kernels.backward(
            q=q[None],
            k=k[None],
            v=v[None],
            out=out[None],
            dout=dout[None],
            lse=lse[None],
            softmax_scale=scale,
            mask_mod=self._kernels.visible,
            aux_tensors=[mask.visible_from, mask.visible_to],
            block_sparse_tensors=None if without_lists else lists.backward,
            deterministic=self.deterministic,
        )
        return dq[0], dk[0], dv[0]

    def _lists(self, q: Tensor, k: Tensor, v: Tensor, mask: TreeMask) -> _Lists:
        """Check the inputs and return the block lists of both directions, built once per mask."""
        if q.dtype not in (torch.float16, torch.bfloat16) or not q.dtype == k.dtype == v.dtype:
            raise UsageError(
                f"attention backend flash4 computes in one of torch.float16 and torch.bfloat16, not in q {q.dtype}, "
                f"k {k.dtype}, v {v.dtype}; choose the backend segment or reference for other dtypes"
            )
        # The kernels cannot see the length of the mask's vectors: a short one would be read past its end.
        if (q.shape[0], k.shape[0]) != (mask.num_queries, mask.num_keys):
            raise ValueError(
                f"{q.shape[0]} queries and {k.shape[0]} keys, but the mask has {mask.num_queries} and {mask.num_keys}"
            )
        size = (_QUERY_BLOCK[self._capability], _key_block(q.shape[-1], self._capability))
        blocks = mask.cached(("blocks", *size), lambda: block_lists(mask, *size))
        key = ("flash4", self.deterministic, *size)
        return mask.cached(key, lambda: self._block_tensors(blocks.forward, blocks.backward, size))

    def _block_tensors(self, forward: BlockIndex, backward: BlockIndex, size: tuple[int, int]) -> _Lists:
        def tensors(index: BlockIndex) -> dict[str, Tensor]:
            """One batch row, one list for all heads: counts [1, 1, rows], indices [1, 1, rows, columns]."""
            parts = (index.partial_count, index.partial_index, index.full_count, index.full_index)
            return dict(zip(_BLOCK_FIELDS, (part[None, None] for part in parts)))

        fwd, bwd = tensors(forward), tensors(backward)
        order: dict[str, Any] = {}
        if self.deterministic and self._capability != 9:
            # Each key block adds its share of dq when its rank among the query block's contributors comes up;
            # spt=False: in ascending order of key blocks, the order in which the scheduler starts them.
            partial, full = self._kernels.dq_write_order(*fwd.values(), *bwd.values(), spt=False)
            order = {"dq_write_order": partial, "dq_write_order_full": full, "spt": False}
        build = self._kernels.block_tensors
        return _Lists(build(**fwd, block_size=size), build(**bwd, block_size=size, **order))
