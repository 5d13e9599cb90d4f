"""This process's parameters as pieces of the whole model: drawn at random, and brought together on process 0."""

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from torch import nn

from megatron_dta.errors import UsageError
from megatron_dta.mcore.places import Place, split_pieces, vocabulary_pieces

if TYPE_CHECKING:
    from megatron_dta.mcore.model import TreeModel

MAX_BYTES = 2**29
"""Whole tensors on their way to process 0 at once; a larger one travels alone."""
_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
_SPLIT_DIM: dict[type[nn.Module], int] = {ColumnParallelLinear: 0, VocabParallelEmbedding: 0, RowParallelLinear: 1}


@dataclass(frozen=True, kw_only=True, eq=False)
class Shard(Place):
    """A parameter of this process and its place in the whole one."""

    parameter: nn.Parameter
    is_first: bool
    """Whether this process speaks for it: together, those that do hold every number of the model once."""

    def take(self, whole: torch.Tensor) -> None:
        """Set the parameter to its part of a whole tensor, rounded to its dtype."""
        with torch.no_grad():
            self.parameter.copy_(self.cut(whole))


def shards(model: "TreeModel") -> list[Shard]:
    """Return this process's parameters; a tied copy of the embedding goes by the embedding's name.

    Weights without Megatron's marks of how tensor ranks split them get them.
    """
    for part in model.parts:
        mark_splits(part)
    return [_shard(model, name, parameter) for name, parameter in model.named_parameters()]


