"""What a call of the model is predicted to take: a roofline of host and device time, fitted or scaled.

A call takes the longer of the time the host needs to issue it, whatever its size, and the time the device needs for
its rows. That is how chunks behave on an H200: flat in time up to about 3,000 tokens, then proportional to them.
"""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dta.errors import UsageError
from megatron_dta.model_config import ModelConfig
from megatron_dta.tree.statistics import layer_weights, linear_flops

Counts = np.ndarray | float
"""A number, or one per call."""


@dataclass(frozen=True, kw_only=True)
class CallCost:
    """Seconds of one kind of call, all layers and the LM head together."""

    launch: float
    """Host time to issue a call: the least that any call takes."""
    fixed: float
    """Device time of a call without rows (for a backward: reading and writing the gradient buffers)."""
    row: float
    """Per row, padding included: the layers' matrices, norms and elementwise work."""
    pair: float
    """Per visible (query, key) pair."""
    context: float
    """Per context token: its states are read, its gradients accumulated."""
    source: float
    """Per row that reaches the LM head."""

    def seconds(self, rows: Counts, pairs: Counts, context: Counts, sources: Counts) -> Any:
        """Return the predicted time of calls with these counts; a call without rows is no call and takes none."""
        device = self.fixed + self.row * rows + self.pair * pairs + self.context * context + self.source * sources
        return np.where(np.asarray(rows) > 0, np.maximum(self.launch, device), 0.0)

    def scaled(self, device: float, launch: float) -> "CallCost":
        """Return this cost with device and host times multiplied."""
        parts = {name: getattr(self, name) * device for name in ("fixed", "row", "pair", "context", "source")}
        return CallCost(launch=self.launch * launch, **parts)


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Predicted times of one model on one kind of machine."""

    machine: str
    chunk: CallCost
    """Forward with gradient and backward."""
    push: CallCost
    """Forward without gradient; its `source` is 0."""
    fit: dict[str, Any] = field(default_factory=dict)
    """Where the numbers come from: for a profile, its shapes, errors and the model it ran."""

    def on(self, *, tensor: int = 1, context: int = 1, pipeline: int = 1) -> "CostModel":
        """Return the cost on one of `tensor * context * pipeline` devices that share a call's work evenly.

        Host time falls only with the layers a stage holds. Communication is not modelled.
        """
        device, launch = 1 / (tensor * context * pipeline), 1 / pipeline
        return replace(self, chunk=self.chunk.scaled(device, launch), push=self.push.scaled(device, launch))


def default_cost(model: ModelConfig, machine: str) -> CostModel:
    """Return the cost of a model on a machine that has not been profiled, `h200` or `cpu`.

    Scaled from measured rates by the model's work. H200: bf16, fp32 gradients, from the runs in
    tools/bench/results/2026-11-30-h200-profile.md. CPU: fp32, one core. Raises UsageError for another machine.
    """
    if machine not in _MACHINES:
        raise UsageError(f"machine is {machine!r}; expected one of {', '.join(_MACHINES)}, or profile it")
    return _MACHINES[machine](model)


def open_cost(name: str, model: ModelConfig) -> CostModel:
    """Return the cost model of a shipped machine, or from a file that `profile` wrote for this model's shape."""
    if name in _MACHINES:
        return default_cost(model, name)
    cost = load_cost(name)
    check_model(cost, model)
    return cost


def cost_json(cost: CostModel) -> str:
    """Return a cost model as the text that `load_cost` reads."""
    return json.dumps(asdict(cost), indent=2) + "\n"


def load_cost(path: str | Path) -> CostModel:
    """Read a cost model; raise UsageError for a file that is not one."""
    try:
        raw = json.loads(Path(path).read_text())
    except OSError as error:
        raise UsageError(f"{path}: cannot read the cost model ({error.strerror})") from None
    except ValueError as error:
        raise UsageError(f"{path}: not valid JSON ({error})") from None
    wanted = ("machine", "chunk", "push", "fit")
    if not isinstance(raw, dict) or set(raw) != set(wanted) or not isinstance(raw["machine"], str):
        raise UsageError(f"{path}: not a cost model; expected an object with {', '.join(wanted)}")
    if not isinstance(raw["fit"], dict):
        raise UsageError(f"{path}: fit is {raw['fit']!r}; expected an object")
    calls = {name: _call_cost(f"{path}: {name}", raw[name]) for name in ("chunk", "push")}
    return CostModel(machine=raw["machine"], fit=raw["fit"], **calls)


def check_model(cost: CostModel, model: ModelConfig) -> None:
    """Raise UsageError if the cost was profiled on a model of another shape; shipped rates fit any."""
    profiled = cost.fit.get("model")
    if profiled is None:
        return
    if not isinstance(profiled, dict):
        raise UsageError(f"fit.model of the cost model is {profiled!r}; expected an object, profile the model again")
    profiled = dict.fromkeys(_EXPERTS, 0) | profiled  # a profile of a dense model need not say so
    for name, value in model_shape(model).items():
        if profiled.get(name) != value:
            raise UsageError(
                f"the cost model was profiled with {name} {profiled.get(name)!r}, this model has {value}; profile it "
                "with `python -m megatron_dta profile`, or leave the cost model out"
            )


