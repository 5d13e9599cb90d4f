"""What every rank of a launch runs for the control plane: `python plane_ranks.py CASE`; prints "CASE RANK ok"."""

import itertools
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from megatron_dta.control.communicator import Communicator
from megatron_dta.control.launch import connect, detect_launch
from megatron_dta.control.plane import ControlPlane, Share
from megatron_dta.control.planning import HANDLER, structure_of
from megatron_dta.control.service import InlinePlanner, Planner, PlannerProcess
from megatron_dta.data.samples import Sample
from megatron_dta.errors import UsageError
from megatron_dta.tree.cost import CallCost, CostModel
from megatron_dta.tree.outline import build_outline
from megatron_dta.tree.planner import Settings, Task, build_plan, plan_batch

CALL = CallCost(launch=2.0, fixed=0.1, row=0.7, pair=0.05, context=0.01, source=0.1)
COST = CostModel(machine="test", chunk=CALL, push=replace(CALL, source=0.0))


def drawn(seed: int, count: int) -> list[Sample]:
    """Draw samples that share prefixes, with every field absent, scalar or per token; sample i ends with token i."""
    rng = np.random.default_rng(seed)
    stems = [rng.integers(1000, 1003, 6) for _ in range(2)]
    return [drawn_sample(rng, i, np.append(stems[rng.integers(2)][: rng.integers(7)], i)) for i in range(count)]


def drawn_sample(rng: np.random.Generator, number: int, tokens: np.ndarray) -> Sample:
    length = len(tokens)

    def maybe(value: Any) -> Any:
        return value if rng.random() < 0.6 else None

    mask = rng.random(length) < 0.5
    mask[0] = False
    return Sample(
        sample_id=f"sample {number} \u2265",
        group_id=f"g{number % 3}",
        trajectory_id=f"t{number // 2}",
        tokens=tokens.astype(np.int32),
        loss_mask=mask,
        reward=[None, float(rng.normal()), float("nan"), float("-inf"), 5e-324][rng.integers(5)],
        advantage=[None, float(rng.normal()), rng.normal(size=length)][rng.integers(3)],
        old_logprobs=maybe(np.where(mask, -rng.random(length), np.nan)),
        ref_logprobs=maybe(-rng.random(length)),
        identity=maybe(rng.integers(-(2**62), 2**62, 2)[rng.integers(0, 2, length)]),
        version=maybe(int(rng.integers(2**40))),
    )


def scattered(samples: Sequence[Sample], seed: int, holders: Sequence[int], num_processes: int) -> list[list[Sample]]:
    """Deal samples to the processes that may hold some; return each process's."""
    owner = np.random.default_rng(seed).choice(holders, len(samples))
    return [[s for s, o in zip(samples, owner) if o == process] for process in range(num_processes)]


def expect_same(got: Sequence[Sample], expected: Sequence[Sample]) -> None:
    """Compare every field with its type, dtype and bits."""
    assert [s.sample_id for s in got] == [s.sample_id for s in expected]
    for a, b in zip(got, expected):
        for name in (field.name for field in fields(Sample)):
            x, y = getattr(a, name), getattr(b, name)
            assert type(x) is type(y), (name, x, y)
            if isinstance(x, np.ndarray):
                assert (x.dtype, x.tobytes()) == (y.dtype, y.tobytes()), (name, x, y)
            else:
                assert repr(x) == repr(y), (name, x, y)


def expect_same_task(got: Task, expected: Task) -> None:
    for name in (field.name for field in fields(Task)):
        a, b = getattr(got, name), getattr(expected, name)
        assert type(a) is type(b), name
        assert getattr(a, "dtype", None) == getattr(b, "dtype", None), name
        np.testing.assert_array_equal(a, b, err_msg=name)


