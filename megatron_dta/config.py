"""The training configuration: frozen dataclasses, read from TOML, with overrides from the command line."""

import dataclasses
import difflib
import math
import tomllib
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_dta.axes import Axes
from megatron_dta.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which rollouts, in which form, and how many per step."""

    rollouts: str
    """A .jsonl or .npz rollout file."""
    form: str = "whole"
    """whole: trajectories; turn: one sample per assistant turn; comb: as turn, with the history re-rendered."""
    limit: int | None = None
    """Only the first groups of the file."""
    truncate: int | None = None
    """Only the first tokens of each sample."""
    mask: str = "full"
    """full: per-token arrays cover all tokens; response: only the response (JSONL)."""
    groups_per_step: int = 1
    shuffle_seed: int = 0
    """Order of the groups in every epoch."""


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """Which model: a Hugging Face folder with weights, or a config.json with random ones."""

    hf_folder: str | None = None
    hf_config: str | None = None
    dtype: str = "bf16"
    """bf16, fp32 or fp64 (weights and activations; gradients and optimizer are at least fp32)."""
    seed: int = 0
    """Random weights of `hf_config`."""


@dataclass(frozen=True, kw_only=True)
class EngineSection:
    """How a batch is executed."""

    mode: str = "tree"
    """tree: every distinct token once; flat: every sequence alone, the oracle."""
    budget: int | str = 16384
    """Most rows with gradient per chunk, padding included; or "whole"."""
    padding: int = 1
    """Rows of every chunk are padded to this multiple."""
    attention: str | None = None
    """reference, segment or flash4; by default flash4 for bf16 on a GPU, else segment."""
    recompute: str = "none"
    """none, core_attention or full."""
    cost_model: str | None = None
    """What calls take on this machine: a file that `profile` wrote, h200 or cpu; by default what the device is."""
    state_limit: int | None = None
    """Most cached states alive at once, in tokens; absent: whatever the fastest plan holds."""


@dataclass(frozen=True, kw_only=True)
class MoeSection:
    """A mixture of experts; what it says is about the whole step's sequences, however they are laid out."""

    experts: str = "sequential"
    """sequential or grouped: one expert after another, or Transformer Engine's grouped matrix products."""
    aux_loss_coef: float = 0.0
    """Load-balancing loss over the whole step; above 0 a sweep finds each expert's load before training."""
    z_loss_coef: float = 0.0
    """Squared log-sum-exp of the router's logits, mean over the step's tokens."""


