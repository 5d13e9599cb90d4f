"""AdamW on master weights: low-precision parameters are rounded copies, so that small updates are not lost."""

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from megatron_dta.config import OptimizerSection
from megatron_dta.errors import UsageError
from megatron_dta.mcore.gradients import Gradients, model_norm, square_sum
from megatron_dta.mcore.optimizer import ShardedAdamW
from megatron_dta.mcore.parallel import Groups

Norm = Callable[[Sequence[torch.Tensor]], float]


class Model(Protocol):
    """A torch module, or anything with parameters."""

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Yield every parameter once."""


def make_optimizer(
    model: Model | Gradients, config: OptimizerSection, *, total_updates: int, groups: Groups | None = None
) -> "Optimizer":
    """Return AdamW for a whole model in this process, or for this process's `Gradients` and its groups.

    On a GPU, where gradients are sharded, it is Megatron's distributed optimizer; on a CPU, and in fp64, MasterAdamW.
    `name` says which. Raises UsageError for `Gradients` without groups: the norm is over all processes.
    """
    if not isinstance(model, Gradients):
        return MasterAdamW(model, config, total_updates=total_updates)
    if model.sharded:
        return MegatronAdamW(model, config, total_updates=total_updates)
    if groups is None:
        raise UsageError("groups is None; Gradients need this process's groups (mcore.parallel.current_groups())")
    norm = functools.partial(model_norm, model.params, groups=groups)
    return MasterAdamW(model, config, total_updates=total_updates, norm=norm)


class Optimizer(ABC):
    """What both have: the schedule, clipping, and the refusal of a gradient that is not finite."""

    name: str

    def __init__(self, config: OptimizerSection, total_updates: int):
        self.config, self.total_updates = config, total_updates
        self.num_updates = 0

    def learning_rate(self, update: int) -> float:
        """Return the rate of update 0, 1, ...: linear warm-up, then constant or a cosine down to `min_lr`."""
        c = self.config
        if update < c.warmup_updates:
            return c.lr * (update + 1) / c.warmup_updates
        if c.schedule == "constant":
            return c.lr
        done = (update - c.warmup_updates) / max(self.total_updates - c.warmup_updates, 1)
        return c.min_lr + (c.lr - c.min_lr) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))

    def step(self) -> dict[str, float]:
        """Clip, update, round into the model, clear the main gradients; return `grad_norm` (before clipping) and `lr`.

        The norm is the whole model's, the same on all ranks. Raises FloatingPointError on all of them, with nothing
        updated and the gradients cleared, if a gradient is not finite.
        """
        grad_norm, lr = self._norm(), self.learning_rate(self.num_updates)
        if not math.isfinite(grad_norm):
            self.zero_grad()
            raise FloatingPointError(f"gradient norm is {grad_norm} at update {self.num_updates}; nothing was updated")
        if self.config.clip_norm is not None and grad_norm > self.config.clip_norm:
            self._scale(self.config.clip_norm / grad_norm)
        self._update(lr)
        self.zero_grad()
        self.num_updates += 1
        return {"grad_norm": grad_norm, "lr": lr}

    @abstractmethod
    def zero_grad(self) -> None:
        """Forget the gradients gathered so far."""

    @abstractmethod
    def release(self) -> None:
        """Leave the model's gradients alone again, so that another optimizer can take over."""

    @abstractmethod
    def _norm(self) -> float: ...

    @abstractmethod
    def _scale(self, factor: float) -> None: ...

    @abstractmethod
    def _update(self, lr: float) -> None: ...


