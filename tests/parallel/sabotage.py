"""Ways to break one axis each: what the comparison with each sequence alone must find."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import numpy as np
import torch

from megatron_dta.attention.mask import tree_mask
from megatron_dta.engine.calls import Calls
from megatron_dta.mcore import core_attention
from megatron_dta.mcore.model import TreeModel

_FINALIZE = "megatron.core.distributed.finalize_model_grads."


def _nothing(*args, **kwargs) -> None:
    pass


def _plain_causal_on_second_stage():
    """Give the second stage a causal mask over its keys, as a stage that never got the plan would have."""
    make = Calls.make

    def broken(self, call, mode, cache):
        made = make(self, call, mode, cache)
        if self.groups.stage == 1:
            keys = np.arange(len(call.visible_from), dtype=np.int32) - len(call.context)
            every = np.full(len(keys), call.size, np.int32)
            made.params.mask = tree_mask(np.maximum(keys, 0), every, call.size, self.device)
        return made

    return mock.patch.object(Calls, "make", broken)


def _depth_by_place():
    """Number this process's rows from 0, as a slice of the chunk would be."""
    make = Calls.make

    def broken(self, call, mode, cache):
        made = make(self, call, mode, cache)
        made.params.depth = torch.arange(len(made.params.depth))
        return made

    return mock.patch.object(Calls, "make", broken)


def _rows_of_another_rank():
    """Take the loss of the rows that the next context rank computes."""
    make = Calls.make

    def broken(self, call, mode, cache):
        return replace(make(self, call, mode, cache), rows=np.roll(self.rows(call), 1, axis=0)[self.groups.cp.rank()])

    return mock.patch.object(Calls, "make", broken)


def _own_key_gradients_only():
    """Keep what this rank's queries add to its own keys, drop what the other ranks' add."""

    def broken(dk, dv, params, group):
        if group is None:
            return dk, dv
        rows = params.dealt.by_rank.view(group.size(), -1)[group.rank()]
        return dk[rows], dv[rows]

    return mock.patch.object(core_attention, "_scattered", broken)


def _hidden_gradients_not_summed():
    """Hand the head's rows on without the sum over tensor ranks in backward."""
    return mock.patch.object(TreeModel, "head_rows", lambda self, hidden: hidden[:, 0])


BY_NAME: dict[str, Callable] = {
    "tensor: norms of queries and keys not summed": lambda: mock.patch(
        _FINALIZE + "_allreduce_non_tensor_model_parallel_grads", _nothing
    ),
    "tensor: gradients of hidden states not summed": _hidden_gradients_not_summed,
    "pipeline: a stage without the mask": _plain_causal_on_second_stage,
    "pipeline: tied embeddings not summed": lambda: mock.patch(_FINALIZE + "_allreduce_word_embedding_grads", _nothing),
    "context: depth by place": _depth_by_place,
    "context: rows of another rank": _rows_of_another_rank,
    "context: gradients of own keys only": _own_key_gradients_only,
    "data: not summed": lambda: mock.patch(
        "megatron.core.distributed.DistributedDataParallel.finish_grad_sync", _nothing
    ),
}


@contextmanager
def applied(name: str | None) -> Iterator[None]:
    """Break what `name` says, or nothing."""
    if name is None:
        yield
        return
    with BY_NAME[name]():
        yield