@dataclass(frozen=True, kw_only=True)
class RLSection:
    """The objective and its numbers."""

    objective: str = "grpo"
    """sft or grpo."""
    inner_epochs: int = 1
    """Optimizer updates on the same batch; above 1, missing old log-probs come from a sweep before the first."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coef: float = 0.0
    temperature: float = 1.0
    """Sampling temperature of the rollouts."""
    normalizer: str = "token_mean"
    """token_mean or sequence_mean, over the whole step."""


@dataclass(frozen=True, kw_only=True)
class OptimizerSection:
    """AdamW with fp32 master weights; norms and biases are not decayed."""

    lr: float = 1e-6
    min_lr: float = 0.0
    schedule: str = "constant"
    """constant or cosine (down to min_lr), after the warm-up."""
    warmup_updates: int = 0
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip_norm: float | None = 1.0
    """Gradients are scaled down to this norm; absent: never."""


@dataclass(frozen=True, kw_only=True)
class TrainSection:
    """How long, and where results go."""

    steps: int | None = None
    """Batches to train on; absent: one pass over the file."""
    output: str | None = None
    """Folder for metrics.jsonl and the trained weights; absent: nothing is written."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything `train` needs."""

    data: DataConfig
    model: ModelSection = field(default_factory=ModelSection)
    engine: EngineSection = field(default_factory=EngineSection)
    parallel: Axes = field(default_factory=Axes)
    moe: MoeSection = field(default_factory=MoeSection)
    rl: RLSection = field(default_factory=RLSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    train: TrainSection = field(default_factory=TrainSection)

    def __post_init__(self):
        one_of("engine.mode", self.engine.mode, ("tree", "flat"))
        one_of("model.dtype", self.model.dtype, ("bf16", "fp32", "fp64"))
        one_of("moe.experts", self.moe.experts, ("sequential", "grouped"))
        one_of("rl.objective", self.rl.objective, ("sft", "grpo"))
        one_of("rl.normalizer", self.rl.normalizer, ("token_mean", "sequence_mean"))
        one_of("optimizer.schedule", self.optimizer.schedule, ("constant", "cosine"))
        if (self.model.hf_folder is None) == (self.model.hf_config is None):
            raise UsageError("give exactly one of model.hf_folder (weights) and model.hf_config (random weights)")
        rows = self.engine.budget if isinstance(self.engine.budget, int) else None
        if rows is None and self.engine.budget != "whole":
            raise UsageError(f"engine.budget is {self.engine.budget!r}; expected a whole number of rows or 'whole'")
        if self.rl.clip_low > 1:
            raise UsageError(f"rl.clip_low is {self.rl.clip_low}; expected at most 1, a ratio is positive")
        if not all(0 <= beta < 1 for beta in self.optimizer.betas):
            raise UsageError(f"optimizer.betas is {self.optimizer.betas}; expected two numbers in [0, 1)")
        for name, value in (("eps", self.optimizer.eps), ("clip_norm", self.optimizer.clip_norm)):
            if value is not None and not (math.isfinite(value) and value > 0):
                raise UsageError(f"optimizer.{name} is {value}; expected a positive number")
        for name, value, least in (
            ("engine.padding", self.engine.padding, 1),
            ("engine.budget", rows, self.engine.padding),
            ("data.shuffle_seed", self.data.shuffle_seed, 0),
            ("rl.clip_low", self.rl.clip_low, 0),
            ("rl.clip_high", self.rl.clip_high, 0),
            ("rl.kl_coef", self.rl.kl_coef, 0),
            ("moe.aux_loss_coef", self.moe.aux_loss_coef, 0),
            ("moe.z_loss_coef", self.moe.z_loss_coef, 0),
            ("data.groups_per_step", self.data.groups_per_step, 1),
            ("rl.inner_epochs", self.rl.inner_epochs, 1),
            ("train.steps", self.train.steps, 1),
            ("engine.state_limit", self.engine.state_limit, 1),
            ("optimizer.warmup_updates", self.optimizer.warmup_updates, 0),
            ("optimizer.lr", self.optimizer.lr, 0),
            ("optimizer.min_lr", self.optimizer.min_lr, 0),
            ("optimizer.weight_decay", self.optimizer.weight_decay, 0),
        ):
            if value is not None and not (math.isfinite(value) and value >= least):
                raise UsageError(f"{name} is {value}; expected a number of at least {least}")


def one_of(name: str, value: Any, valid: tuple[str, ...]) -> None:
    """Raise UsageError, naming the nearest choice, unless `value` is one of `valid`."""
    if value not in valid:
        raise UsageError(f"{name} is {value!r}; expected one of {', '.join(valid)}{_nearest(str(value), valid)}")


def load_config(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Config:
    """Read a TOML file and apply `section.key=value` overrides; raise UsageError naming file, key and value."""
    try:
        raw = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise UsageError(f"{path}: cannot read the config ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not valid TOML ({error})") from None
    for override in overrides:
        _apply(raw, override)
    try:
        return _build(Config, raw, "")
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def _apply(raw: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    section, dot, key = name.partition(".")
    if not (equals and dot and section and key):
        raise UsageError(f"override {override!r}: expected section.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # an unquoted string, as one types it in a shell
    table = raw.setdefault(section, {})
    if not isinstance(table, dict):
        raise UsageError(f"override {override!r}: {section} is not a section")
    table[key] = value


def _build(cls: Any, raw: dict[str, Any], prefix: str) -> Any:
    if not isinstance(raw, dict):
        raise UsageError(f"{prefix.rstrip('.')} is {raw!r}; expected a section")
    hints = typing.get_type_hints(cls)
    for key in raw:
        if key not in hints:
            raise UsageError(f"unknown key {prefix}{key}; valid: {', '.join(hints)}{_nearest(key, tuple(hints))}")
    values = {}
    for f in dataclasses.fields(cls):
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if f.name not in raw and required:
            if not dataclasses.is_dataclass(hints[f.name]):
                raise UsageError(f"{prefix}{f.name} is missing")
            raw = {**raw, f.name: {}}
        if f.name in raw:
            values[f.name] = _value(hints[f.name], raw[f.name], prefix + f.name)
    return cls(**values)


def _value(hint: Any, value: Any, name: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return _build(hint, value, name + ".")
    options = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    for option in options:
        if (
            typing.get_origin(option) is tuple
            and isinstance(value, list)
            and len(value) == len(typing.get_args(option))
        ):
            return tuple(_value(t, v, name) for t, v in zip(typing.get_args(option), value))
        if option is float and type(value) is int:
            return float(value)
        if isinstance(option, type) and type(value) is option:
            return value
    expected = " or ".join(getattr(option, "__name__", str(option)) for option in options if option is not type(None))
    raise UsageError(f"{name} is {value!r}; expected {expected}")


def _nearest(word: str, valid: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(word, valid, n=1)
    return f"; did you mean {close[0]}?" if close else ""
