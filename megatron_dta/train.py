"""The training loop: batches of groups, a pass of the engine, an update of the weights."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from megatron_dta.checkpoint.hf_files import save_hf
from megatron_dta.checkpoint.open_model import open_model
from megatron_dta.config import Config, EngineSection, MoeSection, RLSection
from megatron_dta.control.plane import ControlPlane, Share
from megatron_dta.control.planning import Forecast
from megatron_dta.data.rollouts import read_rollouts
from megatron_dta.data.samples import Sample
from megatron_dta.engine.base import StepResult
from megatron_dta.engine.batch import Scope, check_ref_logprobs, merged_metrics, sample_advantages
from megatron_dta.engine.engine import TreeEngine, machine_cost
from megatron_dta.engine.experts import RouterLosses
from megatron_dta.engine.flat import FlatEngine
from megatron_dta.engine.optimizer import Optimizer, make_optimizer
from megatron_dta.errors import UsageError
from megatron_dta.mcore.gradients import Gradients
from megatron_dta.mcore.model import TreeModel
from megatron_dta.processes import Processes, joined
from megatron_dta.progress import TrainProgress, only_rank, peak_memory_gib, say
from megatron_dta.rl import objectives
from megatron_dta.rl.terms import Objective
from megatron_dta.tree.cost import open_cost
from megatron_dta.tree.plan import StageProgram
from megatron_dta.tree.planner import Settings


def train(config: Config) -> list[dict[str, Any]]:
    """Run a training job; return its records, one per update, as rank 0 writes them to metrics.jsonl."""
    with joined(config.parallel) as processes:
        only_rank(processes.launch.rank)
        return _train(config, processes)


def _train(config: Config, processes: Processes) -> list[dict[str, Any]]:
    model, raw_config = open_model(
        hf_folder=config.model.hf_folder,
        hf_config=config.model.hf_config,
        dtype=config.model.dtype,
        seed=config.model.seed,
        recompute=config.engine.recompute,
        experts=config.moe.experts,
    )
    samples = read_rollouts(
        config.data.rollouts,
        form=config.data.form,
        limit=config.data.limit,
        truncate=config.data.truncate,
        mask=config.data.mask,
        vocab_size=model.model_config.vocab_size,
        on_warning=say,
    )
    rank, size = processes.launch.rank, processes.launch.size
    axes = config.parallel
    replicas, replica = axes.replicas(size), axes.replica_of(rank, size)
    engine = make_engine(model, config.engine, config.moe, config.rl.temperature)
    objective = make_objective(config.rl)
    check_all(engine, samples, objective)
    groups = group_samples(samples)
    per_epoch = -(-len(groups) // config.data.groups_per_step)
    steps = config.train.steps or per_epoch
    gradients = Gradients(model.parts, model.transformer, overlap=model.device.type == "cuda")
    optimizer = make_optimizer(
        gradients, config.optimizer, groups=model.groups, total_updates=steps * config.rl.inner_epochs
    )
    plane = ControlPlane(
        processes.communicator,
        processes.planner,
        settings_of(engine, replicas),
        replica_of=[axes.replica_of(process, size) for process in range(size)],
    )
    say(
        f"{len(samples)} samples in {len(groups)} groups; {steps} steps; {size} process(es), {replicas} replica(s) on "
        f"{axes.describe()}; {optimizer.name}; {describe(engine)}"
    )
    batches = shuffled_batches(groups, config.data.groups_per_step, config.data.shuffle_seed)
    records = []
    with (
        open_metrics(config.train.output if rank == 0 else None) as log,
        TrainProgress(steps * config.rl.inner_epochs) as progress,
    ):

        def hand_in() -> None:
            batch = next(batches)[replica::replicas]
            submit(plane, batch if plane.is_leader else [], objective)

        hand_in()
        for step in range(steps):
            share = plane.collect()
            if step + 1 < steps:
                hand_in()  # planned while this step trains
            for record in train_step(engine, gradients, optimizer, plane, share, objective, config.rl):
                record = {"step": step, "update": optimizer.num_updates, **record}
                records.append(record)
                log.write(json.dumps(record) + "\n")
                log.flush()
                progress.show(record)
    if config.train.output:
        folder = Path(config.train.output)
        save_hf(
            model, folder / "model", raw_config, source=config.model.hf_folder, communicator=processes.communicator
        )  # fmt: skip
        say(f"weights: {folder / 'model'}; metrics: {folder / 'metrics.jsonl'}")
    return records


def check_all(engine: TreeEngine | FlatEngine, samples: Sequence[Sample], objective: Objective) -> None:
    """Raise UsageError for a sample that some later step would refuse, before the first; on all ranks alike."""
    engine.check(samples)
    if objective.needs_advantages:
        sample_advantages(samples)
    if objective.needs_ref_logprobs:
        check_ref_logprobs(samples)


def submit(plane: ControlPlane, samples: Sequence[Sample], objective: Objective) -> None:
    """Hand in this rank's samples of the next batch, with advantages from the whole of their groups."""
    if objective.needs_advantages:
        outcomes, start = plane.outcomes(samples)
        own = sample_advantages(outcomes)[start : start + len(samples)]
        samples = [replace(s, advantage=a) if s.advantage is None else s for s, a in zip(samples, own)]
    plane.submit(samples)


