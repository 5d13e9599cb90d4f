"""What every rank runs to hold main gradients to sums by hand: `python ranks_gradients.py CASE...`.

Every gradient is a small whole number that a name, a rank and a backward decide, so sums are exact and the rank that
left out, doubled or mixed up one is found out. Prints "CASE ok" on rank 0 where all ranks passed.
"""

import contextlib
import functools
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_dta.axes import Axes
from megatron_dta.config import OptimizerSection
from megatron_dta.engine.optimizer import MasterAdamW, make_optimizer
from megatron_dta.mcore import gradients as gradients_module
from megatron_dta.mcore import parallel
from megatron_dta.mcore.gradients import Gradients, model_norm

SHAPES = {
    "linear.weight": (4, 3),
    "norm.weight": (5,),
    "q_layernorm.weight": (3,),
    "router.weight": (2, 3),
    "expert.weight": (3, 2),
    "expert_norm.weight": (2,),
}
"""Split over tensor ranks; replicated, a share on each under sequence parallelism; a share on each always; replicated;
split over expert-tensor ranks; replicated over them."""
SPLIT = {"linear.weight", "expert.weight"}
TIED = "embedding"


@dataclass(frozen=True, kw_only=True)
class Case:
    """How ranks are laid out, whether reductions overlap with backwards, and which dtypes are tried in turn."""

    axes: Axes
    overlap: bool = True
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)


CASES = {
    "data": Case(axes=Axes(), overlap=False),
    "data, overlapped": Case(axes=Axes(), dtypes=(torch.float32, torch.bfloat16, torch.float64)),
    "context": Case(axes=Axes(context=2)),
    "tensor": Case(axes=Axes(tensor=2)),
    "sequence": Case(axes=Axes(tensor=2, sequence=True)),
    "interleaved": Case(axes=Axes(pipeline=2, virtual=2)),
    "sequence and pipeline": Case(axes=Axes(tensor=2, sequence=True, pipeline=2), overlap=False),
    "experts": Case(axes=Axes(expert=2)),
    "sequence and experts": Case(axes=Axes(tensor=2, sequence=True, expert=2, expert_tensor=1)),
    "sequence and split experts": Case(
        axes=Axes(tensor=2, sequence=True, expert=2, expert_tensor=2), overlap=False, dtypes=(torch.bfloat16,)
    ),
}


class Part(MegatronModule):
    """Parameters of every kind with Megatron's marks on them, and no arithmetic."""

    def __init__(self, config: TransformerConfig, number: int, axes: Axes, dtype: torch.dtype):
        super().__init__(config)
        self.number = number
        self.pre_process, self.post_process = parallel.is_first_part(number), parallel.is_last_part(number)
        self.share_embeddings_and_output_weights = True
        for name, shape in SHAPES.items():
            weight = torch.nn.Parameter(torch.ones(shape, dtype=dtype))
            vars(weight)["tensor_model_parallel"] = name in SPLIT
            vars(weight)["sequence_parallel"] = axes.sequence and name in ("norm.weight", "router.weight")
            if name.startswith("expert"):
                vars(weight)["allreduce"] = False
            module = torch.nn.Module()
            module.weight = weight
            setattr(self, name.removesuffix(".weight"), module)
        if self.pre_process or self.post_process:
            self.embedding = torch.nn.Parameter(torch.ones(6, 2, dtype=dtype))
            vars(self.embedding)["tensor_model_parallel"] = True
            if axes.pipeline > 1:
                vars(self.embedding)["shared_embedding"] = True
                vars(self.embedding)["shared"] = not self.pre_process

    def shared_embedding_or_output_weight(self) -> torch.nn.Parameter:
        return self.embedding


def config_of(axes: Axes, dtype: torch.dtype) -> TransformerConfig:
    return TransformerConfig(
        num_layers=axes.pipeline * axes.virtual,
        hidden_size=2,
        num_attention_heads=2,
        qk_layernorm=True,
        tensor_model_parallel_size=axes.tensor,
        sequence_parallel=axes.sequence,
        pipeline_model_parallel_size=axes.pipeline,
        virtual_pipeline_model_parallel_size=axes.virtual if axes.virtual > 1 else None,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        calculate_per_token_loss=True,
        use_cpu_initialization=True,
    )


def share(name: str, shape: Sequence[int], part: int, rank: int, backward: int, axes: Axes) -> torch.Tensor:
    """Return what a rank's backward adds to a gradient: whole numbers up to 8, exact in bf16 and in any sum.

    A replicated parameter without shares has the same on all ranks that split the others.
    """
    if name not in {*SPLIT, TIED} and not has_shares(name, axes):
        rank = split_ranks(name, rank, axes)[0]
    generator = torch.Generator().manual_seed(hash((part, rank, backward, *name.encode())) % 2**31)
    return torch.randint(-8, 9, tuple(shape), generator=generator).float()


