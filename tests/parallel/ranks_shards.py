"""What every rank runs: `python ranks_shards.py FOLDER`. Prints "LAYOUT RANK ok" for every layout of its world."""

import sys
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megatron_dta.axes import Axes
from megatron_dta.checkpoint import hf_files
from megatron_dta.checkpoint.hf_files import load_hf, save_hf
from megatron_dta.checkpoint.open_model import DTYPES, open_model
from megatron_dta.control.communicator import Communicator
from megatron_dta.errors import UsageError
from megatron_dta.mcore import parallel, shards
from megatron_dta.mcore.model import TreeModel, build_model
from megatron_dta.mcore.shards import gather_whole
from megatron_dta.model_config import read_model_config
from megatron_dta.processes import joined

SEED = 7
DTYPE = {"plain": "fp64", "tied": "fp64", "one token": "bf16", "experts": "fp64"}
LAYOUTS: dict[int, list[tuple[str, Axes]]] = {
    2: [
        ("plain", Axes(tensor=2)),
        ("plain", Axes(tensor=2, sequence=True)),
        ("plain", Axes(pipeline=2, virtual=2)),
        ("tied", Axes(pipeline=2)),
        ("one token", Axes(tensor=2)),
        ("experts", Axes(expert=2)),
    ],
    4: [
        ("tied", Axes(tensor=2, pipeline=2)),
        ("tied", Axes(pipeline=2)),
        ("tied", Axes(tensor=4)),
        ("plain", Axes(tensor=2, sequence=True, context=2)),
        ("plain", Axes(tensor=2, pipeline=2, virtual=2)),
        ("one token", Axes(tensor=2)),
        ("experts", Axes(pipeline=2, expert=2)),
        ("experts", Axes(tensor=2, sequence=True, expert=2)),
        ("experts", Axes(tensor=2, sequence=True, expert=4, expert_tensor=1)),
    ],
}
"""By the number of processes: a model's name and its axes; what is left is data-parallel."""


def small_files() -> mock._patch:
    """Write files of 10 kB, so that a model has several."""
    split = hf_files.split_torch_state_dict_into_shards
    return mock.patch.object(hf_files, "split_torch_state_dict_into_shards", partial(split, max_shard_size="10KB"))


@torch.no_grad()
def hidden_states(model: TreeModel, num_tokens: int = 11) -> torch.Tensor:
    """Return the final hidden states [n, h] of one sequence, on every process; every part in its turn."""
    tokens = torch.arange(num_tokens) * 7 % model.model_config.vocab_size
    hidden: torch.Tensor | None = None
    for part in range(len(model.parts)):
        for stage in range(model.groups.pp.size()):
            if stage == model.groups.stage:
                hidden = model.run_part(part, tokens, None, hidden).contiguous()
            else:
                hidden = torch.empty(num_tokens, 1, model.model_config.hidden_size, dtype=model.dtype)
            dist.broadcast(hidden, group=model.groups.pp, group_src=stage)
    assert hidden is not None
    return hidden[:, 0]


def check_drawn(model: TreeModel, folder: Path, communicator: Communicator) -> None:
    """Compare random weights with those of one process, bit for bit, and copies among processes."""
    whole = gather_whole(lambda shard: shard.parameter, model, communicator)
    assert (whole is None) == (communicator.rank > 0)
    if whole is not None:
        expected = load_file(folder / "drawn.safetensors")
        assert whole.keys() == expected.keys(), whole.keys() ^ expected.keys()
        assert [name for name in expected if not torch.equal(whole[name], expected[name])] == []


def check_padding(model: TreeModel) -> None:
    """Rows of the padded vocabulary are 0, also where a rank has no other."""
    for shard in shards.shards(model):
        num_held = sum(piece.length for piece in shard.pieces)
        if num_held < shard.local[shard.dim]:
            assert shard.name in ("embedding.word_embeddings.weight", "output_layer.weight")
            assert not shard.parameter[num_held:].any()