def train_step(
    engine: TreeEngine | FlatEngine,
    gradients: Gradients,
    optimizer: Optimizer,
    plane: ControlPlane,
    share: Share,
    objective: Objective,
    rl: RLSection,
) -> Iterator[dict[str, Any]]:
    """Train `rl.inner_epochs` times on this rank's share of a batch; yield the whole step's record after each update.

    A batch without a trained token changes nothing: its record says `skipped`. With one inner epoch, rollouts without
    old log-probs are on-policy; with more, the policy before the first update is theirs.
    """
    start = time.perf_counter()
    plan = rank_plan(engine, share)
    samples = share.samples
    scope = Scope(num_terms=share.num_terms, num_trained=share.num_trained, num_tokens=share.num_tokens)
    waits = {"plan_seconds": share.plan_seconds, "plan_wait_seconds": share.wait_seconds}
    waits |= {"plan_build_seconds": time.perf_counter() - start, **predictions_of(share.forecast)}
    if rl.inner_epochs > 1 and objective.needs_advantages and share.num_without_old:
        start = time.perf_counter()
        samples = with_old_logprobs(engine, samples, plan)
        waits["sweep_seconds"] = time.perf_counter() - start
    for inner_epoch in range(rl.inner_epochs):
        start = time.perf_counter()
        gradients.begin()
        result = engine.train_batch(
            samples, objective, scope=scope, plan=plan, on_last_backward=gradients.last_backward
        )  # fmt: skip
        gradients.finish()
        update = optimizer.step() if scope.num_terms else {"skipped": True}
        parts = plane.gather_numbers(numbers_of(result, samples))
        yield {
            "inner_epoch": inner_epoch,
            **record_of(parts, [parts[leader] for leader in plane.leaders], scope, time.perf_counter() - start),
            **(waits if inner_epoch == 0 else {}),
            **update,
        }


def predictions_of(forecast: Forecast) -> dict[str, Any]:
    """Return what was predicted of a step: its time, how even ranks are, tokens that several of them compute."""
    return {
        "predicted_seconds": forecast.step_seconds,
        "predicted_imbalance": forecast.imbalance,
        "copied_tokens": sum(forecast.rank_tokens) - forecast.tree_tokens,
    }


def rank_plan(engine: TreeEngine | FlatEngine, share: Share) -> StageProgram | None:
    """Build what this process runs of its replica's share; the flat engine has no plan."""
    return None if isinstance(engine, FlatEngine) else engine.program(share.task, share.samples)


def with_old_logprobs(
    engine: TreeEngine | FlatEngine, samples: list[Sample], plan: StageProgram | None = None
) -> list[Sample]:  # fmt: skip
    """Fill in missing old log-probs from the policy as it is now.

    A rank whose samples have them all sweeps with the others, which may wait for it inside the model.
    """
    swept = engine.forward_batch(samples, plan=plan)
    return [replace(s, old_logprobs=new) if s.old_logprobs is None else s for s, new in zip(samples, swept)]


def numbers_of(result: StepResult, samples: Sequence[Sample]) -> dict[str, Any]:
    """Return what one process's part of a step adds to its record."""
    rewards = [float(s.reward) for s in samples if s.reward is not None]
    response = [int(s.loss_mask.sum()) for s in samples]
    return {
        "totals": result.totals,
        "router_losses": result.router_losses,
        "reward_sum": sum(rewards),
        "num_rewards": len(rewards),
        "num_samples": len(samples),
        "response_tokens": sum(response),
        "response_tokens_max": max(response, default=0),
        "sequence_tokens": result.sequence_tokens,
        "executed_tokens": result.executed_tokens,
        "pushed_tokens": result.pushed_tokens,
        "memory_gib": peak_memory_gib(),
    }