def has_shares(name: str, axes: Axes) -> bool:
    """Say whether each tensor rank has its share of a replicated parameter's gradient."""
    return name == "q_layernorm.weight" or (axes.sequence and name in ("norm.weight", "router.weight"))


def split_ranks(name: str, rank: int, axes: Axes) -> range:
    """Return the tensor ranks, for experts the expert-tensor ranks, that a rank is one of."""
    size = axes.expert_tensor_size if name.startswith("expert") else axes.tensor
    start = rank // size * size
    return range(start, start + size)


def run_backward(part: Part, backward: int, axes: Axes) -> None:
    """Leave this rank's shares in the gradients of a part; the order of the sum is the order of the hooks."""
    loss = sum(
        (p * share(name, p.shape, part.number, dist.get_rank(), backward, axes).to(p)).sum()
        for name, p in part.named_parameters()
    )
    loss.backward()
    assert all(p.grad is None for p in part.parameters())


def summed_ranks(name: str, groups: parallel.Groups, axes: Axes) -> set[int]:
    """Return the ranks whose shares add up to this rank's gradient of a parameter."""
    is_expert = name.startswith("expert")
    ranks = set(dist.get_process_group_ranks(groups.edp if is_expert else groups.dp_cp))
    if has_shares(name, axes):
        return {other for rank in ranks for other in split_ranks(name, rank, axes)}
    return ranks


def wanted(part: Part, name: str, shape: Sequence[int], groups: parallel.Groups, axes: Axes, backwards: range):
    """Return the sum by hand; a tied embedding has the shares of both of its copies."""
    sources = [(part.number, rank) for rank in summed_ranks(name, groups, axes)]
    if name == TIED and axes.pipeline > 1:
        per_stage = dist.get_world_size() // axes.pipeline
        last = (axes.virtual - 1, (axes.pipeline - 1) * per_stage)
        lanes = [rank % per_stage for _, rank in sources]
        sources = [(number, first + lane) for number, first in ((0, 0), last) for lane in lanes]
    zero = torch.zeros(tuple(shape))
    return sum((share(name, shape, number, rank, b, axes) for number, rank in sources for b in backwards), zero)


def run_step(gradients: Gradients, parts: Sequence[Part], backwards: range, axes: Axes) -> None:
    """Run chunks as a pipeline does: the parts take turns, the last part's last backward before the first's."""
    gradients.begin()
    for b in backwards:
        for part in reversed(parts):
            if b == backwards[-1]:
                gradients.last_backward(part.number)
            run_backward(part, b, axes)
    gradients.finish()


STEPS = {"full first": (3, 1, 0, 2, 1), "zero first": (0, 0, 2, 1)}
"""Backwards per part in every step."""


def make(case: Case, dtype: torch.dtype = torch.float32) -> tuple[list[Part], Gradients, parallel.Groups]:
    """Build parts and gradients; small buckets, so that several reductions of a part are under way at once."""
    parallel.initialize(world=world(), axes=case.axes)
    config = config_of(case.axes, dtype)
    parts = [Part(config, number, case.axes, dtype) for number in range(case.axes.virtual)]
    made = functools.partial(DistributedDataParallelConfig, bucket_size=12)
    with mock.patch.object(gradients_module, "DistributedDataParallelConfig", made):
        return parts, Gradients(parts, config, overlap=case.overlap), parallel.current_groups()


def world() -> parallel.World:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return parallel.World(rank=rank, size=size, local_rank=rank, init_method="env://")


def check_sums(case: Case, steps: Sequence[int], dtype: torch.dtype = torch.float32) -> None:
    parts, gradients, groups = make(case, dtype)
    wide = torch.promote_types(dtype, torch.float32)
    for count in steps:
        run_step(gradients, parts, range(count), case.axes)
        for part in parts:
            for name, param in part.named_parameters():
                expected = wanted(part, name, param.shape, groups, case.axes, range(count)).to(wide)
                assert param.main_grad.dtype == wide
                assert torch.equal(param.main_grad, expected), (name, part.number, count, param.main_grad, expected)
        if count:
            check_norm(gradients, parts, groups, case.axes)


