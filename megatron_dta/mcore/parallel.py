"""Process groups: the one file that touches `parallel_state`; everywhere else groups are arguments."""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import initialize_rng_tracker, model_parallel_cuda_manual_seed

from megatron_dta.axes import Axes
from megatron_dta.errors import UsageError
from megatron_dta.mcore import cpu

Group = dist.ProcessGroup


@dataclass(frozen=True, kw_only=True)
class World:
    """The processes of a run, as the launcher started them."""

    rank: int
    size: int
    local_rank: int | None
    """Which GPU of the host; None where the launcher does not say."""
    init_method: str
    """Where torch.distributed meets: `env://` or `tcp://host:port`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Transfers:
    """Groups of a pipeline's point-to-point transfers: one for each direction and kind of link.

    Messages of one group between two stages then all go one way, first in, first out: no transfer can wait for one of
    another kind. Between two stages a backend has one queue per group.
    """

    forward: Group
    backward: Group
    forward_wrap: Group
    """From the last stage to the first: activations of the next model part."""
    backward_wrap: Group


@dataclass(frozen=True, kw_only=True, eq=False)
class Groups:
    """This process's groups along every axis, its place in them, and the pipeline's transfers."""

    tp: Group
    cp: Group
    tp_cp: Group
    dp: Group
    """Replicas: ranks with the same part of the model and of a sequence."""
    dp_cp: Group
    pp: Group
    ep: Group
    etp: Group
    edp: Group
    """Ranks with the same experts."""
    model: Group
    """tp x pp: ranks that together hold every dense parameter once."""
    expert_model: Group
    """etp x ep x pp: ranks that together hold every expert parameter once."""
    transfers: Transfers | None
    """None without a pipeline."""

    @property
    def stage(self) -> int:
        return self.pp.rank()


_made: dict[Axes, Groups] = {}
"""The groups that exist now, by their axes: at most one entry; Megatron's own are global too."""


def initialize(*, seed: int = 0, world: World | None = None, axes: Axes | None = None) -> torch.device:
    """Set up this process with Megatron's groups and return its device; a second call changes what differs.

    Without `world` this is the only process, or torch.distributed is initialised already; without `axes` they stay as
    they are, at first all data-parallel. Other axes than before take the old groups apart; all processes must do so
    together. Raises UsageError under a launcher that started several processes where `world` does not say so.
    """
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        cpu.install()
    if not dist.is_initialized():
        _join(world, on_gpu)
    if axes is not None or not _made:
        _lay_out(axes or Axes())
    torch.manual_seed(seed)
    if on_gpu:
        model_parallel_cuda_manual_seed(seed)
        return torch.device("cuda", torch.cuda.current_device())
    initialize_rng_tracker(inference_rng_tracker=True)  # the other tracker draws from CUDA
    return torch.device("cpu")


def _lay_out(axes: Axes) -> None:
    if axes in _made and parallel_state.model_parallel_is_initialized():
        return
    world = dist.get_world_size()
    if world % axes.replica_size:
        raise UsageError(
            f"{world} process(es) do not divide into replicas of {axes.replica_size} ({axes.describe()}); start a "
            f"multiple of {axes.replica_size}"
        )
    _take_apart()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=axes.tensor,
        pipeline_model_parallel_size=axes.pipeline,
        virtual_pipeline_model_parallel_size=axes.virtual if axes.virtual > 1 else None,
        context_parallel_size=axes.context,
        expert_model_parallel_size=axes.expert,
        expert_tensor_parallel_size=axes.expert_tensor_size,
        create_gloo_process_groups=False,
    )
    _made[axes] = Groups(
        tp=parallel_state.get_tensor_model_parallel_group(),
        cp=parallel_state.get_context_parallel_group(),
        tp_cp=parallel_state.get_tensor_and_context_parallel_group(),
        dp=parallel_state.get_data_parallel_group(),
        dp_cp=parallel_state.get_data_parallel_group(with_context_parallel=True),
        pp=parallel_state.get_pipeline_model_parallel_group(),
        ep=parallel_state.get_expert_model_parallel_group(),
        etp=parallel_state.get_expert_tensor_parallel_group(),
        edp=parallel_state.get_expert_data_parallel_group(),
        model=parallel_state.get_model_parallel_group(),
        expert_model=parallel_state.get_expert_tensor_model_pipeline_parallel_group(),
        transfers=_transfers(axes, world) if axes.pipeline > 1 else None,
    )


