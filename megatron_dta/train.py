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
from megatron_dta.config import Config, EngineSection, RLSection
from megatron_dta.data.rollouts import read_rollouts
from megatron_dta.data.samples import Sample
from megatron_dta.engine.engine import FlatEngine, StepResult, TreeEngine
from megatron_dta.engine.optimizer import MasterAdamW
from megatron_dta.errors import UsageError
from megatron_dta.mcore.model import TreeModel
from megatron_dta.progress import TrainProgress, peak_memory_gib, say
from megatron_dta.rl import objectives
from megatron_dta.rl.terms import Objective


def train(config: Config) -> list[dict[str, Any]]:
    """Run a training job; return its records, one per update, as written to metrics.jsonl."""
    model, raw_config = open_model(
        hf_folder=config.model.hf_folder,
        hf_config=config.model.hf_config,
        dtype=config.model.dtype,
        seed=config.model.seed,
        recompute=config.engine.recompute,
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
    engine = make_engine(model, config.engine, config.rl.temperature)
    objective = make_objective(config.rl)
    groups = group_samples(samples)
    per_epoch = -(-len(groups) // config.data.groups_per_step)
    steps = config.train.steps or per_epoch
    optimizer = MasterAdamW(model, config.optimizer, total_updates=steps * config.rl.inner_epochs)
    say(f"{len(samples)} samples in {len(groups)} groups; {steps} steps; {describe(engine)}")
    batches = shuffled_batches(groups, config.data.groups_per_step, config.data.shuffle_seed)
    records = []
    with open_metrics(config.train.output) as log, TrainProgress(steps * config.rl.inner_epochs) as progress:
        for step in range(steps):
            for record in train_step(engine, optimizer, next(batches), objective, config.rl):
                record = {"step": step, "update": optimizer.num_updates, **record}
                records.append(record)
                log.write(json.dumps(record) + "\n")
                log.flush()
                progress.show(record)
    if config.train.output:
        save_hf(model, Path(config.train.output) / "model", raw_config, source=config.model.hf_folder)
        say(f"weights: {Path(config.train.output) / 'model'}; metrics: {Path(config.train.output) / 'metrics.jsonl'}")
    return records


def train_step(
    engine: TreeEngine | FlatEngine, optimizer: MasterAdamW, samples: list[Sample], objective: Objective, rl: RLSection
) -> Iterator[dict[str, Any]]:
    """Train `rl.inner_epochs` times on one batch; yield a record after each update.

    A batch without a trained token changes nothing: its record says `skipped`. With one inner epoch, rollouts without
    old log-probs are on-policy; with more, the policy before the first update is theirs.
    """
    if rl.inner_epochs > 1 and objective.needs_advantages:
        samples = with_old_logprobs(engine, samples)
    for inner_epoch in range(rl.inner_epochs):
        start = time.perf_counter()
        result = engine.train_batch(samples, objective)
        update = optimizer.step() if result.num_terms else {"skipped": True}
        yield {"inner_epoch": inner_epoch, **record_of(result, samples, time.perf_counter() - start), **update}


def with_old_logprobs(engine: TreeEngine | FlatEngine, samples: list[Sample]) -> list[Sample]:
    """Fill in missing old log-probs from the policy as it is now."""
    if all(s.old_logprobs is not None for s in samples):
        return samples
    swept = engine.forward_batch(samples)
    return [replace(s, old_logprobs=new) if s.old_logprobs is None else s for s, new in zip(samples, swept)]


def record_of(result: StepResult, samples: Sequence[Sample], seconds: float) -> dict[str, Any]:
    """Return what users watch of one pass, as plain numbers."""
    rewards = [s.reward for s in samples if s.reward is not None]
    response = [int(s.loss_mask.sum()) for s in samples]
    return {
        **result.metrics,
        **({"reward": float(np.mean(rewards))} if rewards else {}),
        "num_samples": len(samples),
        "trained_tokens": result.num_terms,
        "response_tokens_mean": float(np.mean(response)),
        "response_tokens_max": max(response),
        "sequence_tokens": result.sequence_tokens,
        "executed_tokens": result.executed_tokens,
        "pushed_tokens": result.pushed_tokens,
        "reuse": result.sequence_tokens / max(result.executed_tokens, 1),
        "seconds": seconds,
        "sequence_tokens_per_second": result.sequence_tokens / seconds,
        "tree_tokens_per_second": result.executed_tokens / seconds,
        "memory_gib": peak_memory_gib(),
    }


def make_engine(model: TreeModel, engine: EngineSection, temperature: float) -> TreeEngine | FlatEngine:
    """Build the engine that a config names."""
    if engine.mode == "flat":
        return FlatEngine(model, temperature=temperature)
    return TreeEngine(
        model, budget=engine.budget, multiple=engine.padding, backend=engine.attention, temperature=temperature
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