def check_batches(comm: Communicator, planner: Planner | None, replica_of: Sequence[int] | None = None) -> None:
    """Batches of all sizes, each handed in before the first is collected, with and without a budget and groups."""
    replicas = comm.size if replica_of is None else len(set(replica_of))
    leaders = range(comm.size) if replica_of is None else [replica_of.index(r) for r in range(replicas)]
    # all that train, fewer samples than ranks, one, and all on the last
    batches = [
        scattered(drawn(0, 23), 0, leaders, comm.size),
        scattered(drawn(1, max(replicas - 1, 1)), 1, leaders, comm.size),
        scattered(drawn(2, 1), 2, leaders[:1], comm.size),
        scattered(drawn(3, 9), 3, leaders[-1:], comm.size),
    ]
    for settings in (
        Settings(cost=COST, ranks=replicas),
        Settings(cost=COST, budget=7, multiple=2, ranks=replicas, together=replicas),
    ):
        plane = ControlPlane(comm, planner, settings, replica_of=replica_of)
        for parts in batches:
            plane.submit(parts[comm.rank])
        shares = [plane.collect() for _ in batches]
        for parts, share in zip(batches, shares):
            check_share(plane, parts, share)


def check_share(plane: ControlPlane, parts: list[list[Sample]], share: Share) -> None:
    """Compare a share with what one process would plan, and send results back (A29)."""
    whole = list(itertools.chain(*parts))
    batch = plan_batch(build_outline(*structure_of(whole).values()), plane.settings)
    expect_same_task(share.task, batch.tasks[plane.replica])
    expect_same(share.samples, [whole[i] for i in share.task.sequences])
    for rank, task in enumerate(batch.tasks):
        assert (share.rank_of[task.sequences] == rank).all()
    assert (share.rank_of >= 0).all()
    assert share.counts == tuple(map(len, parts))
    terms = [int(s.loss_mask[1:].sum()) for s in whole]
    assert (share.num_terms, share.num_trained) == (sum(terms), np.count_nonzero(terms))
    assert share.num_tokens == sum(len(s.tokens) for s in whole)
    assert share.num_without_old == sum(s.old_logprobs is None for s in whole)
    assert share.forecast.seconds == tuple(batch.seconds.tolist())
    assert share.plan_seconds > 0
    assert share.wait_seconds >= 0
    build_plan(share.task, *structure_of(share.samples).values(), multiple=plane.settings.multiple)
    values = [np.append(s.tokens / 3, float(s.tokens[-1])) for s in share.samples]
    own = parts[plane.communicator.rank]
    back = plane.give_back(share, values)
    assert [row[-1] for row in back] == [s.tokens[-1] for s in own], "results of other samples"
    for row, sample in zip(back, own):
        np.testing.assert_array_equal(row[:-1], sample.tokens / 3)
    rank = plane.communicator.rank
    numbers = plane.gather_numbers({"rank": rank, "samples": len(share.samples), "nan": float("nan")})
    assert [n["rank"] for n in numbers] == list(range(plane.communicator.size))
    assert [n["samples"] for n in numbers] == [len(batch.tasks[replica].sequences) for replica in plane.replica_of]
    assert [plane.replica_of[leader] for leader in plane.leaders] == list(range(plane.settings.ranks))
    assert all(np.isnan(n["nan"]) for n in numbers)


def check_errors(comm: Communicator, planner: Planner | None) -> None:
    """What the planner refuses is raised on every process, with the same words; the next batch is planned."""
    good, bad = drawn(0, 5), drawn(1, 3)
    if comm.rank == comm.size - 1:
        empty = np.zeros(0, np.int32)
        bad[1] = replace(bad[1], tokens=empty, loss_mask=empty.astype(bool), identity=None, advantage=None)
    mine = good if comm.rank == comm.size - 1 else []
    small = ControlPlane(comm, planner, Settings(cost=COST, budget=2, multiple=4, ranks=comm.size))
    plane = ControlPlane(comm, planner, Settings(cost=COST, ranks=comm.size))
    small.submit(mine)
    plane.submit(bad)
    plane.submit(mine)
    for collect, kind, words in (
        (small.collect, UsageError, "budget is 2; expected 'whole' or at least 4 tokens"),
        (plane.collect, RuntimeError, f"sequence {3 * comm.size - 2} is empty"),
    ):
        error = error_of(collect)
        assert type(error) is kind
        assert words in str(error)
        assert len({bytes(text) for text in comm.allgather(str(error).encode())}) == 1
    assert plane.collect().counts[-1] == len(good)