def saved(model: TreeModel, folder: Path, name: str, communicator: Communicator) -> bool:
    """Save a model and say, on process 0, whether every byte is as one process saved it."""
    with small_files(), mock.patch.object(shards, "MAX_BYTES", 20_000):
        save_hf(model, folder / name, {"model": folder.name}, communicator=communicator)
    if communicator.rank > 0:
        return True
    got, expected = (sorted((folder / which).iterdir()) for which in (name, "saved"))
    assert len(expected) > 3 or folder.name == "one token"
    return [f.name for f in got] == [f.name for f in expected] and all(
        a.read_bytes() == b.read_bytes() for a, b in zip(got, expected)
    )


def check_hidden(model: TreeModel, folder: Path) -> None:
    """Compare with one process: sums in another order, within 1e-12 of numbers around 1; routers choose in fp32."""
    expected = load_file(folder / "hidden.safetensors")["hidden"]
    bound = 1e-5 if model.model_config.num_experts else 1e-12
    torch.testing.assert_close(hidden_states(model), expected, rtol=0, atol=bound)


def check_gate_and_up_as_one_piece(model: TreeModel, folder: Path, communicator: Communicator) -> None:
    """Cut so, weights come together again bit for bit, but the model is another: only `check_hidden` sees it."""
    with mock.patch.object(shards, "_num_matrices", return_value=1):
        load_hf(model, folder / "whole")
        assert saved(model, folder, "one piece", communicator)
    expected = load_file(folder / "hidden.safetensors")["hidden"]
    assert (hidden_states(model) - expected).abs().max() > 1e-2
    load_hf(model, folder / "whole")
    check_hidden(model, folder)


def check_failed_save(model: TreeModel, folder: Path, communicator: Communicator) -> None:
    """Whatever fails on process 0, all processes hear of it, and the folder that was there stays."""
    error = OSError("no space left on device")
    for where, name in ((hf_files, "save_file"), (hf_files, "_make_empty"), (hf_files, "_replace")):
        with mock.patch.object(where, name, side_effect=error):
            raised = told_by(lambda: saved(model, folder, "saved", communicator))
        assert "no space left on device" in str(raised)
        assert isinstance(raised, OSError if communicator.rank == 0 else RuntimeError)
    assert saved(model, folder, "after failures", communicator)


def check_refused_load(model: TreeModel, folder: Path) -> None:
    """Every process refuses files that only some of them would read from, and keeps its weights."""
    before = [parameter.clone() for parameter in model.parameters()]
    assert isinstance(told_by(lambda: load_hf(model, folder / "cut short")), UsageError)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


def told_by(action) -> Exception:
    try:
        action()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def check(name: str, axes: Axes, root: Path, communicator: Communicator) -> None:
    folder, dtype = root / name, DTYPE[name]
    device = parallel.initialize(axes=axes)
    config = read_model_config(folder / "whole")
    check_drawn(build_model(config, dtype=DTYPES[dtype], device=device, seed=SEED), folder, communicator)
    model, _ = open_model(hf_folder=str(folder / "whole"), dtype=dtype, axes=axes)
    assert model.axes == axes
    check_padding(model)
    assert saved(model, folder, f"saved by {communicator.size}", communicator)
    if not axes.sequence and dtype == "fp64":
        check_hidden(model, folder)
    if axes in (Axes(tensor=2), Axes(tensor=4)) and dtype == "fp64":
        check_gate_and_up_as_one_piece(model, folder, communicator)
    if axes.pipeline > 1:
        check_refused_load(model, folder)
    if axes.virtual > 1:
        check_failed_save(model, folder, communicator)


def main() -> None:
    with joined() as processes:
        communicator = processes.communicator
        for name, axes in LAYOUTS[communicator.size]:
            check(name, axes, Path(sys.argv[1]), communicator)
            print(f"{name}, {axes.describe()} {communicator.rank} ok", flush=True)


if __name__ == "__main__":
    main()
