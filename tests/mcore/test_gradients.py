"""Main gradients: sums over backwards and ranks, steps in any order, taking over and letting go of a model."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_dta.config import OptimizerSection
from megatron_dta.engine.optimizer import MasterAdamW, MegatronAdamW, make_optimizer
from megatron_dta.errors import UsageError
from megatron_dta.mcore import parallel
from megatron_dta.mcore.gradients import Gradients, model_norm, square_sum
from megatron_dta.mcore.optimizer import ShardedAdamW
from tests.control.spawn import ROOT, run_torch
from tests.parallel.ranks_gradients import CASES

SCRIPT = str(ROOT / "tests/parallel/ranks_gradients.py")
NAMES = [*CASES, "controls"]


@pytest.mark.parametrize("names", [NAMES[:4], NAMES[4:8], NAMES[8:]], ids=", ".join)
def test_sums_and_norms_on_four_ranks(names):
    """To the bit, for every kind of parameter on every axis, in steps with many, one and no backward."""
    lines = run_torch(4, SCRIPT, *names).splitlines()
    assert [line for line in lines if line.endswith(" ok")] == [f"{name} ok" for name in names]


class Part(MegatronModule):
    """Two layers, the first one used twice."""

    def __init__(self, config: TransformerConfig, dtype: torch.dtype, device: torch.device):
        super().__init__(config)
        options = {"dtype": dtype, "device": device}
        self.first, self.second = torch.nn.Linear(4, 4, **options), torch.nn.Linear(4, 3, **options)
        self.norm = torch.nn.LayerNorm(4, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(self.first(x))))


def config_of(dtype: torch.dtype = torch.float32, **given) -> TransformerConfig:
    given = {"calculate_per_token_loss": True, "params_dtype": dtype, "bf16": dtype == torch.bfloat16} | given
    return TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1, **given)


def part_of(dtype: torch.dtype = torch.float32) -> Part:
    device = parallel.initialize(seed=0)
    return Part(config_of(dtype), dtype, device)


def loss(part: Part, seed: int) -> torch.Tensor:
    weight = part.first.weight
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed)).to(weight)
    return part(x).float().square().sum()


def one_rank():
    return parallel.current_groups()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_rank_gathers_what_autograd_gives(dtype, overlap):
    part, plain = part_of(dtype), part_of(dtype)
    gradients = Gradients([part], part.config, overlap=overlap, distributed_optimizer=False)
    for count in (3, 1, 2):
        gradients.begin()
        for seed in range(count):
            if seed == count - 1:
                gradients.last_backward(0)
            loss(part, seed).backward()
            loss(plain, seed).backward()
        gradients.finish()
        for p, q in zip(part.parameters(), plain.parameters()):
            assert p.grad is None
            assert p.main_grad.abs().max() > 0
            torch.testing.assert_close(p.main_grad, q.grad, rtol=1e-6, atol=1e-6)
        gradients.zero()
        plain.zero_grad()


def test_bf16_sums_in_fp32():
    """Of 300 equal gradients a bf16 sum loses the last ones: it stops at 256."""
    part = part_of(torch.bfloat16)
    gradients = Gradients([part], part.config, distributed_optimizer=False)
    gradients.begin()
    for _ in range(300):
        part.norm.bias.sum().backward()
    gradients.finish()
    assert part.norm.bias.main_grad.dtype == torch.float32
    assert (part.norm.bias.main_grad == 300).all()
    assert torch.tensor(256.0).bfloat16() + 1 == 256


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_that_was_not_used_leaves_nothing(overlap):
    """A skipped update, and a step that an error ended before its reduction."""
    part = part_of()
    gradients = Gradients([part], part.config, overlap=overlap)
    seen = []
    for ends in (True, True, False, True):
        gradients.begin()
        loss(part, 0).backward()
        gradients.last_backward(0)
        if ends:
            loss(part, 1).backward()
            gradients.finish()
            seen.append([g.clone() for g in gradients.main_grads])
    for grads in seen[1:]:
        for a, b in zip(grads, seen[0]):
            assert torch.equal(a, b)


def test_steps_begin_and_end():
    part = part_of()
    gradients = Gradients([part], part.config)
    with pytest.raises(RuntimeError, match=r"begin\(\)"):
        gradients.finish()
    with pytest.raises(RuntimeError, match=r"begin\(\)"):
        gradients.last_backward(0)
    gradients.begin()
    gradients.finish()
    with pytest.raises(RuntimeError, match=r"begin\(\)"):
        gradients.finish()  # would sum over ranks twice


def test_release_lets_another_take_over():
    part = part_of()
    first = Gradients([part], part.config)
    with pytest.raises(UsageError, match="taken over already"):
        Gradients([part], part.config)
    old = first.main_grads
    first.release()
    loss(part, 0).backward()
    assert all(not grad.any() for grad in old)
    assert all(p.grad is not None and p.grad.any() for p in part.parameters())
    part.zero_grad()
    second = Gradients([part], part.config)
    second.begin()
    loss(part, 0).backward()
    second.finish()
    assert all(p.grad is None for p in part.parameters())
    assert all(grad.any() for grad in second.main_grads)
    assert all(not grad.any() for grad in old)


def test_without_release_the_old_hooks_live():
    """What `release` is for: the wrapper going out of scope is not enough."""
    part = part_of()
    first = Gradients([part], part.config)
    old = first.main_grads
    del first
    loss(part, 0).backward()
    assert all(grad.any() for grad in old)


def test_frozen_parameters_are_left_out():
    part = part_of()
    part.second.weight.requires_grad_(False)
    gradients = Gradients([part], part.config)
    assert len(gradients.params) == len(list(part.parameters())) - 1
    assert not hasattr(part.second.weight, "main_grad")


def test_refusals():
    part = part_of()
    with pytest.raises(UsageError, match="calculate_per_token_loss is False"):
        Gradients([part], config_of(calculate_per_token_loss=False))
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match=r"torch.float32 on cpu"):
            Gradients([part], part.config, distributed_optimizer=True)
    gradients = Gradients([part], part.config, distributed_optimizer=False)
    with pytest.raises(UsageError, match="groups is None"):
        make_optimizer(gradients, OptimizerSection(), total_updates=1)
    with pytest.raises(UsageError, match="not sharded"):
        ShardedAdamW(gradients, lr=1.0, weight_decay=0.0, betas=(0.9, 0.9), eps=1e-8)
    gradients.sharded = True
    with pytest.raises(UsageError, match="are sharded"):
        MasterAdamW(gradients, OptimizerSection(), total_updates=1)


def test_norm_of_one_rank_is_of_all_its_parameters():
    part = part_of()
    loss(part, 0).backward()
    params = list(part.parameters())
    grads = [p.grad for p in params]
    wanted = math.sqrt(sum(float(g.double().square().sum()) for g in grads))
    assert model_norm(params, grads, one_rank()) == pytest.approx(wanted, rel=1e-15)


def test_norm_of_a_large_matrix_keeps_its_digits():
    """A sum in fp64 is off by a rounding per number at most; one in fp32 loses the fifth digit."""
    grad = torch.full((2000, 2000), 0.1)
    wanted = 4e6 * float(grad[0, 0].double()) ** 2
    assert square_sum([grad]) == pytest.approx(wanted, rel=4e6 * torch.finfo(torch.float64).eps)
    in_fp32 = float(np.cumsum(grad.square().numpy(), dtype=np.float32)[-1])
    assert abs(in_fp32 / wanted - 1) > 1e-5
    assert square_sum([]) == 0.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_norm_of_what_is_not_finite_is_not(bad):
    params = [torch.nn.Parameter(torch.ones(2))]
    assert not math.isfinite(model_norm(params, [torch.tensor([1.0, bad])], one_rank()))


def test_norm_without_a_parameter_of_a_kind():
    """A rank whose parameters all count elsewhere still has its norm: of nothing."""
    shared = torch.nn.Parameter(torch.ones(2))
    vars(shared)["shared"] = True
    group = dist.group.WORLD
    groups = SimpleNamespace(tp=group, etp=group, model=group, expert_model=group)
    assert model_norm([shared], [torch.ones(2)], groups) == 0.0


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def run_updates(dtype: torch.dtype, sharded: bool, clip_norm: float | None) -> tuple[list, list[dict[str, float]]]:
    """Run three steps with gradients that do not depend on the weights; return them and what the steps report."""
    part = part_of(dtype)
    gradients = Gradients([part], part.config, overlap=True, distributed_optimizer=sharded)
    config = OptimizerSection(lr=0.01, warmup_updates=2, weight_decay=0.1, clip_norm=clip_norm)
    optimizer = make_optimizer(gradients, config, total_updates=3, groups=parallel.current_groups())
    assert type(optimizer) is (MegatronAdamW if sharded else MasterAdamW)
    reports = []
    for step in range(3):
        gradients.begin()
        gradients.last_backward(0)
        torch.manual_seed(step)
        sum((p * torch.randn(p.shape, device=p.device).to(p)).sum() for p in part.parameters()).backward()
        gradients.finish()
        reports.append(optimizer.step())
        assert not any(grad.any() for grad in gradients.main_grads)
    optimizer.release()
    return [p.detach().float() for p in part.parameters()], reports


@needs_gpu
@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_megatron_optimizer_updates_alike(dtype, clip_norm):
    """Masters differ by what the norms do (fp32 and fp64 sums of 55 squares) and a few roundings of an update.

    An update is at most the rate times some 2, whatever the gradient's scale; weights are at most 1. In bf16 such a
    difference moves a weight to the next number at most.
    """
    ours, reports = run_updates(dtype, False, clip_norm)
    theirs, others = run_updates(dtype, True, clip_norm)
    eps = torch.finfo(torch.float32).eps
    bound = 3 * (0.01 * 2 * (2 * 55 + 16) * eps + 4 * eps)
    for a, b in zip(ours, theirs):
        room = bound if dtype == torch.float32 else bound + torch.finfo(dtype).eps * a.abs()
        assert ((a - b).abs() <= room).all()
    for report, other in zip(reports, others):
        assert other["lr"] == report["lr"]
        assert other["grad_norm"] == pytest.approx(report["grad_norm"], rel=55 * eps)
    start = [p.detach().float() for p in part_of(dtype).parameters()]
    assert all((a - b).abs().max() > 1e-3 for a, b in zip(start, ours)), "the steps move nothing"


@needs_gpu
def test_megatron_optimizer_refuses_what_is_not_finite():
    part = part_of(torch.bfloat16)
    gradients = Gradients([part], part.config)
    assert gradients.sharded
    optimizer = make_optimizer(gradients, OptimizerSection(lr=0.1), total_updates=2)
    before = [p.detach().clone() for p in part.parameters()]
    for bad in (float("nan"), 1.0):
        gradients.begin()
        gradients.last_backward(0)
        sum(p.sum() * bad for p in part.parameters()).backward()
        gradients.finish()
        if bad == 1.0:
            assert optimizer.step()["grad_norm"] == pytest.approx(math.sqrt(sum(p.numel() for p in before)))
            continue
        with pytest.raises(FloatingPointError, match="update 0"):
            optimizer.step()
        assert all(torch.equal(p, q) for p, q in zip(part.parameters(), before))
    assert optimizer.num_updates == 1
    assert all(p.isfinite().all() for p in part.parameters())


@needs_gpu
def test_fp64_on_a_gpu_is_not_sharded():
    part = part_of(torch.float64)
    gradients = Gradients([part], part.config)
    optimizer = make_optimizer(gradients, OptimizerSection(), total_updates=1, groups=parallel.current_groups())
    assert isinstance(optimizer, MasterAdamW)