def model_shape(model: ModelConfig) -> dict[str, int]:
    """Return what the time of a call depends on, as a profile stores it."""
    return {name: getattr(model, name) for name in _SHAPE}


_EXPERTS = ("num_experts", "experts_per_token", "expert_ffn_size")
_SHAPE = ("num_layers", "hidden_size", "ffn_size", "num_heads", "num_kv_heads", "head_size", "vocab_size", *_EXPERTS)


def _call_cost(name: str, raw: Any) -> CallCost:
    wanted = [f.name for f in fields(CallCost)]
    if not isinstance(raw, dict) or set(raw) != set(wanted):
        raise UsageError(f"{name} is {raw!r}; expected an object with {', '.join(wanted)}")
    for key, value in raw.items():
        if type(value) not in (int, float) or not (math.isfinite(value) and value >= 0):
            raise UsageError(f"{name}.{key} is {value!r}; expected seconds, not negative")
    return CallCost(**raw)


@dataclass(frozen=True, kw_only=True)
class _Rates:
    """What a machine does, for any model."""

    matrix: float
    """FLOP per second of products in the model's dtype: the layers' matrices and the LM head."""
    wide: float
    """FLOP per second of the LM head's weight gradient, whose factors are at least fp32."""
    attention: float
    """FLOP per second of attention over its visible pairs."""
    memory: float
    """Bytes per second."""
    passes: float
    """How often a forward, or a backward, moves what the layers' matrices return: norms, activations, copies."""
    head_passes: float
    """How often a forward and backward move the logits, 4 bytes each."""
    layer: float
    """Host seconds of a layer's forward and backward."""
    call: float
    """Host seconds of a forward and backward besides its layers."""
    element: int
    """Bytes of a weight, an activation or a cached state."""


_FORWARD = 0.45
"""A forward's share of the host time of both."""


def _from_rates(name: str, rates: _Rates, model: ModelConfig) -> CostModel:
    q, kv = model.num_heads * model.head_size, model.num_kv_heads * model.head_size
    matrices = model.num_layers * layer_weights(model, model.num_experts)
    head = model.vocab_size * model.hidden_size
    product = linear_flops(model) / rates.matrix
    returned = model.num_layers * (q + 2 * kv + 2 * model.hidden_size + _mlp_returned(model))
    elementwise = rates.passes * returned * rates.element / rates.memory
    pair = 4 * model.num_layers * q / rates.attention
    # Logits are made twice; their gradients then go to the hidden states and to the weight.
    logits = rates.head_passes * 4 * model.vocab_size / rates.memory
    source = 3 * 2 * head / rates.matrix + 2 * head / rates.wide + logits
    # Forward: states are gathered into one array (read, written, read). Backward: gathered again; their gradients are
    # read, widened (written, read) and added to 4-byte accumulators, zeroed before.
    states = 2 * model.num_layers * kv
    gather = 3 * states * rates.element / rates.memory
    accumulate = states * (rates.element + 20) / rates.memory
    # Weights are read in each direction, the head's three times. A gradient is written, read, and added to a 4-byte
    # one. The head's is first summed in 4 bytes: zeroed, read, written, read; a tied embedding's is added to it.
    add = 2 * rates.element + 8
    embedding = 4 * rates.element if model.tied else add
    both = matrices * (2 * rates.element + add) + head * (3 * rates.element + 16 + add + embedding)
    launch = model.num_layers * rates.layer + rates.call
    push = CallCost(
        launch=_FORWARD * launch,
        fixed=matrices * rates.element / rates.memory,
        row=product + elementwise,
        pair=pair,
        context=gather,
        source=0.0,
    )
    chunk = CallCost(
        launch=launch,
        fixed=both / rates.memory,
        row=3 * product + 2 * elementwise,
        pair=3.5 * pair,  # backward: the scores again, and four products
        context=2 * gather + accumulate,
        source=source,
    )
    return CostModel(machine=name, chunk=chunk, push=push, fit={"source": "scaled from shipped rates"})


def _mlp_returned(model: ModelConfig) -> int:
    """Count what an MLP's first matrix returns for a row; with experts also what the copies to and from them move."""
    if not model.num_experts:
        return 2 * model.ffn_size
    return model.num_experts + 2 * model.experts_per_token * (model.hidden_size + model.expert_ffn_size)


_H200 = _Rates(
    matrix=800e12,
    wide=48e12,
    attention=620e12,
    memory=2.6e12,
    passes=11,
    head_passes=22,
    layer=2.9e-3,
    call=4e-3,
    element=2,
)
_CPU = _Rates(
    matrix=60e9, wide=60e9, attention=36e9, memory=15e9, passes=0, head_passes=0, layer=2.8e-3, call=0.0, element=4
)
_MACHINES: dict[str, Callable[[ModelConfig], CostModel]] = {
    "h200": lambda model: _from_rates("h200", _H200, model),
    "cpu": lambda model: _from_rates("cpu", _CPU, model),
}
