"""What a plan saves and costs: counts that hold for any model, and work and memory for a given one.

Work is counted as model FLOPs: two per multiply-add, backward twice the forward, attention by visible area.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from megatron_dta.model_config import ModelConfig
from megatron_dta.tree.forest import Forest
from megatron_dta.tree.plan import Plan

BYTES = {"bf16": 2, "fp32": 4, "fp64": 8}


@dataclass(frozen=True, kw_only=True)
class PlanStatistics:
    """Counts of one plan."""

    sequences: int
    trees: int
    segments: int
    longest_path: int
    sequence_tokens: int
    tree_tokens: int
    token_ratio: float
    """Sequence tokens over tree tokens: what is saved of the linear work."""
    sequence_area: int
    tree_area: int
    """Visible (query, key) pairs, each sequence alone and as a tree."""
    area_ratio: float
    trained_tokens: int
    """Per sequence: the terms of a loss."""
    head_rows: int
    """Tree tokens that reach the LM head."""
    budget: int
    chunks: int
    pushes: int
    pushed_tokens: int
    pushed_share: float
    rows: int
    """Rows with gradient, padding included."""
    rows_in_flight: int
    """Most rows with gradient between forward and backward."""
    fill: float
    """Tree tokens over the rows that all chunks could hold."""
    state_rows: int
    grad_rows: int
    """Most cached states and gradient accumulators alive at once, in tokens."""


@dataclass(frozen=True, kw_only=True)
class WorkStatistics:
    """Work of one step, forward and backward, in FLOP."""

    sequence_flops: float
    tree_flops: float
    flop_ratio: float
    """The most that computing each token once can win."""
    push_flops: float
    """Forward of the pushed tokens, on top of `tree_flops`."""


@dataclass(frozen=True, kw_only=True)
class MemoryStatistics:
    """Predicted bytes at the peak of a step on one process, without recomputation and without the LM head's blocks."""

    weights: int
    gradients: int
    optimizer: int
    states: int
    accumulators: int
    activations: int
    total: int


