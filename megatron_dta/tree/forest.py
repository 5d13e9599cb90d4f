"""The forest: all prefix trees of a batch, as flat arrays in preorder.

Shapes: T tree tokens, S sequences, M terms, E loss-bearing edges. An edge is named by its target token: every tree
token but a root has exactly one incoming edge, from its parent.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True, kw_only=True, eq=False)
class Forest:
    """Compressed tries of the sequences' token ids; tokens numbered depth-first, so every subtree is a range."""

    sequences: tuple[np.ndarray, ...]
    """The caller's token ids of each sequence, [S]: not copied."""
    tokens: np.ndarray
    """int32 [T]: the id of each tree token."""
    depth: np.ndarray
    """int32 [T]: position on its path, which is the rotary position."""
    parent: np.ndarray
    """int32 [T]: the tree token before it on its path, -1 for a root."""
    subtree_end: np.ndarray
    """int32 [T]: one past the last token of the token's subtree."""
    sequence_end: np.ndarray
    """int32 [S]: the tree token of each sequence's last token, in the caller's order."""
    lengths: np.ndarray
    """int64 [S]: tokens of each sequence."""
    term_sequence: np.ndarray
    """int32 [M]: which sequence the term belongs to; terms are ordered by sequence, then position."""
    term_position: np.ndarray
    """int32 [M]: position of the predicted token in its sequence (never 0)."""
    term_target: np.ndarray
    """int32 [M]: the tree token that is predicted."""
    trained: np.ndarray
    """bool [T]: the token is the target of a loss-bearing edge."""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    @cached_property
    def edges(self) -> np.ndarray:
        """Targets of the loss-bearing edges, int32 [E], increasing."""
        return np.flatnonzero(self.trained).astype(np.int32)

    @cached_property
    def term_edge(self) -> np.ndarray:
        """Index into `edges` of every term, int64 [M]."""
        return np.searchsorted(self.edges, self.term_target)

    @cached_property
    def segment_start(self) -> np.ndarray:
        """First tree token of every segment, int32: a token starts one unless it is its parent's only child."""
        inner = self.parent >= 0
        num_children = np.bincount(self.parent[inner], minlength=self.num_tokens)
        starts = ~inner
        starts[inner] = num_children[self.parent[inner]] != 1
        return np.flatnonzero(starts).astype(np.int32)

    @cached_property
    def multiplicity(self) -> np.ndarray:
        """How many sequences hold each token, int64 [T]: those that end in its subtree."""
        ends = np.cumsum(np.bincount(self.sequence_end, minlength=self.num_tokens))
        before = np.concatenate([[0], ends])
        return before[self.subtree_end] - before[:-1]

    def path(self, sequence: int) -> np.ndarray:
        """Return the tree token of every position of one sequence, int64 [length]."""
        last = self.sequence_end[sequence]
        return np.flatnonzero(self.subtree_end[: last + 1] > last)


def build_forest(
    tokens: Sequence[np.ndarray],
    loss_masks: Sequence[np.ndarray] | None = None,
    identities: Sequence[np.ndarray | None] | None = None,
    *,
    parts: np.ndarray | None = None,
) -> Forest:
    """Merge sequences into prefix trees by their ids, and by their identity tags where given.

    tokens: integer arrays [L]; loss_masks: bool arrays [L] (entry t: the prediction of token t; entry 0 has no source
    and makes no term); identities: integer arrays [L] or None per sequence; parts: int [S], sequences of different
    parts share nothing, and trees are ordered by part. Two tokens are merged only if ids and tags agree on the whole
    path. Raises ValueError for an empty sequence, arrays of different lengths, and ids or tags that are not integers
    of their range.
    """
    runs = Runs(len(tokens))
    path = np.zeros(max((len(t) for t in tokens), default=0), np.int32)
    targets: list[np.ndarray] = [_NONE] * len(tokens)
    positions: list[np.ndarray] = [_NONE] * len(tokens)
    trained = np.zeros(sum(len(t) for t in tokens), bool)
    for i, shared in sorted_sequences(tokens, loss_masks, identities, parts):
        length = len(tokens[i])
        runs.add(i, shared, length, int(path[shared - 1]) if shared else -1)
        path[shared:length] = np.arange(runs.start[-1], runs.num_tokens, dtype=np.int32)
        runs.sequence_end[i] = path[length - 1]
        if loss_masks is not None:
            position = np.flatnonzero(loss_masks[i][1:]).astype(np.int32) + 1
            target = path[position]
            trained[target] = True
            positions[i], targets[i] = position, target
    return Forest(
        sequences=tuple(tokens),
        tokens=_concatenate([tokens[i][shared:] for i, shared in zip(runs.sequence, runs.shared)]),
        **runs.arrays(),
        sequence_end=runs.sequence_end,
        lengths=np.array([len(t) for t in tokens], np.int64),
        term_sequence=np.repeat(np.arange(len(tokens), dtype=np.int32), [len(p) for p in positions]),
        term_position=_concatenate(positions),
        term_target=_concatenate(targets),
        trained=trained[: runs.num_tokens].copy(),
    )


def sorted_sequences(tokens, loss_masks, identities, parts) -> Iterator[tuple[int, int]]:
    """Check the arguments of `build_forest`; yield (sequence, length of the prefix it shares with the one before).

    Sequences come by part, then by ids word by word, a prefix before what extends it, equal ones by number.
    """
    _check(tokens, loss_masks, identities, parts)
    words = [_words(t, tag) for t, tag in zip(tokens, _tags(tokens, identities))]
    part = np.zeros(len(tokens), np.int64) if parts is None else parts
    previous = _NONE
    for label in np.unique(part).tolist():
        previous = _NONE
        for i in _in_order(words, np.flatnonzero(part == label).tolist()):
            yield i, _common_prefix(previous, words[i])
            previous = words[i]


