"""The main job from start to end on a laptop: a real on-policy loop, trained on prefix trees.

A tiny Qwen3-shaped model over characters learns reasoning-gym's `spell_backward` ("spell this word backward") a little
by supervised fine-tuning, stopped early on purpose, then from the verifier alone, by GRPO: groups of completions are
sampled from the current policy with Hugging Face `generate`, rewarded by the task's own verifier, and trained as
forests. Nothing is recorded beforehand.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import reasoning_gym
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from megatron_dta.checkpoint.hf_files import hf_state, save_hf
from megatron_dta.config import OptimizerSection
from megatron_dta.data.rollouts import write_jsonl
from megatron_dta.data.samples import Sample
from megatron_dta.engine.engine import TreeEngine
from megatron_dta.engine.optimizer import MasterAdamW
from megatron_dta.mcore import parallel
from megatron_dta.mcore.model import build_model
from megatron_dta.model_config import parse_model_config
from megatron_dta.progress import say
from megatron_dta.rl import objectives

PAD, EOS = 0, 1
CHARACTERS = [chr(c) for c in range(32, 127)] + ["\n"]
ID_OF = {character: i + 2 for i, character in enumerate(CHARACTERS)}
LONGEST_WORD = 10
MODEL: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": len(CHARACTERS) + 2,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}


class Task:
    """Words to spell backward, in three disjoint parts: train, dev (decides when the warm start ends), held out."""

    def __init__(self, num_held_out: int, num_dev: int, num_train: int = 50_000):
        self.train = self._words(10_000_000, num_train)
        kept: dict[str, dict] = {}
        for entry in self._words(1234, 4 * (num_held_out + num_dev)):
            kept.setdefault(entry["answer"].lower(), entry)
        words = list(kept.values())
        self.held_out, self.dev = words[:num_held_out], words[num_held_out : num_held_out + num_dev]
        tested = {entry["answer"].lower() for entry in self.held_out + self.dev}
        self.train_entries = [entry for entry in self.train if entry["answer"].lower() not in tested]

    @staticmethod
    def _words(seed: int, size: int):
        options = {"min_word_len": 3, "max_word_len": LONGEST_WORD}
        return reasoning_gym.create_dataset("spell_backward", seed=seed, size=size, **options)

    def reward(self, completion: Sequence[int], entry: dict) -> float:
        """Return 1 for the verifier's full score; a completion without an end counts as wrong."""
        if not completion or completion[-1] != EOS:
            return 0.0
        return float(self.train.score_answer(decode(completion[:-1]), entry) == 1.0)


def encode(text: str) -> list[int]:
    return [ID_OF[character] for character in text]


def decode(ids: Sequence[int]) -> str:
    return "".join(CHARACTERS[i - 2] if i >= 2 else "\0" for i in ids)  # a sampled PAD must not vanish


def prompt_of(entry: dict) -> list[int]:
    return encode(entry["question"] + "\n")


def sample_of(entry: dict, completion: Sequence[int], name: str, group: str, reward: float | None = None) -> Sample:
    """Make a training sample: unpadded ids, loss on the completion."""
    prompt = prompt_of(entry)
    mask = np.zeros(len(prompt) + len(completion), bool)
    mask[len(prompt) :] = True
    tokens = np.array([*prompt, *completion], np.int32)
    return Sample(
        sample_id=name, group_id=group, trajectory_id=name, tokens=tokens, loss_mask=mask, reward=reward
    )  # fmt: skip


class Sampler:
    """Hugging Face `generate` on the weights that the trained model exports."""

    def __init__(self):
        self.model = Qwen3ForCausalLM(Qwen3Config(**MODEL)).eval()

    def take_over(self, model) -> None:
        """Load the current policy, under its Hugging Face names."""
        self.model.load_state_dict(hf_state(model), strict=False)
        self.model.tie_weights()

    @torch.no_grad()
    def complete(self, prompts: list[list[int]], per_prompt: int = 1) -> list[list[int]]:
        """Draw completions at temperature 1, `per_prompt` in a row for each prompt, cut after the end token."""
        width = max(map(len, prompts))
        ids = torch.tensor([[PAD] * (width - len(p)) + p for p in prompts])
        config = GenerationConfig(
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, num_return_sequences=per_prompt,
            max_new_tokens=LONGEST_WORD + 2, pad_token_id=PAD, eos_token_id=EOS,
        )  # fmt: skip
        out = self.model.generate(input_ids=ids, attention_mask=(ids != PAD).long(), generation_config=config)
        rows = out[:, width:].tolist()
        return [row[: row.index(EOS) + 1] if EOS in row else row for row in rows]


