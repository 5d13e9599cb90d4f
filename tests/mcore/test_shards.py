"""Pieces of parameters: they lie where Megatron's layers expect them, and together they are the model, once."""

import itertools
import math
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from megatron.core.tensor_parallel import layers

from megatron_dta.checkpoint.open_model import TINY
from megatron_dta.mcore import model as model_module
from megatron_dta.mcore import parallel, shards
from megatron_dta.mcore.model import TreeModel, build_model, padded_vocab
from megatron_dta.mcore.places import Place, split_pieces, vocabulary_pieces
from megatron_dta.mcore.shards import Alone, Shard, draw_weights, gather_whole, on_root, stream_whole
from megatron_dta.model_config import parse_model_config


def small(*, dtype: torch.dtype = torch.float32, seed: int = 0, **changes) -> TreeModel:
    raw = TINY | {"model_type": "qwen2", "vocab_size": 130, "max_position_embeddings": 32} | changes
    return build_model(parse_model_config(raw), dtype=dtype, device=parallel.initialize(), seed=seed)


def weights(model: TreeModel) -> dict[str, torch.Tensor]:
    whole = gather_whole(lambda shard: shard.parameter, model, Alone())
    assert whole is not None
    return whole


def split(whole: torch.Tensor, dim: int, size: int, number: int) -> list[Place]:
    local = list(whole.shape)
    local[dim] //= size
    return [
        Place(
            name="w",
            whole=tuple(whole.shape),
            local=tuple(local),
            dim=dim,
            pieces=split_pieces(local[dim], rank, size, number),
        )
        for rank in range(size)
    ]


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(1.0, math.prod(shape) + 1).view(shape)


def pasted(places: list[Place], whole: torch.Tensor) -> torch.Tensor:
    out = torch.full_like(whole, torch.nan)
    for place in places:
        local = place.cut(whole)
        assert local.shape == place.local
        place.paste(local, out)
    return out


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(("shape", "dim", "number"), [((24,), 0, 1), ((24, 3), 0, 2), ((5, 12), 1, 1), ((12, 1), 0, 1)])
def test_pieces_of_all_ranks_are_the_whole(shape, dim, number, size):
    whole = numbered(*shape)
    places = split(whole, dim, size, number)
    assert torch.equal(pasted(places, whole), whole)
    assert sum(place.numel for place in places) == whole.numel()
    assert [Place.from_json(place.to_json()) for place in places] == places


@pytest.mark.parametrize("tensor", [1, 2, 3, 4])
@pytest.mark.parametrize("vocab_size", [1, 127, 128, 130, 257, 512])
def test_vocabulary_rows_that_do_not_divide(vocab_size, tensor):
    """Every real row is on one rank, in order; the others are 0."""
    whole, rows = numbered(vocab_size, 2), padded_vocab(vocab_size, tensor) // tensor
    shape = {"name": "w", "whole": (vocab_size, 2), "local": (rows, 2), "dim": 0}
    places = [Place(**shape, pieces=vocabulary_pieces(r * rows, rows, vocab_size)) for r in range(tensor)]
    assert torch.equal(pasted(places, whole), whole)
    padded = torch.cat([place.cut(whole) for place in places])
    assert torch.equal(padded[:vocab_size], whole)
    assert not padded[vocab_size:].any()
    assert sum(place.numel for place in places) == whole.numel()


def cut_by_megatron(whole: torch.Tensor, dim: int, rank: int, size: int, stride: int) -> torch.Tensor:
    """Cut as Megatron's layers do when they draw their own weights."""
    shape = list(whole.shape)
    shape[dim] //= size
    local = torch.empty(shape)
    layers._initialize_affine_weight_cpu(
        local, *whole.shape, shape[dim], dim, lambda w: w.copy_(whole), stride=stride, rank=rank, world_size=size
    )  # fmt: skip
    return local


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(("dim", "number"), [(0, 1), (0, 2), (1, 1)])
def test_cut_is_megatrons(dim, number, size):
    whole = numbered(16, 24)
    for rank, place in enumerate(split(whole, dim, size, number)):
        assert torch.equal(place.cut(whole), cut_by_megatron(whole, dim, rank, size, number))


def test_gate_and_up_as_one_piece_is_not_megatrons():
    """The comparison above can fail: with two ranks, rank 0 would have all of gate and rank 1 all of up."""
    whole = numbered(16, 24)
    wrong = [place.cut(whole) for place in split(whole, 0, 2, 1)]
    assert not any(torch.equal(wrong[r], cut_by_megatron(whole, 0, r, 2, 2)) for r in range(2))


NUM_EXPERTS = 12
MARKS = ("tensor_model_parallel", "partition_dim", "partition_stride")