def error_of(function: Callable[..., Any], *arguments: Any, **options: Any) -> Exception:
    try:
        function(*arguments, **options)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def check_statistics(comm: Communicator, planner: Planner | None) -> None:
    """A28: groups whose members are on several processes have the advantages that one process gives them."""
    from megatron_dta.engine.batch import sample_advantages

    plane = ControlPlane(comm, planner, Settings(cost=COST, ranks=comm.size))
    rng = np.random.default_rng(0)
    rewards = rng.normal(size=20)
    samples = [
        # two samples of each trajectory, four trajectories of each group; some have advantages of their own
        replace(s, group_id=f"g{i // 2 % 5}", trajectory_id=f"t{i // 2}", reward=float(rewards[i // 2]))
        for i, s in enumerate(drawn(0, 40))
    ]
    parts = scattered(samples, 0, range(comm.size), comm.size)
    whole = list(itertools.chain(*parts))
    outcomes, start = plane.outcomes(parts[comm.rank])
    assert [o.sample_id for o in outcomes] == [s.sample_id for s in whole]
    assert start == sum(len(part) for part in parts[: comm.rank])
    assert sum(len(o.tokens) for o in outcomes) == 0
    together = sample_advantages(outcomes)
    per_token = 0
    for got, expected, sample in zip(together, sample_advantages(whole), whole):
        if isinstance(sample.advantage, np.ndarray):
            per_token += 1  # stays with its sample: nobody else needs it
        else:
            assert got == expected, sample.sample_id
    assert 0 < per_token < len(whole)
    if comm.size > 1:
        alone = sample_advantages(parts[comm.rank])
        computed = [i for i, s in enumerate(parts[comm.rank]) if s.advantage is None]
        assert any(alone[i] != together[start + i] for i in computed), "no group is split: nothing is tested"


def check_replicas(comm: Communicator, planner: Planner | None) -> None:
    """Processes that share a model: neighbours, and every other one, led by a process that has no planner."""
    for replica_of in ([0, 0, 1, 1], [1, 0, 1, 0], [0, 0, 0, 0]):
        check_batches(comm, planner, replica_of)
        settings = Settings(cost=COST, ranks=len(set(replica_of)))
        plane = ControlPlane(comm, planner, settings, replica_of=replica_of)
        assert plane.replica == replica_of[comm.rank]
        assert plane.is_leader == (comm.rank in {replica_of.index(r) for r in set(replica_of)})
        if not plane.is_leader:
            assert "is no leader of its replica" in str(error_of(plane.submit, drawn(0, 1)))
    settings = Settings(cost=COST, ranks=2)
    for wrong in ([0, 0, 1], [0, 0, 1, 2], [0, 0, 0, 0], [1, 1, 2, 2], [-1, 0, 1, 1], None):
        error = error_of(ControlPlane, comm, planner, settings, replica_of=wrong)
        assert type(error) is ValueError
        assert "expected one of 0 .. 1 for each of 4 processes" in str(error)
    unplanned = None if comm.rank == 0 else InlinePlanner(HANDLER)
    error = error_of(ControlPlane, comm, unplanned, settings, replica_of=[0, 0, 1, 1])
    assert "process 0, and it alone, has the planner" in str(error)


def mpi() -> Communicator:
    return several(detect_launch(os.environ).rank)


def gloo() -> Communicator:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return several(dist.get_rank())


def several(rank: int) -> Communicator:
    planner = PlannerProcess(HANDLER) if rank == 0 else None
    comm = connect(detect_launch(os.environ))
    check_batches(comm, planner)
    check_errors(comm, planner)
    check_errors(comm, InlinePlanner(HANDLER) if rank == 0 else None)
    check_statistics(comm, planner)
    if planner is not None:
        planner.close()
    return comm


def replicas() -> Communicator:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    comm = connect(detect_launch(os.environ))
    check_replicas(comm, InlinePlanner(HANDLER) if comm.rank == 0 else None)
    return comm


CASES = {case.__name__: case for case in (mpi, gloo, replicas)}

if __name__ == "__main__":
    try:
        finished = CASES[sys.argv[1]]()
        finished.close()
    except BaseException:
        # at once: the other ranks wait for this one
        traceback.print_exc()
        os._exit(1)
    os.write(1, f"{sys.argv[1]} {finished.rank} ok\n".encode())