def _take_apart() -> None:
    """End the groups that exist, if any: each has threads and connections."""
    transfers = [g.transfers for g in _made.values() if g.transfers is not None]
    own = {group for t in transfers for group in (t.forward, t.backward, t.forward_wrap, t.backward_wrap)}
    _made.clear()
    if not parallel_state.model_parallel_is_initialized():
        return
    made = [group for group in parallel_state._global_process_group_list or () if group is not None]
    parallel_state.destroy_model_parallel()
    for group in dict.fromkeys([*made, *own]):
        if group is not dist.group.WORLD and group != dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


def _transfers(axes: Axes, world: int) -> Transfers:
    """Make the groups of all pipelines, in one order on every process; return this process's."""
    per_stage, rank = world // axes.pipeline, dist.get_rank()
    found: dict[str, Group] = {}
    for first in range(per_stage):
        ranks = list(range(first, world, per_stage))
        for name in ("forward", "backward", "forward_wrap", "backward_wrap"):
            if axes.virtual == 1 and name.endswith("wrap"):
                continue
            group = dist.new_group(ranks)
            if rank in ranks:
                found[name] = group
    for name, group in found.items():
        _meet(group, name)
    for name in ("forward", "backward"):
        found.setdefault(name + "_wrap", found[name])
    return Transfers(**found)


def _meet(group: Group, name: str) -> None:
    """Send a number over every link of a group of transfers, one link after the other.

    NCCL connects two processes at their first transfer, and waits for both: connecting in the order in which a step
    first needs a link, each stage would wait for another link's other end.
    """
    last = group.size() - 1
    links = [(last, 0)] if name.endswith("wrap") else [(stage, stage + 1) for stage in range(last)]
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    number = torch.zeros(1, device=device)
    for link in links:
        source, target = link if name.startswith("forward") else link[::-1]
        if group.rank() == source:
            dist.send(number, group=group, group_dst=target)
        elif group.rank() == target:
            dist.recv(number, group=group, group_src=source)


def current_axes() -> Axes:
    """Return the axes that this process is set up for."""
    return next(iter(_made))


def current_groups() -> Groups:
    """Return this process's groups."""
    return next(iter(_made.values()))


def is_first_part(part: int) -> bool:
    """Say whether a model part of this stage is the model's first: it embeds."""
    return parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=part)


def is_last_part(part: int) -> bool:
    """Say whether a model part of this stage is the model's last: it has the head."""
    return parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=part)


def _join(world: World | None, on_gpu: bool) -> None:
    backend = "nccl" if on_gpu else "gloo"
    if world is None or world.size == 1:
        if world is None:
            refuse_several_processes()
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return
    if on_gpu:
        local = world.rank if world.local_rank is None else world.local_rank
        if torch.cuda.device_count() == 1:
            local = 0  # the launcher shows each process its own GPU
        if local >= torch.cuda.device_count():
            raise UsageError(
                f"rank {world.rank} is number {local} on its host, which shows {torch.cuda.device_count()} GPUs; "
                "start one process per GPU, or show each process its own (CUDA_VISIBLE_DEVICES)"
            )
        torch.cuda.set_device(local)
    dist.init_process_group(backend, init_method=world.init_method, rank=world.rank, world_size=world.size)


def refuse_several_processes() -> None:
    """Raise UsageError where a launcher started more than one process: each would work alone."""
    for name in _WORLD_SIZES:
        if name.startswith("SLURM") and "SLURM_STEP_ID" not in os.environ:
            continue  # of the batch script: no step has been started
        size = os.environ.get(name, "1")
        if size.isdigit() and int(size) > 1:
            raise UsageError(
                f"{name} is {size}; only `train` and `verify --parallel` run on several processes, start this without "
                "a launcher"
            )


def leave() -> None:
    """Leave the groups that `initialize` made for several processes; the last thing a process does."""
    _take_apart()
    dist.destroy_process_group()


_WORLD_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