class MasterAdamW(Optimizer):
    """Main gradients and master weights in at least fp32, whole on every rank; the model keeps its own dtype."""

    name = "MasterAdamW: every rank updates all that it holds"

    def __init__(
        self, model: Model | Gradients, config: OptimizerSection, *, total_updates: int, norm: Norm | None = None
    ):  # fmt: skip
        """Take over a model's gradients, or those that `Gradients` gathers; `norm` of all main gradients, if not local.

        Raises UsageError for sharded gradients: only a part of them is summed here.
        """
        super().__init__(config, total_updates)
        if isinstance(model, Gradients) and model.sharded:
            raise UsageError("gradients are sharded; construct them with distributed_optimizer=False")
        self.gradients = model if isinstance(model, Gradients) else LocalGradients(model)
        self.params, self.main_grads = self.gradients.params, self.gradients.main_grads
        self.norm = norm or local_norm
        self.masters = [_master(p) for p in self.params]
        for master, main_grad in zip(self.masters, self.main_grads):
            master.grad = main_grad
        decay = [m for m in self.masters if m.dim() > 1]
        plain = [m for m in self.masters if m.dim() <= 1]
        groups = [
            {"params": decay, "weight_decay": config.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(
            [g for g in groups if g["params"]], lr=config.lr, betas=config.betas, eps=config.eps
        )

    def zero_grad(self) -> None:
        """Forget the gradients gathered so far."""
        self.gradients.zero()

    def release(self) -> None:
        """Leave the model's gradients alone again, so that another optimizer can take over."""
        self.gradients.release()

    def _norm(self) -> float:
        return self.norm(self.main_grads)

    @torch.no_grad()
    def _scale(self, factor: float) -> None:
        torch._foreach_mul_(self.main_grads, factor)

    @torch.no_grad()
    def _update(self, lr: float) -> None:
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()
        for param, master in zip(self.params, self.masters):
            if param.data_ptr() != master.data_ptr():
                param.copy_(master)


class MegatronAdamW(Optimizer):
    """The same update by Megatron's distributed optimizer: masters and moments dealt over data-parallel ranks."""

    name = "MegatronAdamW: every rank updates its shard"

    def __init__(self, gradients: Gradients, config: OptimizerSection, *, total_updates: int):
        """Take the gradients that sharded `Gradients` gathers; weights must be loaded already."""
        super().__init__(config, total_updates)
        self.gradients = gradients
        self.sharded = ShardedAdamW(
            gradients, lr=config.lr, weight_decay=config.weight_decay, betas=config.betas, eps=config.eps
        )

    def zero_grad(self) -> None:
        """Forget the gradients gathered so far."""
        self.sharded.zero_grad()

    def release(self) -> None:
        """Leave the model's gradients alone again, so that another optimizer can take over."""
        self.gradients.release()

    def _norm(self) -> float:
        return self.sharded.norm()

    def _scale(self, factor: float) -> None:
        self.sharded.scale(factor)

    def _update(self, lr: float) -> None:
        self.sharded.update(lr)


class LocalGradients:
    """The main gradients of a model that one process holds alone: at least fp32, added to by every backward."""

    def __init__(self, model: Model):
        """Take over the model's gradients: `.grad` stays empty."""
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.main_grads = [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in self.params]
        self._hooks = [
            p.register_post_accumulate_grad_hook(gather_into(main_grad))
            for p, main_grad in zip(self.params, self.main_grads)
        ]

    def zero(self) -> None:
        """Forget all gradients."""
        torch._foreach_zero_(self.main_grads)

    def release(self) -> None:
        """Leave the model's gradients alone again."""
        for hook in self._hooks:
            hook.remove()


def local_norm(grads: Sequence[torch.Tensor]) -> float:
    """Return the norm of gradients that this process has all of."""
    return math.sqrt(square_sum(grads))


def _master(param: torch.nn.Parameter) -> torch.Tensor:
    """Return a leaf of at least fp32: the parameter's own memory where that is wide enough, else a copy."""
    wide = torch.promote_types(param.dtype, torch.float32)
    return param.detach().to(wide).requires_grad_()


def gather_into(main_grad: torch.Tensor) -> Callable[[torch.Tensor], None]:
    """Return a hook that moves a parameter's gradient into `main_grad` after each backward."""

    def add(param: torch.Tensor) -> None:
        main_grad.add_(param.grad)  # type: ignore[arg-type]  # the hook runs when it is there
        param.grad = None

    return add