def check_norm(gradients: Gradients, parts: Sequence[Part], groups: parallel.Groups, axes: Axes) -> None:
    """Compare with the norm of every parameter's whole gradient, put together from all ranks."""
    norm = model_norm(gradients.params, gradients.main_grads, groups)
    own = {}
    for part in parts:
        for name, param in part.named_parameters():
            tensor, stage = (groups.etp if name.startswith("expert") else groups.tp), groups.stage
            expert = groups.ep.rank() if name.startswith("expert") else 0
            place = (0, 0) if name == TIED else (stage, part.number)
            shard = tensor.rank() if name in SPLIT or name == TIED else 0
            own[name, *place, expert, shard] = param.main_grad.double()
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (norm, own))
    whole = {key: grad for _, grads in everyone for key, grad in grads.items()}
    expected = math.sqrt(sum(float(grad.square().sum()) for grad in whole.values()))
    assert {other for other, _ in everyone} == {norm}, "ranks differ"
    assert abs(norm - expected) <= 8 * torch.finfo(torch.float64).eps * expected, (norm, expected)


def check_updates(case: Case, dtype: torch.dtype) -> None:
    """A step of the optimizer is AdamW's in fp32 on the sums, clipped by the whole model's norm, then rounded."""
    parts, gradients, groups = make(case, dtype)
    config = OptimizerSection(lr=0.1, weight_decay=0.1, clip_norm=2.0)
    optimizer = make_optimizer(gradients, config, total_updates=3, groups=groups)
    assert isinstance(optimizer, MasterAdamW)
    plain = [torch.nn.Parameter(p.detach().to(p.main_grad.dtype, copy=True)) for p in gradients.params]
    reference = torch.optim.AdamW(
        [{"params": [p], "weight_decay": 0.1 if p.dim() > 1 else 0.0} for p in plain],
        lr=0.1,
        betas=config.betas,
        eps=config.eps,
    )
    for count in (2, 1, 3):
        run_step(gradients, parts, range(count), case.axes)
        norm = model_norm(gradients.params, gradients.main_grads, groups)
        for p, grad in zip(plain, gradients.main_grads):
            p.grad = grad * (2.0 / norm)
        reference.step()
        assert optimizer.step()["grad_norm"] == norm > 2
        assert not any(grad.any() for grad in gradients.main_grads)
        for p, expected in zip(gradients.params, plain):
            assert torch.equal(p, expected.to(dtype))


def check_not_finite(case: Case) -> None:
    """One rank's infinity stops all ranks, and the next step is as if nothing had been."""
    parts, gradients, groups = make(case)
    optimizer = make_optimizer(gradients, OptimizerSection(lr=0.1), total_updates=2, groups=groups)
    gradients.begin()
    run_backward(parts[0], 0, case.axes)
    if dist.get_rank() == dist.get_world_size() - 1:
        gradients.params[0].main_grad[0] = torch.inf
    gradients.finish()
    try:
        optimizer.step()
    except FloatingPointError:
        assert optimizer.num_updates == 0
        assert all((p == 1).all() for p in gradients.params)
    else:
        raise AssertionError("updated with an infinite gradient")
    run_step(gradients, parts, range(1), case.axes)
    optimizer.step()
    assert all(p.isfinite().all() for p in gradients.params)


def check_controls() -> None:
    """Show that the sums and norms above notice what they are for."""
    sequence = Case(axes=Axes(tensor=2, sequence=True, expert=2, expert_tensor=1))
    tied = Case(axes=Axes(pipeline=2))
    overlapped = Case(axes=Axes())
    part = gradients_module.DistributedDataParallel
    mistakes = {
        "tensor ranks are not summed": (sequence, {"finalize_model_grads": only_data_parallel}),
        "copies of an embedding are not summed": (tied, {"finalize_model_grads": only_data_parallel}),
        "copies of an embedding count twice": (tied, {"param_is_not_shared": lambda param: True}),
        "replicated parameters count on every rank": (
            sequence,
            {"param_is_not_tensor_parallel_duplicate": lambda param, group: True},
        ),
    }
    for name, (case, patches) in mistakes.items():
        with mock.patch.multiple(gradients_module, **patches):
            expect_failure(name, case)
    with mock.patch.object(part, "no_sync", return_value=contextlib.nullcontext()):
        expect_failure("reductions are not held back until the last backward", overlapped)
    with mock.patch.object(part, "start_grad_sync", return_value=None):
        expect_failure("a step without a backward is not reduced", overlapped)


def only_data_parallel(parts, num_tokens):
    for part in parts:
        part.finish_grad_sync()


def expect_failure(name: str, case: Case) -> None:
    try:
        check_sums(case, STEPS["full first"])
    except AssertionError:
        return
    raise AssertionError(f"{name}: not found")


def run_case(case: Case) -> None:
    for dtype in case.dtypes:
        for steps in STEPS.values():
            check_sums(case, steps, dtype)
        check_updates(case, dtype)
    check_not_finite(case)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        if name == "controls":
            check_controls()
        else:
            run_case(CASES[name])
        dist.barrier()
        if dist.get_rank() == 0:
            print(name, "ok", flush=True)
    parallel.leave()