def _in_order(words: list[np.ndarray], sequences: list[int]) -> Iterator[int]:
    """Sort by blocks of words: only sequences that agree so far are compared further, so tails are never copied."""
    waiting = [(0, sequences)]
    while waiting:
        start, group = waiting.pop()
        if len(group) == 1:
            yield group[0]
            continue
        stop = max(2 * start, _BLOCK)
        by_key: dict[bytes, list[int]] = {}
        for i in group:
            by_key.setdefault(_sort_key(words[i][start:stop]), []).append(i)
        if len(by_key) == 1 and all(len(words[i]) < stop for i in group):
            yield from group
        else:
            waiting += [(_next(words, alike, start, stop), alike) for _, alike in sorted(by_key.items(), reverse=True)]


def _next(words, alike: list[int], start: int, stop: int) -> int:
    """Return where to go on comparing sequences that agree on words start .. stop; those that ended there are equal."""
    return stop if len(words[alike[0]]) >= stop else start


_NONE = np.zeros(0, np.int32)
_BLOCK = 256
_LARGEST_ID = 2**31 - 1


class Runs:
    """The new suffix that each sequence adds to the forest, in sorted order."""

    def __init__(self, num_sequences: int):
        self.sequence: list[int] = []
        self.start: list[int] = []
        self.shared: list[int] = []
        self.parent: list[int] = []
        self.num_tokens = 0
        self.sequence_end = np.zeros(num_sequences, np.int32)

    def add(self, sequence: int, shared: int, length: int, parent: int) -> None:
        self.sequence.append(sequence)
        self.start.append(self.num_tokens)
        self.shared.append(shared)
        self.parent.append(parent)
        self.num_tokens += length - shared

    def arrays(self) -> dict[str, np.ndarray]:
        start = np.array([*self.start, self.num_tokens], np.int64)
        new = np.diff(start)
        depth = np.arange(self.num_tokens) + np.repeat(np.array(self.shared, np.int64) - start[:-1], new)
        parent = np.arange(-1, self.num_tokens - 1)
        parent[start[:-1][new > 0]] = np.array(self.parent, np.int64)[new > 0]
        return {
            "depth": depth.astype(np.int32),
            "parent": parent.astype(np.int32),
            "subtree_end": self._subtree_end(start),
        }

    def _subtree_end(self, start: np.ndarray) -> np.ndarray:
        """Close every token at the first later run that branches off at its depth or above.

        Runs are walked from the last to the first; `open_` holds, nearest on top, the later runs that still close
        something (their shared lengths decrease from top to bottom). Every entry is popped once: linear in all.
        """
        end = np.full(self.num_tokens, self.num_tokens, np.int32)
        open_: list[tuple[int, int]] = []
        for k in range(len(self.start) - 1, -1, -1):
            base, first = self.shared[k], int(start[k])
            upper = base + int(start[k + 1]) - first
            while open_ and open_[-1][0] >= base:
                shared, closes = open_.pop()
                if shared < upper:
                    end[first + shared - base : first + upper - base] = closes
                    upper = shared
            if open_:
                end[first : first + upper - base] = open_[-1][1]
            open_.append((base, first))
        return end


def _check(tokens, loss_masks, identities, parts) -> None:
    if parts is not None and parts.shape != (len(tokens),):
        raise ValueError(f"parts has shape {parts.shape}; expected ({len(tokens)},)")
    for name, arrays in (("loss_masks", loss_masks), ("identities", identities)):
        if arrays is None:
            continue
        if len(arrays) != len(tokens):
            raise ValueError(f"{name} has {len(arrays)} entries for {len(tokens)} sequences")
        for i, (a, t) in enumerate(zip(arrays, tokens)):
            if a is not None and len(a) != len(t):
                raise ValueError(f"{name}[{i}] has length {len(a)}; sequence {i} has {len(t)} tokens")
    for i, t in enumerate(tokens):
        if len(t) == 0:
            raise ValueError(f"sequence {i} is empty; a sequence has at least one token")
        if t.dtype.kind not in "iu" or t.min() < 0 or t.max() > _LARGEST_ID:
            raise ValueError(f"sequence {i} has dtype {t.dtype}; expected integer ids from 0 to {_LARGEST_ID}")
    for i, tag in enumerate(identities or ()):
        if tag is not None and tag.dtype.kind not in "iu":
            raise ValueError(f"identities[{i}] has dtype {tag.dtype}; expected integers")


def _tags(tokens, identities) -> Sequence[np.ndarray | None]:
    """Give untagged sequences tag 0 everywhere as soon as one sequence has tags."""
    if identities is None or all(tag is None for tag in identities):
        return [None] * len(tokens)
    return [np.zeros(len(t), np.int64) if tag is None else tag for t, tag in zip(tokens, identities)]


def _words(tokens: np.ndarray, tag: np.ndarray | None) -> np.ndarray:
    """One comparable word per token: int32 [L], or int64 [L, 2] with its tag."""
    if tag is None:
        return np.asarray(tokens, np.int32)
    return np.stack([np.asarray(tokens, np.int64), np.asarray(tag, np.int64)], axis=1)


def _sort_key(words: np.ndarray) -> bytes:
    """Big-endian bytes: they compare as the words do."""
    return words.astype(">u4" if words.ndim == 1 else ">u8").tobytes()


def _common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    if n == 0:
        return 0
    differs = a[:n] != b[:n]
    if differs.ndim == 2:
        differs = differs.any(axis=1)
    first = int(differs.argmax())
    return first if differs[first] else n


def _concatenate(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays).astype(np.int32) if arrays else _NONE