def test_marks_are_those_that_megatron_leaves_when_it_draws(monkeypatch):
    def marks() -> dict[str, list]:
        return {name: [getattr(p, mark, None) for mark in MARKS] for name, p in small().named_parameters()}

    got = marks()
    drawing = model_module.transformer_config
    monkeypatch.setattr(
        model_module, "transformer_config", lambda *a: replace(drawing(*a), perform_initialization=True)
    )  # fmt: skip
    monkeypatch.setattr(shards, "mark_splits", lambda part: None)
    assert got == marks()
    assert got["decoder.layers.0.mlp.linear_fc1.weight"] == [True, 0, 2]
    monkeypatch.undo()
    monkeypatch.setattr(shards, "mark_splits", lambda part: None)
    assert got != marks(), "Megatron leaves marks without drawing: mark_splits has become unnecessary"


def test_weights_are_drawn_from_seed_and_name_only():
    first, again, other = weights(small()), weights(small()), weights(small(seed=1))
    tied, deeper = weights(small(tie_word_embeddings=True)), weights(small(num_hidden_layers=3))
    for name, weight in first.items():
        assert torch.equal(weight, again[name]), name
        is_fixed = "norm" in name or name.endswith("bias")
        assert torch.equal(weight, other[name]) == is_fixed, name
    assert first.keys() - tied.keys() == {"output_layer.weight"}
    assert all(torch.equal(first[name], weight) for name, weight in tied.items())
    fc1 = [deeper[f"decoder.layers.{i}.mlp.linear_fc1.weight"] for i in range(3)]
    assert torch.equal(fc1[1], first["decoder.layers.1.mlp.linear_fc1.weight"])
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(fc1, 2))


def test_drawing_uses_no_generator_of_others():
    model = small()
    first, before = weights(model), torch.get_rng_state()
    torch.randn(3)
    assert not torch.equal(torch.get_rng_state(), before)
    torch.set_rng_state(before)
    draw_weights(model, 0)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(weight, first[name]) for name, weight in weights(model).items())


def test_weights_are_spread_as_the_config_says():
    """The standard deviation of n normal numbers is within 5 standard errors, 5 / sqrt(2n), of the true one."""
    for name, weight in weights(small(num_hidden_layers=3, initializer_range=0.25)).items():
        if name.endswith("bias"):
            assert not weight.any()
        elif "norm" in name:
            assert torch.equal(weight, torch.ones_like(weight))
        else:
            narrower = math.sqrt(6) if "linear_proj" in name or "linear_fc2" in name else 1.0
            assert float(weight.std()) * narrower / 0.25 == pytest.approx(1, abs=5 / math.sqrt(2 * weight.numel()))
            assert abs(float(weight.mean())) < 5 * 0.25 / math.sqrt(weight.numel())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_weights_of_other_dtypes_are_the_same_rounded(dtype):
    narrow = weights(small())
    for name, weight in weights(small(dtype=dtype)).items():
        assert torch.equal(weight, narrow[name].to(dtype)), name


@dataclass(frozen=True)
class Ranks:
    """A process's place in a group."""

    at: int
    num: int

    def rank(self) -> int:
        return self.at

    def size(self) -> int:
        return self.num


