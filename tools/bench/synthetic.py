"""Synthetic batches for what recordings do not have: groups of very unequal size, and very many sequences."""

from dataclasses import dataclass

import numpy as np

VOCAB = 150_000


@dataclass(frozen=True, kw_only=True, eq=False)
class Sequences:
    """Sequences as `build_outline` and `build_forest` take them."""

    tokens: list[np.ndarray]
    """int32 [L] each."""
    loss_masks: list[np.ndarray]
    """bool [L] each: the last part of every sequence, its own or its branch's."""


def skewed(num_sequences: int, seed: int) -> Sequences:
    """Draw groups of Zipf-like sizes; a few hundred tokens shared by all, by a group, and by branches of two depths.

    The largest of about n / 8 groups has a quarter of the sequences. Lengths are log-normal; sequences are shuffled.
    """
    rng = np.random.default_rng(seed)
    num_groups = -(-num_sequences // 8)
    weight = 1.0 / np.arange(1, num_groups + 1) ** 1.2
    group = rng.choice(num_groups, num_sequences, p=weight / weight.sum())
    branch = rng.integers(0, 1 + np.bincount(group, minlength=num_groups)[group] // 6)
    twig = rng.integers(0, 2, num_sequences)
    prefixes: dict[tuple[int, ...], np.ndarray] = {(): _run(rng, 300, 0)}
    tokens, masks = [], []
    for names in zip(group.tolist(), branch.tolist(), twig.tolist()):
        for depth, median in enumerate((400, 300, 200), 1):
            if names[:depth] not in prefixes:
                prefixes[names[:depth]] = np.concatenate([prefixes[names[: depth - 1]], _run(rng, median, 0.8)])
        tail = _run(rng, 500, 1.0)
        tokens.append(np.concatenate([prefixes[names], tail]))
        masks.append(np.arange(len(tokens[-1])) >= len(prefixes[names]))
    return Sequences(tokens=tokens, loss_masks=masks)


def _run(rng: np.random.Generator, median: int, sigma: float) -> np.ndarray:
    length = int(np.clip(rng.lognormal(np.log(median), sigma), 1, 12 * median))
    return rng.integers(0, VOCAB, length, np.int32)


SHARED_BY = (512, 64, 8, 1)


def levels(num_sequences: int, length: int, seed: int) -> Sequences:
    """Draw sequences of equal length: a fifth shared by all, then by each 512, 64 and 8 of them, then their own.

    Arrays are views of one matrix, so that the batch takes 4 bytes a token.
    """
    rng = np.random.default_rng(seed)
    tokens = np.empty((num_sequences, length), np.int32)
    ends = np.linspace(0, length, len(SHARED_BY) + 2).astype(int).tolist()
    tokens[:, : ends[1]] = rng.integers(0, VOCAB, ends[1], np.int32)
    for start, end, shared_by in zip(ends[1:], ends[2:], SHARED_BY):
        own = rng.integers(0, VOCAB, (-(-num_sequences // shared_by), end - start), np.int32)
        for at in range(shared_by):  # member by member: no copy of the whole level
            members = tokens[at::shared_by, start:end]
            members[:] = own[: len(members)]
    mask = np.arange(length) >= ends[-2]
    return Sequences(tokens=list(tokens), loss_masks=[mask] * num_sequences)