def record_of(
    parts: Sequence[dict[str, Any]], leaders: Sequence[dict[str, Any]], scope: Scope, seconds: float
) -> dict[str, Any]:
    """Return what users watch of one pass over a batch: sums over terms from all processes, counts from the leaders."""

    def total(name: str) -> Any:
        return sum(part[name] for part in leaders)

    rewards, executed = total("num_rewards"), total("executed_tokens")
    return {
        **merged_metrics([part["totals"] for part in parts], scope.num_terms),
        **summed([part["router_losses"] for part in parts]),
        **({"reward": total("reward_sum") / rewards} if rewards else {}),
        "num_samples": total("num_samples"),
        "trained_tokens": scope.num_terms,
        "response_tokens_mean": total("response_tokens") / max(total("num_samples"), 1),
        "response_tokens_max": max(part["response_tokens_max"] for part in parts),
        "sequence_tokens": total("sequence_tokens"),
        "executed_tokens": executed,
        "pushed_tokens": total("pushed_tokens"),
        "reuse": total("sequence_tokens") / max(executed, 1),
        "seconds": seconds,
        "sequence_tokens_per_second": total("sequence_tokens") / seconds,
        "tree_tokens_per_second": executed / seconds,
        "memory_gib": max(part["memory_gib"] for part in parts),
    }


def summed(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """Add up what parts have under the same name."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: sum(part.get(name, 0.0) for part in parts) for name in names}


def settings_of(engine: TreeEngine | FlatEngine, ranks: int) -> Settings:
    """Return what plans for this engine have to fit, on `ranks` data-parallel ranks."""
    if isinstance(engine, TreeEngine):
        return replace(engine.settings, ranks=ranks, together=engine.model.axes.together)
    return Settings(cost=machine_cost(engine.model), ranks=ranks)


def make_engine(
    model: TreeModel, engine: EngineSection, moe: MoeSection, temperature: float
) -> TreeEngine | FlatEngine:  # fmt: skip
    """Build the engine that a config names."""
    losses = RouterLosses(aux_coef=moe.aux_loss_coef, z_coef=moe.z_loss_coef)
    if engine.mode == "flat":
        return FlatEngine(model, temperature=temperature, router_losses=losses)
    return TreeEngine(
        model,
        router_losses=losses,
        budget=engine.budget,
        multiple=engine.padding,
        backend=engine.attention,
        temperature=temperature,
        cost=open_cost(engine.cost_model, model.model_config) if engine.cost_model else None,
        state_limit=engine.state_limit,
    )


def describe(engine: TreeEngine | FlatEngine) -> str:
    """Say in one line what runs."""
    if isinstance(engine, FlatEngine):
        return "tree mode OFF: every sequence alone, stock causal attention"
    return f"tree mode ON: attention by {type(engine.backend).__name__}, {engine.budget} tokens a chunk"


def make_objective(rl: RLSection) -> Objective:
    """Build the objective that a config names."""
    if rl.objective == "sft":
        return objectives.sft(normalizer=rl.normalizer)
    return objectives.grpo(clip_low=rl.clip_low, clip_high=rl.clip_high, kl_coef=rl.kl_coef, normalizer=rl.normalizer)


def group_samples(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Return the samples of every group, groups by first appearance."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group_id, []).append(sample)
    return list(groups.values())


def shuffled_batches(groups: list[list[Sample]], per_step: int, seed: int) -> Iterator[list[Sample]]:
    """Yield batches for ever: every epoch all groups once, in an order drawn from seed and epoch."""
    epoch = 0
    while True:
        order = np.random.default_rng([seed, epoch]).permutation(len(groups))
        for start in range(0, len(groups), per_step):
            yield [sample for g in order[start : start + per_step] for sample in groups[g]]
        epoch += 1


def open_metrics(output: str | None) -> IO[str]:
    """Open metrics.jsonl in the output folder, or a sink."""
    if output is None:
        return open("/dev/null", "w")
    try:
        Path(output).mkdir(parents=True, exist_ok=True)
        return (Path(output) / "metrics.jsonl").open("w")
    except OSError as error:
        raise UsageError(f"train.output {output}: cannot write there ({error.strerror})") from None