def evaluate(sampler: Sampler, task: Task, entries: list[dict], seed: int = 99) -> np.ndarray:
    """Return the reward of one sampled completion per entry; the training's random state stays as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        completions: list[list[int]] = []
        for start in range(0, len(entries), 128):
            completions += sampler.complete([prompt_of(e) for e in entries[start : start + 128]])
    return np.array([task.reward(c, e) for c, e in zip(completions, entries)])


def warm_start(engine: TreeEngine, sampler: Sampler, task: Task, args: argparse.Namespace) -> int:
    """Fine-tune on correct answers until the dev reward reaches the target; return the number of updates."""
    config = OptimizerSection(lr=5e-3, warmup_updates=50, weight_decay=0.0, betas=(0.9, 0.98))
    optimizer = MasterAdamW(engine.model, config, total_updates=args.sft_steps)
    order = np.random.default_rng(args.seed + 1).permutation(len(task.train_entries))
    objective = objectives.sft()
    for step in track(range(args.sft_steps), "SFT ", console=Console(stderr=True)):
        entries = [task.train_entries[i] for i in order[np.arange(step * 32, (step + 1) * 32) % len(order)]]
        samples = [sample_of(e, [*encode(e["answer"]), EOS], str(i), str(i)) for i, e in enumerate(entries)]
        loss = engine.train_batch(samples, objective).metrics["loss"]
        optimizer.step()
        if step % 5 == 4 and loss < 0.6:
            sampler.take_over(engine.model)
            if evaluate(sampler, task, task.dev, seed=7).mean() >= args.sft_target:
                break
    optimizer.release()
    return optimizer.num_updates


@dataclass(frozen=True, kw_only=True)
class Update:
    """One update of the policy."""

    reward: float
    sequence_tokens: int
    executed_tokens: int
    samples: list[Sample]


def reinforce(engine: TreeEngine, sampler: Sampler, task: Task, args: argparse.Namespace) -> Iterator[Update]:
    """Sample, reward, train: on-policy, one update a batch."""
    config = OptimizerSection(lr=2e-4, warmup_updates=5, weight_decay=0.0)
    optimizer = MasterAdamW(engine.model, config, total_updates=args.grpo_steps)
    rng, objective = np.random.default_rng(args.seed + 2), objectives.grpo()
    torch.manual_seed(args.seed + 3)
    for step in range(args.grpo_steps):
        entries = [task.train_entries[i] for i in rng.integers(len(task.train_entries), size=16)]
        sampler.take_over(engine.model)
        completions = sampler.complete([prompt_of(e) for e in entries], per_prompt=args.group)
        samples = []
        for i, completion in enumerate(completions):
            entry, group = entries[i // args.group], f"{step}/{i // args.group}"
            reward = task.reward(completion, entry)
            samples.append(sample_of(entry, completion, f"{group}/{i % args.group}", group, reward))
        result = engine.train_batch(samples, objective)
        optimizer.step()
        yield Update(
            reward=float(np.mean([s.reward for s in samples])),
            sequence_tokens=result.sequence_tokens,
            executed_tokens=result.executed_tokens,
            samples=samples,
        )


def draw(rewards: Sequence[float], before: float, after: float, path: Path) -> None:
    """Write the reward curve as a picture."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(rewards, color="0.7", label="training batch")
    window = min(10, len(rewards))
    smooth = np.convolve(rewards, np.ones(window) / window, mode="valid")
    axes.plot(np.arange(window - 1, len(rewards)), smooth, color="C0", label=f"mean of {window}")
    axes.axhline(before, color="C1", linestyle="--", label="held out, after SFT")
    axes.axhline(after, color="C2", linestyle="--", label="held out, after GRPO")
    axes.set(xlabel="GRPO update", ylabel="reward", title="spell_backward, trained on prefix trees", ylim=(0, 1))
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def report(before: np.ndarray, after: np.ndarray, updates: list[Update], seconds: float, output: Path) -> None:
    """Print what happened and where to go next."""
    gain, deviation = after.mean() - before.mean(), np.sqrt(before.var(ddof=1) + after.var(ddof=1))
    error = deviation / np.sqrt(len(before))
    sequence, executed = (sum(getattr(u, n) for u in updates) for n in ("sequence_tokens", "executed_tokens"))
    table = Table(title="spell_backward: on-policy GRPO on prefix trees", show_header=False)
    table.add_row(f"held-out reward after SFT ({len(before)} words)", f"{before.mean():.3f}")
    table.add_row("held-out reward after GRPO", f"{after.mean():.3f}")
    table.add_row("gain", f"{gain:+.3f} = {gain / max(error, 1e-9):.1f} standard errors ({error:.3f})")
    table.add_row("tokens: rollouts -> computed", f"{sequence:,} -> {executed:,} ({sequence / executed:.1f}x saved)")
    table.add_row("seconds", f"{seconds:.0f}")
    Console().print(table)
    say(f"curve: {output}/reward.png; weights: {output}/model; last batch: {output}/rollouts.jsonl. Next:")
    python = Path(sys.executable)
    python = python.relative_to(Path.cwd()) if python.is_relative_to(Path.cwd()) else python
    for command in (
        f"plan {output}/rollouts.jsonl                            # what trees save on your rollouts",
        f"verify {output}/rollouts.jsonl --model {output}/model --dtype fp64  # is it exact?",
        f"train configs/demo_grpo.toml data.rollouts={output}/rollouts.jsonl model.hf_folder={output}/model",
    ):
        say(f"  {python} -m megatron_dta {command}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--group", type=int, default=8, help="completions per prompt")
    parser.add_argument("--sft-steps", type=int, default=1000, help="at most; ends at --sft-target")
    parser.add_argument("--sft-target", type=float, default=0.25, help="dev reward that ends the warm start")
    parser.add_argument("--grpo-steps", type=int, default=150)
    parser.add_argument("--held-out", type=int, default=384, help="words that nothing was trained on")
    parser.add_argument("--output", type=Path, default=Path("outputs/demo"))
    args = parser.parse_args(argv)
    start = time.perf_counter()
    task, device = Task(args.held_out, num_dev=256), parallel.initialize(seed=args.seed)
    model = build_model(parse_model_config(MODEL), dtype=torch.float32, device=device, seed=args.seed)
    engine = TreeEngine(model)
    sampler = Sampler()
    say(f"{len(task.train_entries):,} words to train on, {len(task.held_out)} held out; tree mode ON")
    steps = warm_start(engine, sampler, task, args)
    sampler.take_over(engine.model)
    before = evaluate(sampler, task, task.held_out)
    say(f"warm start: {steps} updates, held-out reward {before.mean():.3f}")
    progress = track(reinforce(engine, sampler, task, args), "GRPO", args.grpo_steps, console=Console(stderr=True))
    updates = []
    for update in progress:
        updates.append(update)
        if len(updates) % 10 == 0:
            reuse = update.sequence_tokens / update.executed_tokens
            say(f"update {len(updates)}: reward {np.mean([u.reward for u in updates[-10:]]):.3f}, reuse {reuse:.1f}x")
    args.output.mkdir(parents=True, exist_ok=True)
    save_hf(engine.model, args.output / "model", MODEL)
    write_jsonl(args.output / "rollouts.jsonl", updates[-1].samples)
    sampler.model = Qwen3ForCausalLM.from_pretrained(args.output / "model").eval()
    after = evaluate(sampler, task, task.held_out)
    (args.output / "rewards.json").write_text(json.dumps([u.reward for u in updates]) + "\n")
    draw([u.reward for u in updates], before.mean(), after.mean(), args.output / "reward.png")
    report(before, after, updates, time.perf_counter() - start, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