def groups_of(world: int, tensor: int, expert: int, expert_tensor: int) -> list[SimpleNamespace]:
    """Number processes as Megatron does; dense parameters have world / tensor copies."""
    shared = expert * expert_tensor
    return [
        SimpleNamespace(
            tp=Ranks(r % tensor, tensor),
            dp_cp=Ranks(r // tensor, world // tensor),
            etp=Ranks(r % expert_tensor, expert_tensor),
            ep=Ranks(r // expert_tensor % expert, expert),
            edp=Ranks(r // shared, world // shared),
        )
        for r in range(world)
    ]


@pytest.mark.parametrize(
    ("world", "tensor", "expert", "expert_tensor"),
    [(1, 1, 1, 1), (4, 2, 1, 2), (4, 2, 2, 1), (4, 2, 4, 1), (4, 1, 2, 2), (8, 2, 2, 2), (8, 4, 2, 2), (6, 2, 3, 1)],
)
@pytest.mark.parametrize("grouped", [False, True], ids=["sequential", "grouped"])
def test_every_number_is_spoken_for_once(world, tensor, expert, expert_tensor, grouped):
    """Experts lie on other ranks than what is dense; grouped ones are marked as Transformer Engine does."""
    model = small()
    shapes = {"linear_fc1.weight": (48, 8), "linear_fc2.weight": (8, 24)}
    spoken: dict[str, torch.Tensor] = {}
    for groups in groups_of(world, tensor, expert, expert_tensor):
        of_rank = partial(shards._shard, replace(model, groups=groups))
        held = [of_rank("decoder.layers.0.mlp.router.weight", torch.nn.Parameter(torch.zeros(NUM_EXPERTS, 8)))]
        local = torch.nn.Parameter(torch.zeros(padded_vocab(130, tensor) // tensor, 8))
        vars(local).update(tensor_model_parallel=True, partition_dim=0)
        held.append(of_rank("embedding.word_embeddings.weight", local))
        for e, (layer, shape) in itertools.product(range(NUM_EXPERTS // expert), shapes.items()):
            dim = list(shapes).index(layer)
            size = [n // expert_tensor if d == dim else n for d, n in enumerate(shape)]
            parameter = torch.nn.Parameter(torch.zeros(size))
            vars(parameter).update(tensor_model_parallel=True, partition_dim=0 if grouped else dim)
            number = groups.ep.rank() * (NUM_EXPERTS // expert) + e
            held.append(of_rank(f"decoder.layers.0.mlp.experts.local_experts.{number}.{layer}", parameter))
        for shard in held:
            times = spoken.setdefault(shard.name, torch.zeros(shard.whole))
            assert times.shape == shard.whole
            added = torch.zeros_like(times)
            shard.paste(torch.ones(shard.local), added)
            times += added * shard.is_first
            assert added.sum() == shard.numel
    assert len(spoken) == 2 + 2 * NUM_EXPERTS
    assert all(bool((times == 1).all()) for times in spoken.values())


def test_whole_tensors_have_no_padding_and_memory_of_their_own():
    model = small(dtype=torch.bfloat16)
    whole, parameters = weights(model), dict(model.named_parameters())
    assert list(whole) == list(parameters)
    for name, tensor in whole.items():
        assert torch.equal(tensor, parameters[name][: len(tensor)])
        tensor.zero_()
    assert whole["output_layer.weight"].shape == (130, 32)
    assert all(bool(p.any()) for name, p in parameters.items() if not name.endswith("bias"))


@pytest.mark.parametrize("max_bytes", [1, 5000, 20_000])
def test_batches_keep_within_their_limit(max_bytes, monkeypatch):
    """Or are one tensor; in the order asked for, every tensor once, whatever the dtype."""
    monkeypatch.setattr(shards, "MAX_BYTES", max_bytes)
    model, received = small(), []

    def grad(shard: Shard) -> torch.Tensor:
        return shard.parameter.detach().to(torch.float64 if "norm" in shard.name else torch.bfloat16) * 2

    names = sorted(dict(model.named_parameters()))
    stream_whole(grad, model, Alone(), received.append, names)
    assert [name for batch in received for name in batch] == names
    for batch in received:
        assert len(batch) == 1 or sum(tensor.nbytes for tensor in batch.values()) <= max_bytes
    assert any(len(batch) > 1 for batch in received) == (max_bytes > 1)
    for name, tensor in (item for batch in received for item in batch.items()):
        parameter = dict(model.named_parameters())[name][: len(tensor)]
        assert torch.equal(tensor, parameter.to(tensor.dtype) * 2)


class Twice(Alone):
    """Two processes that both believe to speak for everything."""

    def gather(self, payload):
        return [np.frombuffer(payload, np.uint8)] * 2


def test_tensors_that_are_not_there_once_are_refused():
    model = small()
    with pytest.raises(RuntimeError, match=r"hold 8,320 numbers of embedding.*which has 4,160"):
        gather_whole(lambda shard: shard.parameter, model, Twice())
    names = list(dict(model.named_parameters()))
    for wrong, told in ((names[1:], f"{names[0]} is held"), ([*names, "zzz"], "zzz is not held")):
        with pytest.raises(RuntimeError, match=told):
            stream_whole(lambda shard: shard.parameter, model, Alone(), lambda whole: None, wrong)


def test_what_fails_on_process_0_is_raised_elsewhere_too():
    told = []

    class Root(Alone):
        def broadcast(self, payload):
            told.append(bytes(payload))
            return super().broadcast(payload)

    class Other(Alone):
        rank = 1

        def broadcast(self, payload):
            return np.frombuffer(told.pop(), np.uint8)

    assert on_root(Root(), lambda: [1, "a"]) == on_root(Other(), pytest.fail) == [1, "a"]
    for value, error in ((lambda: 1 / 0, ZeroDivisionError), (lambda: {1, 2}, TypeError)):
        with pytest.raises(error):
            on_root(Root(), value)
        with pytest.raises(RuntimeError, match=f"process 0 failed with {error.__name__}: "):
            on_root(Other(), pytest.fail)
