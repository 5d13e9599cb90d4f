"""Every parallel axis, and axes together, against each sequence alone: the matrix that users can run themselves.

`make test-parallel` sets MEGATRON_DTA_CELLS=all: every cell with every forest. Without it each cell runs the forests
that are hardest for it.
"""

import json
import os
from typing import Any

import pytest

from megatron_dta.verify import EXACT, ROUTER_EXACT
from tests.control.spawn import ROOT, run_torch

ALL = os.environ.get("MEGATRON_DTA_CELLS") == "all"
HARD = {} if ALL else {"forests": ["comb", "several trees", "prompt only"]}
FEW = {} if ALL else {"forests": ["comb", "several trees"]}
STEPS = {"steps": 3, "forests": ["comb"]}
TP = {"tensor": 2}
SP = {"tensor": 2, "sequence": True}
PP = {"pipeline": 2}
VPP = {"pipeline": 2, "virtual": 2}
CP = {"context": 2}
GATHER = {"context": 2, "cp_comm": "allgather"}
EP = {"expert": 2}
ROUTER = {"aux": 0.1, "z": 0.01}
BROKEN = {"forests": ["deep"]}

DENSE_2 = {
    "dp2": HARD,
    "tp2": TP | HARD,
    "tp2 sp": SP | HARD,
    "pp2": PP | HARD,
    "pp2 vpp2": VPP | HARD,
    "cp2 a2a": CP | HARD,
    "cp2 allgather": GATHER | HARD,
    "tp2 sp recompute": SP | {"recompute": "full", "forests": ["comb"]},
    "pp2 recompute": PP | {"recompute": "full", "forests": ["comb"]},
    "cp2 allgather recompute": GATHER | {"recompute": "core_attention", "forests": ["comb"]},
}
TIED_2 = {"pp2": PP | FEW, "pp2 vpp2": VPP | FEW, "tp2 sp": SP | {"forests": ["comb"]}}
STEPS_2 = {name: axes | STEPS for name, axes in (("dp2", {}), ("tp2", TP), ("tp2 sp", SP), ("pp2", PP), ("vpp2", VPP))}
STEPS_2 |= {name: axes | STEPS for name, axes in (("cp2 a2a", CP), ("cp2 allgather", GATHER))}
STEPS_2 |= {"twenty": SP | {"steps": 20, "forests": ["star"]}}
MOE_STEPS_2 = {"ep2": EP | ROUTER | STEPS, "tp2 sp": SP | STEPS}
MOE_2 = {
    "dp2": ROUTER | FEW,
    "ep2": EP | HARD,
    "ep2 router losses": EP | ROUTER | FEW,
    "tp2 sp router losses": SP | ROUTER | FEW,
    "cp2 a2a router losses": CP | ROUTER | {"forests": ["comb"]},
    "cp2 allgather": GATHER | {"forests": ["comb"]},
    "pp2 router losses": PP | ROUTER | {"forests": ["comb"]},
    "cp2 with ep2 in it": CP | EP | {"forests": ["comb"]},
    "ep2 recompute": EP | {"recompute": "full", "forests": ["comb"]},
}
DENSE_4 = {
    "pp4": {"pipeline": 4} | HARD,
    "tp2 pp2": TP | PP | FEW,
    "tp2 sp cp2 a2a": SP | CP | FEW,
    "tp2 sp cp2 allgather": SP | GATHER | FEW,
    "pp2 cp2 a2a": PP | CP | {"forests": ["comb"]},
    "pp2 vpp2 cp2 allgather": VPP | GATHER | {"forests": ["comb"]},
    "tp2 sp pp2 vpp2": SP | VPP | {"forests": ["comb"]},
    "tp2 dp2": TP | {"forests": ["comb"]},
    "pp2 dp2": PP | {"forests": ["prompt only"]},
    "cp2 dp2": GATHER | {"forests": ["one term"]},
}
MOE_4 = {
    "ep2 dp2": EP | ROUTER | FEW,
    "tp2 sp ep2": SP | EP | ROUTER | FEW,
    "tp2 sp ep2 etp1": SP | EP | {"expert_tensor": 1, "forests": ["comb"]},
    "pp2 ep2": PP | EP | FEW,
    "cp2 ep4": CP | {"expert": 4, "forests": ["comb"]},
}
SABOTAGE_2 = {
    "tensor: norms of queries and keys not summed": TP,
    "tensor: gradients of hidden states not summed": TP,
    "pipeline: a stage without the mask": PP,
    "context: depth by place": CP,
    "context: rows of another rank": GATHER,
    "context: gradients of own keys only": GATHER,
    "data: not summed": {},
}
TIED_SABOTAGE_2 = {"pipeline: tied embeddings not summed": PP}


def spawn(kind: str, num_processes: int, cells: dict[str, dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Run cells in one spawn of processes; return each cell's results, one for every forest and budget."""
    asked = json.dumps({"kind": kind, "cells": list(cells.items())})
    printed = run_torch(num_processes, str(ROOT / "tests/parallel/cells.py"), asked)
    results = [json.loads(line) for line in printed.splitlines() if line.startswith('{"cell"')]
    return {cell: [result for result in results if result["cell"] == cell] for cell in cells}


@pytest.mark.parametrize(
    ("kind", "num_processes", "cells"),
    [("dense", 2, DENSE_2), ("tied", 2, TIED_2), ("moe", 2, MOE_2), ("dense", 4, DENSE_4), ("moe", 4, MOE_4)],
)
def test_exact(kind, num_processes, cells):
    """C07: also on stages that have neither the first layer nor the last. B22: experts that processes share."""
    bound = ROUTER_EXACT if kind == "moe" else EXACT
    for cell, results in spawn(kind, num_processes, cells).items():
        assert results, f"{cell} was not run"
        assert any(result["pushes"] for result in results), f"{cell}: no chunk had context from another"
        for result in results:
            assert all(result[name] <= bound for name in ("logprob", "loss", "grad", "sweep")), result
            assert result["repeat"] == 0.0, result


@pytest.mark.parametrize(("kind", "cells"), [("dense", STEPS_2), ("moe", MOE_STEPS_2)])
def test_three_steps(kind, cells):
    """Weights after three updates are those of each sequence alone, and copies of a parameter are equal bits.

    B20: after twenty too, also where a copy's gradient is a sum over tensor ranks.
    """
    for cell, results in spawn(kind, 2, cells).items():
        assert results, f"{cell} was not run"
        for result in results:
            # AdamW divides by the size of a gradient: what is small in a gradient need not be in its update
            assert result["weights"] <= (1e-5 if kind == "moe" else 1e-8), result
            assert result["copies"] == 0, result


@pytest.mark.parametrize(("kind", "broken"), [("dense", SABOTAGE_2), ("tied", TIED_SABOTAGE_2)])
def test_negative_controls(kind, broken):
    """The same comparison finds each way to break an axis; C07: a stage with a causal mask in place of the tree's."""
    cells = {name: axes | BROKEN | {"sabotage": name} for name, axes in broken.items()}
    for results in spawn(kind, 2, cells).values():
        (result,) = results
        assert max(result["grad"], result["logprob"]) > 1e-3, result
