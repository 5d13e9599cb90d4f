"""The plan of one rank: which calls of the model run, in which order, and every array they need.

Shapes: T tree tokens, R rows of a call (its tokens, then padding), C context rows, E edges and M terms of a chunk.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from megatron_dta.tree.forest import Forest


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """What every forward of the model needs: tokens, their context, and who sees whom."""

    tokens: np.ndarray
    """int32 [n]: tree tokens, increasing; rows n .. size are padding."""
    size: int
    """R: rows that run, a multiple of the padding."""
    context: np.ndarray
    """int32 [C]: ancestors whose states are read from the cache, increasing tree tokens."""
    context_state: np.ndarray
    """int32 [C]: their rows in the state cache."""
    visible_from: np.ndarray
    """int32 [C + R]: key j (context, then own rows) is visible to query row i iff from[j] <= i < to[j]."""
    visible_to: np.ndarray
    """int32 [C + R]."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Push(Call):
    """A forward without gradient that stores the states of its tokens."""

    store_state: np.ndarray
    """int32 [n]: rows of the state cache to write."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Chunk(Call):
    """A forward with gradient and its backward."""

    context_grad: np.ndarray
    """int32 [C]: accumulator rows that receive the context's gradients."""
    fresh_grad: np.ndarray
    """int32: those of them that nobody has added to yet: zeroed before this chunk's backward."""
    own_rows: np.ndarray
    """int32: rows of this chunk that were pushed, whose descendants left gradients in the accumulators."""
    own_grad: np.ndarray
    """int32: the accumulator rows that hold them."""
    source_rows: np.ndarray
    """int32: rows with a loss-bearing edge, the only ones that reach the LM head."""
    edges: np.ndarray
    """int32 [E]: this chunk's loss-bearing edges, as indices into `Forest.edges`, ordered by source."""
    edge_source: np.ndarray
    """int32 [E]: index into `source_rows` of every edge, increasing."""
    terms: np.ndarray
    """int64 [M]: this chunk's terms, as indices into the forest's terms."""
    term_edge: np.ndarray
    """int64 [M]: index into `edges` of every term."""


class Kind(StrEnum):
    """What an operation does."""

    PUSH = "push"
    FORWARD = "forward"
    BACKWARD = "backward"
    FREE = "free"
    SEND = "send"
    RECV = "recv"


class Flow(StrEnum):
    """What goes from one part of a model to another: activations to the next, gradients to the one before."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """What a SEND or RECV moves. A flow between two stages is first in, first out, whichever parts are at its ends."""

    flow: Flow
    call: Kind
    """PUSH or FORWARD: whether the operation's index names a push or a chunk."""
    peer: int
    """The other stage."""
    wraps: bool
    """Between the last stage and the first, where an activation's part is one higher at its end than at its origin."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Operation:
    """One step of the static list. `index` names a push (PUSH), a chunk (FORWARD, BACKWARD, FREE), or either."""

    kind: Kind
    index: int
    free_state: np.ndarray | None = None
    """FREE only: state cache rows that nobody reads any more, int32."""
    free_grad: np.ndarray | None = None
    """FREE only: accumulator rows that their chunk has consumed, int32."""
    transfer: Transfer | None = None
    """SEND and RECV only."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """Pushes and chunks in execution order, the operation list over them, and the sizes of the two caches."""

    forest: Forest
    pushes: tuple[Push, ...]
    chunks: tuple[Chunk, ...]
    operations: tuple[Operation, ...]
    state_rows: int
    """Most states alive at once: the rows of the state cache."""
    grad_rows: int
    """Most accumulators alive at once: the rows of the gradient cache."""
    capacity: int
    """Most rows of one chunk."""
    in_flight: int
    """Most chunks between forward and backward."""

    @property
    def num_pushed(self) -> int:
        return sum(len(push.tokens) for push in self.pushes)

    @property
    def num_rows(self) -> int:
        """Rows with gradient, padding included."""
        return sum(chunk.size for chunk in self.chunks)


@dataclass(frozen=True, kw_only=True, eq=False)
class StageOperation:
    """An operation on one of the model parts of a pipeline stage."""

    part: int
    operation: Operation


@dataclass(frozen=True, kw_only=True, eq=False)
class StageProgram:
    """What one stage of a pipeline runs: the same calls on each of its model parts.

    A SEND follows the operation that makes what is sent, a RECV precedes the one that needs it. Both are
    asynchronous: a receive may be posted earlier, and no send waits for its receiver.
    """

    plans: tuple[Plan, ...]
    """One per model part. Calls are the same; rows of both caches follow the part's own order."""
    operations: tuple[StageOperation, ...]
    """Those of all parts in order of execution, with transfers between parts on different stages."""

    @property
    def forest(self) -> Forest:
        return self.plans[0].forest
