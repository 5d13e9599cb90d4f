"""AdamW on master weights."""

import math

import pytest
import torch

from megatron_dta.config import OptimizerSection
from megatron_dta.engine.optimizer import LocalGradients, MasterAdamW, make_optimizer


def linear(dtype, seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 3, dtype=dtype), torch.nn.LayerNorm(3, dtype=dtype))


def backward(model, x, scale=1.0):
    (model(x.to(model[0].weight.dtype)).float() ** 2).sum().mul(scale).backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_torch_adamw(dtype):
    config = OptimizerSection(lr=1e-2, weight_decay=0.1, clip_norm=None)
    model, plain = linear(dtype), linear(dtype)
    ours = MasterAdamW(model, config, total_updates=3)
    decay = [p for p in plain.parameters() if p.dim() > 1]
    rest = [p for p in plain.parameters() if p.dim() <= 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    theirs = torch.optim.AdamW(groups, lr=1e-2, betas=config.betas, eps=config.eps)
    for k in range(3):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(k))
        for part in x.split(2):  # several backwards per update
            backward(model, part)
            backward(plain, part)
        norm = math.sqrt(sum(float(p.grad.double().norm()) ** 2 for p in plain.parameters()))
        assert ours.step()["grad_norm"] == pytest.approx(norm, rel=1e-5)
        theirs.step()
        theirs.zero_grad()
    for a, b in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


def test_small_steps_add_up_under_bf16():
    """A rate of 1e-6 is below half a unit of bf16 weights near 1; a master weight must gather it."""
    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = MasterAdamW(model, OptimizerSection(lr=1e-6, weight_decay=0.0, clip_norm=None), total_updates=5000)
    moved = []
    for _ in range(5000):
        model.weight.grad = None
        (model.weight.sum()).backward()
        optimizer.step()
        moved.append(float(model.weight))
    assert moved[100] == 1.0
    assert float(optimizer.masters[0]) == pytest.approx(1 - 5e-3, rel=1e-3)
    assert moved[-1] < 1.0


def test_norms_and_biases_do_not_decay():
    model = linear(torch.float32)
    optimizer = MasterAdamW(model, OptimizerSection(lr=0.1, weight_decay=0.5), total_updates=1)
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.sum().mul(0).backward()
    optimizer.step()
    for old, new in zip(before, model.parameters()):
        torch.testing.assert_close(new, old * 0.95 if old.dim() > 1 else old)


def test_clipping_scales_to_the_norm():
    model = torch.nn.Linear(4, 4, bias=False)
    optimizer = MasterAdamW(model, OptimizerSection(lr=1.0, clip_norm=0.5), total_updates=1)
    backward(torch.nn.Sequential(model), torch.ones(2, 4), scale=100.0)
    seen = []
    optimizer.adamw.register_step_pre_hook(lambda *_: seen.append([g.clone() for g in optimizer.main_grads]))
    assert optimizer.step()["grad_norm"] > 0.5
    assert float(torch.stack([g.norm() for g in seen[0]]).norm()) == pytest.approx(0.5, rel=1e-5)


def test_warm_up_and_cosine():
    config = OptimizerSection(lr=1.0, min_lr=0.1, schedule="cosine", warmup_updates=4)
    optimizer = MasterAdamW(torch.nn.Linear(1, 1), config, total_updates=14)
    rates = [optimizer.learning_rate(k) for k in range(15)]
    assert rates[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert rates[9] == pytest.approx(0.55)
    assert rates[14] == pytest.approx(0.1)
    assert rates[4:] == sorted(rates[4:], reverse=True)


def test_gradient_that_is_not_finite_updates_nothing():
    model = torch.nn.Linear(2, 2)
    optimizer = MasterAdamW(model, OptimizerSection(), total_updates=1)
    before = model.weight.detach().clone()
    (model.weight.sum() * float("nan")).backward()
    with pytest.raises(FloatingPointError, match="update 0"):
        optimizer.step()
    assert torch.equal(model.weight, before)


def test_a_bad_batch_does_not_reach_the_next_one():
    model = torch.nn.Linear(2, 2)
    optimizer = MasterAdamW(model, OptimizerSection(), total_updates=1)
    (model.weight.sum() * float("nan")).backward()
    with pytest.raises(FloatingPointError):
        optimizer.step()
    model.weight.sum().backward()
    assert optimizer.step()["grad_norm"] == pytest.approx(2.0)


def test_every_process_of_a_whole_model_gets_the_simple_one():
    optimizer = make_optimizer(linear(torch.float32), OptimizerSection(), total_updates=1)
    assert type(optimizer) is MasterAdamW
    assert optimizer.name.startswith("MasterAdamW")


def test_norm_is_the_callers():
    """On several ranks the norm that clips is of more than this process holds."""
    seen = []
    model = torch.nn.Linear(2, 2, bias=False)
    config = OptimizerSection(lr=0.1, weight_decay=0.0, clip_norm=1.0)
    optimizer = MasterAdamW(model, config, total_updates=1, norm=lambda grads: seen.extend(grads) or 8.0)
    clipped = []
    optimizer.adamw.register_step_pre_hook(lambda *_: clipped.append(optimizer.main_grads[0].clone()))
    model.weight.sum().backward()
    assert optimizer.step()["grad_norm"] == 8.0
    assert [id(grad) for grad in seen] == [id(grad) for grad in optimizer.main_grads]
    assert torch.equal(clipped[0], torch.full((2, 2), 1 / 8))


def test_release_lets_another_take_over():
    model = torch.nn.Linear(2, 2)
    first = MasterAdamW(model, OptimizerSection(), total_updates=1)
    first.release()
    second = MasterAdamW(model, OptimizerSection(), total_updates=1)
    model.weight.sum().backward()
    assert not any(grad.any() for grad in first.main_grads)
    assert (second.main_grads[0] == 1).all()
    assert model.weight.grad is None


def test_frozen_parameters_have_no_master():
    model = torch.nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    gradients = LocalGradients(model)
    assert [p.shape for p in gradients.params] == [(2, 2)]
    assert len(MasterAdamW(model, OptimizerSection(), total_updates=1).masters) == 1


def test_main_gradients_are_wide():
    """Of 300 equal gradients a bf16 sum would lose the last ones: it stops at 256."""
    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    gradients = LocalGradients(model)
    for _ in range(300):
        model.weight.sum().backward()
    assert float(gradients.main_grads[0]) == 300
    assert torch.tensor(256.0).bfloat16() + 1 == 256
    gradients.zero()
    assert not gradients.main_grads[0].any()