def mark_splits(part: nn.Module) -> None:
    """Mark split weights as Megatron does only where it draws them itself: its gradient norms ask for the marks."""
    for name, module in part.named_modules():
        weight = getattr(module, "weight", None)
        dim = next((dim for kind, dim in _SPLIT_DIM.items() if isinstance(module, kind)), None)
        if dim is not None and weight is not None and not hasattr(weight, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(weight, True, dim, _num_matrices(f"{name}.weight"))


def _shard(model: "TreeModel", name: str, parameter: nn.Parameter) -> Shard:
    groups, vocab_size = model.groups, model.model_config.vocab_size
    is_copy = name == _OUTPUT and model.model_config.tied
    split_dim = _split_dim(name, parameter)
    copies, ranks = (groups.edp, groups.etp) if _is_expert(name) else (groups.dp_cp, groups.tp)
    rank, size, dim = (0, 1, 0) if split_dim is None else (ranks.rank(), ranks.size(), split_dim)
    whole = list(parameter.shape)
    if name in (_EMBEDDING, _OUTPUT):
        pieces = vocabulary_pieces(rank * whole[dim], whole[dim], vocab_size)
        whole[dim] = vocab_size
    else:
        pieces = split_pieces(whole[dim], rank, size, _num_matrices(name))
        whole[dim] *= size
    return Shard(
        name=_EMBEDDING if is_copy else name,
        whole=tuple(whole),
        local=tuple(parameter.shape),
        dim=dim,
        pieces=pieces,
        parameter=parameter,
        is_first=not is_copy and copies.rank() == 0 and (split_dim is not None or ranks.rank() == 0),
    )


def _is_expert(name: str) -> bool:
    return ".experts." in name


def _split_dim(name: str, parameter: nn.Parameter) -> int | None:
    """Return the dimension that tensor ranks split a parameter along; None where each holds the whole."""
    if _is_expert(name):
        return 0 if ".linear_fc1." in name else 1  # Transformer Engine marks all grouped matrices as split by rows
    is_split = getattr(parameter, "tensor_model_parallel", False)
    return parameter.partition_dim if is_split else None  # type: ignore[attr-defined]


def _num_matrices(name: str) -> int:
    """Count the matrices below each other in a weight: gate and up are split each for itself."""
    return 2 if ".linear_fc1." in name else 1


def draw_weights(model: "TreeModel", seed: int) -> None:
    """Draw this process's parameters, each from `seed` and its name: the same whole model on any axes, bit for bit.

    In fp32 on the CPU, then rounded. Norms are 1, biases 0, the rest normal as Megatron draws it: with the config's
    standard deviation, matrices that add to the residual stream narrower by sqrt(2 x layers).
    """
    config = model.model_config
    for shard in shards(model):
        shard.take(_drawn(shard, seed, config.init_std, config.num_layers))


def _drawn(place: Place, seed: int, std: float, num_layers: int) -> torch.Tensor:
    if place.name.endswith("bias"):
        return torch.zeros(place.whole)
    if "layernorm" in place.name:
        return torch.ones(place.whole)
    if place.name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        std /= math.sqrt(2 * num_layers)
    digest = hashlib.blake2b(f"{seed} {place.name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    return torch.empty(place.whole, dtype=torch.float32).normal_(0.0, std, generator=generator)


class Peers(Protocol):
    """What is asked of a communicator: all processes make the same calls; payloads are contiguous memory."""

    rank: int

    def gather(self, payload: Any) -> Sequence[np.ndarray] | None:
        """Return the payloads of all processes, by rank, as uint8 on process 0; None elsewhere."""

    def broadcast(self, payload: Any) -> np.ndarray:
        """Return process 0's payload as uint8; what others pass is ignored."""


class Alone:
    """The only process."""

    rank = 0

    def gather(self, payload: Any) -> list[np.ndarray]:
        return [np.frombuffer(payload, np.uint8)]

    def broadcast(self, payload: Any) -> np.ndarray:
        return np.frombuffer(payload, np.uint8)


Held = dict[str, tuple[Place, torch.dtype]]
"""What a process speaks for, by name."""


def gather_whole(
    tensors: Callable[[Shard], torch.Tensor], model: "TreeModel", communicator: Peers
) -> dict[str, torch.Tensor] | None:
    """Return whole tensors by the names of their parameters, on the CPU of process 0; None elsewhere.

    tensors: from a parameter to a tensor of its shape, such as itself or its gradient. All processes call this. Raises
    RuntimeError, on all, where they do not hold a tensor once.
    """
    whole: dict[str, torch.Tensor] = {}
    stream_whole(tensors, model, communicator, whole.update)
    return whole if communicator.rank == 0 else None


def stream_whole(
    tensors: Callable[[Shard], torch.Tensor],
    model: "TreeModel",
    peers: Peers,
    receive: Callable[[dict[str, torch.Tensor]], None],
    names: Sequence[str] | None = None,
) -> None:
    """Call `receive` on process 0 with batch after batch of what `gather_whole` returns; all raise where it fails.

    names: the whole model's parameters, in the order wanted; by default whatever the processes hold.
    """
    speaking = {shard.name: shard for shard in shards(model) if shard.is_first}
    gathered = peers.gather(json.dumps([_entry(shard, tensors(shard)) for shard in speaking.values()]).encode())
    held = [_read_entries(payload) for payload in gathered or ()]
    for batch in on_root(peers, lambda: _batches(held, names)):
        payloads = peers.gather(_pack([tensors(speaking[name]) for name in batch if name in speaking]))
        on_root(peers, partial(_deliver, receive, batch, payloads or (), held))


def on_root(peers: Peers, action: Callable[[], Any]) -> Any:
    """Run an action on process 0 and return its JSON value everywhere.

    Where it raises, the others raise RuntimeError with its message, and UsageError for a UsageError.
    """
    error, told = None, ""
    if peers.rank == 0:
        try:
            told = json.dumps({"value": action()})
        except Exception as raised:  # whatever it is: the others wait to hear of it
            kind = "usage" if isinstance(raised, UsageError) else type(raised).__name__
            error, told = raised, json.dumps({"kind": kind, "message": str(raised)})
    outcome = json.loads(bytes(peers.broadcast(told.encode())))
    if error is not None:
        raise error
    if outcome.get("kind") == "usage":
        raise UsageError(outcome["message"])
    if "kind" in outcome:
        raise RuntimeError(f"process 0 failed with {outcome['kind']}: {outcome['message']}")
    return outcome["value"]


def _entry(place: Place, tensor: torch.Tensor) -> list[Any]:
    return [place.to_json(), str(tensor.dtype).removeprefix("torch.")]


def _read_entries(payload: np.ndarray) -> Held:
    entries = [(Place.from_json(fields), getattr(torch, dtype)) for fields, dtype in json.loads(bytes(payload))]
    return {place.name: (place, dtype) for place, dtype in entries}


def _batches(held: list[Held], names: Sequence[str] | None) -> list[list[str]]:
    """Group the names so that a group's whole tensors keep within `MAX_BYTES`, or are one; check that all are whole."""
    num_bytes = _whole_bytes(held)
    names = list(num_bytes) if names is None else names
    if set(names) != set(num_bytes):
        name = min(set(names) ^ set(num_bytes))
        raise RuntimeError(f"{name} is {'not ' * (name not in num_bytes)}held by these processes, the model's differ")
    groups: list[list[str]] = []
    room = 0
    for name in names:
        if num_bytes[name] > room:
            groups.append([])
            room = MAX_BYTES
        groups[-1].append(name)
        room -= num_bytes[name]
    return groups


def _whole_bytes(held: list[Held]) -> dict[str, int]:
    """Return the size of every whole tensor; raise RuntimeError for one that is not there once."""
    found: dict[str, int] = {}
    num_bytes: dict[str, int] = {}
    for place, dtype in (entry for places in held for entry in places.values()):
        found[place.name] = found.get(place.name, 0) + place.numel
        num_bytes[place.name] = math.prod(place.whole) * dtype.itemsize
    for place, _ in (entry for places in held for entry in places.values()):
        if found[place.name] != math.prod(place.whole):
            raise RuntimeError(
                f"these processes hold {found[place.name]:,} numbers of {place.name}, which has "
                f"{math.prod(place.whole):,}"
            )
    return num_bytes


def _pack(tensors: Sequence[torch.Tensor]) -> np.ndarray:
    """Return the bytes of tensors, one after the other."""
    flat = [tensor.detach().cpu().contiguous().flatten().view(torch.uint8) for tensor in tensors]
    return torch.cat(flat).numpy() if flat else np.empty(0, np.uint8)


def _deliver(
    receive: Callable[[dict[str, torch.Tensor]], None],
    names: Sequence[str],
    payloads: Sequence[np.ndarray],
    held: list[Held],
) -> None:
    """Put what all processes packed of these parameters into whole tensors and hand them on."""
    whole: dict[str, torch.Tensor] = dict.fromkeys(names, torch.empty(0))
    for payload, places in zip(payloads, held, strict=True):
        at = 0
        for place, dtype in (places[name] for name in names if name in places):
            stop = at + math.prod(place.local) * dtype.itemsize
            local = torch.from_numpy(payload[at:stop].copy()).view(dtype).view(place.local)
            if not whole[place.name].numel():
                whole[place.name] = torch.empty(place.whole, dtype=dtype)
            place.paste(local, whole[place.name])
            at = stop
    receive(whole)