def plan_statistics(plan: Plan) -> PlanStatistics:
    """Count what a plan holds."""
    forest, lengths = plan.forest, plan.forest.lengths
    sequence_tokens, sequence_area = int(lengths.sum()), int((lengths * (lengths + 1) // 2).sum())
    tree_area = _area(forest)
    capacity = max(len(plan.chunks) * plan.capacity, 1)
    return PlanStatistics(
        sequences=forest.num_sequences,
        trees=int((forest.parent < 0).sum()),
        segments=len(forest.segment_start),
        longest_path=int(lengths.max(initial=0)),
        sequence_tokens=sequence_tokens,
        tree_tokens=forest.num_tokens,
        token_ratio=sequence_tokens / max(forest.num_tokens, 1),
        sequence_area=sequence_area,
        tree_area=tree_area,
        area_ratio=sequence_area / max(tree_area, 1),
        trained_tokens=len(forest.term_target),
        head_rows=sum(len(chunk.source_rows) for chunk in plan.chunks),
        budget=plan.capacity,
        chunks=len(plan.chunks),
        pushes=len(plan.pushes),
        pushed_tokens=plan.num_pushed,
        pushed_share=plan.num_pushed / max(forest.num_tokens, 1),
        rows=plan.num_rows,
        rows_in_flight=_rows_in_flight(plan),
        fill=forest.num_tokens / capacity,
        state_rows=plan.state_rows,
        grad_rows=plan.grad_rows,
    )


def over_ranks(parts: Sequence[PlanStatistics]) -> PlanStatistics:
    """Put the counts of all ranks together: sums, and for what is a peak the largest."""
    largest = ("longest_path", "budget", "rows_in_flight", "state_rows", "grad_rows")
    found: dict[str, Any] = {}
    for f in fields(PlanStatistics):
        values = [getattr(part, f.name) for part in parts]
        found[f.name] = max(values) if f.name in largest else sum(values)
    found |= {
        "token_ratio": found["sequence_tokens"] / max(found["tree_tokens"], 1),
        "area_ratio": found["sequence_area"] / max(found["tree_area"], 1),
        "pushed_share": found["pushed_tokens"] / max(found["tree_tokens"], 1),
        "fill": found["tree_tokens"] / max(sum(part.chunks * part.budget for part in parts), 1),
    }
    return PlanStatistics(**found)


def _rows_in_flight(plan: Plan) -> int:
    """Chunks run first in, first out: the largest sum over neighbours that are in flight together."""
    total = np.cumsum([0, *(chunk.size for chunk in plan.chunks)])
    together = min(plan.in_flight, len(plan.chunks))
    return int((total[together:] - total[: len(total) - together]).max())


def _area(forest: Forest) -> int:
    return int(forest.depth.astype(np.int64).sum()) + forest.num_tokens


def work_statistics(plans: Sequence[Plan], counts: PlanStatistics, model: ModelConfig) -> WorkStatistics:
    """Count the work of each sequence alone and of the plans of all ranks, LM head included."""
    linear, pair, head = linear_flops(model), attention_flops(model), head_flops(model)
    pushed_area = sum(
        int(plan.forest.depth[push.tokens].astype(np.int64).sum()) + len(push.tokens)
        for plan in plans
        for push in plan.pushes
    )
    sequence = linear * counts.sequence_tokens + pair * counts.sequence_area + head * counts.trained_tokens
    tree = linear * counts.tree_tokens + pair * counts.tree_area + head * counts.head_rows
    return WorkStatistics(
        sequence_flops=3.0 * sequence,
        tree_flops=3.0 * tree,
        flop_ratio=sequence / max(tree, 1),
        push_flops=float(linear * counts.pushed_tokens + pair * pushed_area),
    )


def linear_flops(model: ModelConfig) -> int:
    """Forward FLOPs of all layers' matrices for one token: of the experts, those that it visits."""
    return 2 * model.num_layers * layer_weights(model, model.experts_per_token)


def layer_weights(model: ModelConfig, num_experts: int) -> int:
    """Count the elements of a layer's matrices, the router included, with so many of its experts."""
    q, kv = model.num_heads * model.head_size, model.num_kv_heads * model.head_size
    mlp = 3 * (num_experts * model.expert_ffn_size if model.num_experts else model.ffn_size)
    return model.hidden_size * (2 * q + 2 * kv + model.num_experts + mlp)


def attention_flops(model: ModelConfig) -> int:
    """Forward FLOPs of all layers for one visible (query, key) pair."""
    return 4 * model.num_layers * model.num_heads * model.head_size


def head_flops(model: ModelConfig) -> int:
    """Forward FLOPs of the LM head for one row."""
    return 2 * model.hidden_size * model.vocab_size


def num_parameters(model: ModelConfig) -> int:
    """Count the weights, padded vocabulary rows excluded."""
    embeddings = (1 if model.tied else 2) * model.vocab_size * model.hidden_size
    biases = (model.num_heads + 2 * model.num_kv_heads) * model.head_size if model.qkv_bias else 0
    norms = 2 * model.hidden_size + (2 * model.head_size if model.qk_norm else 0)
    matrices = layer_weights(model, model.num_experts)
    return embeddings + model.num_layers * (matrices + norms + biases) + model.hidden_size


def num_expert_parameters(model: ModelConfig) -> int:
    """Count the weights of all experts; 0 for a dense model."""
    return model.num_layers * model.num_experts * 3 * model.hidden_size * model.expert_ffn_size


def memory_statistics(
    counts: PlanStatistics,
    model: ModelConfig,
    dtype: str,
    *,
    tensor: int = 1,
    context: int = 1,
    pipeline: int = 1,
    expert: int = 1,
    expert_tensor: int | None = None,
) -> MemoryStatistics:
    """Predict the memory of a step on one device: gradients, optimizer and accumulators are at least fp32.

    Weights are spread over tensor and pipeline ranks, those of experts over expert, expert-tensor (None: as many as
    `tensor`) and pipeline ranks; rows over tensor, context and pipeline ranks. `counts` are those of the rank that has
    most alive.
    """
    narrow, wide = BYTES[dtype], max(BYTES[dtype], 4)
    of_experts = num_expert_parameters(model)
    parameters = -(-(num_parameters(model) - of_experts) // (tensor * pipeline))
    parameters += -(-of_experts // (expert * (expert_tensor or tensor) * pipeline))
    devices = tensor * context * pipeline
    per_state = 2 * model.num_layers * model.num_kv_heads * model.head_size
    parts = {
        "weights": parameters * narrow,
        "gradients": parameters * wide,
        "optimizer": parameters * (2 * wide + (wide if narrow < wide else 0)),
        "states": counts.state_rows * per_state * narrow // devices,
        "accumulators": counts.grad_rows * per_state * wide // devices,
        "activations": counts.rows_in_flight * activation_bytes(model, narrow) // devices,
    }
    return MemoryStatistics(**parts, total=sum(parts.values()))


def activation_bytes(model: ModelConfig, element: int) -> int:
    """Estimate what backward keeps of one token over all layers with Megatron's local layers.

    Counted per layer: both norms' inputs and outputs and both residuals (6 h), query, key and value before norm,
    before rotation and after (3), attention output and its projection, and four tensors of the gated MLP besides its
    product (5 ffn). For h 4096 and ffn 12288 this gives 220 KiB in bf16; 239 were measured. With experts: the MLP's
    tensors and a copy of its input per chosen expert, and three fp32 rows of the router.
    """
    h, q = model.hidden_size, model.num_heads * model.head_size
    kv = model.num_kv_heads * model.head_size
    per_layer = 6 * h + 3 * (q + 2 * kv) + q + h
    if model.num_experts:
        per_layer += model.experts_per_token * (h + 5 * model.expert_ffn_size)
    else:
        per_layer += 5 * model.ffn_size
    return model.num_layers * (per_layer * element + 12 * model.num_experts)
