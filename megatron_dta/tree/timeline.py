"""Play the operations of all stages of a pipeline against the clock, with their transfers and without a model.

Links never block a sender, and are first in, first out. A call's seconds are divided evenly over the parts of the
model; transfers take none.

Shapes: P stages, Q pushes, K chunks.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_dta.tree.pipeline import Pipeline, steps, with_transfers
from megatron_dta.tree.plan import Flow, Kind, Operation, StageOperation, Transfer


@dataclass(frozen=True, kw_only=True, eq=False)
class CallSeconds:
    """What the calls of a stream take on the whole model."""

    push: np.ndarray
    """float64 [Q]."""
    forward: np.ndarray
    """float64 [K]."""
    backward: np.ndarray
    """float64 [K]."""

    def alike(self) -> "CallSeconds":
        """Return as many equal chunks with the same work, pushes' in their forwards."""
        num_chunks = len(self.forward)
        forward, backward = self.forward.sum() + self.push.sum(), self.backward.sum()
        return CallSeconds(
            push=np.zeros(0),
            forward=np.full(num_chunks, forward / max(num_chunks, 1)),
            backward=np.full(num_chunks, backward / max(num_chunks, 1)),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Timing:
    """How long a pipeline takes over its calls."""

    seconds: float
    """Until the last stage is done."""
    busy: np.ndarray
    """float64 [P]: seconds that each stage computes."""
    dense_seconds: float
    """What the same work takes in as many chunks that are all equal, without a push."""

    @property
    def bubble(self) -> float:
        """The share of the time that the busiest stage waits."""
        return _waits(self.busy, self.seconds)

    @property
    def dense_bubble(self) -> float:
        """The bubble of equal chunks: (P - 1) / (V * K + P - 1) where P divides K, or V is 1."""
        return _waits(self.busy, self.dense_seconds)


def _waits(busy: np.ndarray, seconds: float) -> float:
    return 1.0 - float(busy.max()) / seconds if seconds > 0 else 0.0


def timing(stream: Sequence[Kind], pipeline: Pipeline, seconds: CallSeconds) -> Timing:
    """Predict how long a stream, as `pipeline.steps` takes it, runs on all stages."""
    taken, busy = play(_bare(stream, pipeline), shares(seconds, pipeline), pipeline)
    return Timing(seconds=taken, busy=busy, dense_seconds=dense_seconds(seconds, pipeline))


def dense_seconds(seconds: CallSeconds, pipeline: Pipeline) -> float:
    """Return what the work of all calls takes in as many equal chunks."""
    dense = seconds.alike()
    return play(_bare([Kind.FORWARD] * len(dense.forward), pipeline), shares(dense, pipeline), pipeline)[0]


def _bare(stream: Sequence[Kind], pipeline: Pipeline) -> list[tuple[StageOperation, ...]]:
    """Return every stage's operations but for what is freed."""
    found = []
    for stage in range(pipeline.stages):
        order = steps(stream, pipeline, stage)
        by_part: list[list[Operation]] = [[] for _ in range(pipeline.virtual)]
        for step in order:
            by_part[step.part].append(Operation(kind=step.kind, index=step.index))
        found.append(with_transfers(order, by_part, pipeline, stage))
    return found


Act = Callable[[int, StageOperation], float]
"""(stage, an operation but a transfer) -> its seconds."""


def shares(seconds: CallSeconds, pipeline: Pipeline) -> Act:
    """Share a call's seconds out over the parts of the model."""
    of_kind = {Kind.PUSH: seconds.push, Kind.FORWARD: seconds.forward, Kind.BACKWARD: seconds.backward}
    of_part = {kind: (values / pipeline.parts).tolist() for kind, values in of_kind.items()}

    def act(stage: int, step: StageOperation) -> float:
        kind = step.operation.kind
        return 0.0 if kind is Kind.FREE else of_part[kind][step.operation.index]

    return act


@dataclass(frozen=True, kw_only=True)
class _Message:
    """What goes into a part of a stage: activations or gradients of one call."""

    flow: Flow
    call: Kind
    index: int
    part: int


def play(programs: Sequence[Sequence[StageOperation]], act: Act, pipeline: Pipeline) -> tuple[float, np.ndarray]:
    """Run all stages until they are done; return the time and each stage's busy seconds, float64 [P].

    Raises ValueError where stages wait for each other for ever, where a message is not the one that is expected, and
    where an operation's input was not received, its output not sent, or a message nobody's.
    """
    links: _Links = defaultdict(deque)
    stages = [_Stage(number, operations, links, pipeline) for number, operations in enumerate(programs)]
    while any(stage.advance(act) for stage in stages):
        pass
    waiting = [stage.next_shown() for stage in stages if not stage.is_done]
    if waiting:
        raise ValueError(f"stages wait for each other for ever: {'; '.join(waiting)}")
    left = [message for link in links.values() for message, _ in link]
    left += [message for stage in stages for message in (*stage.received, *stage.made)]
    if left:
        raise ValueError(f"nobody sends, receives or uses {left[0]}")
    return max((stage.clock for stage in stages), default=0.0), np.array([stage.busy for stage in stages])


_Links = dict[tuple[Flow, int, int], deque[tuple[_Message, float]]]
"""(flow, from stage, to stage) -> messages under way, with the time they were sent."""


class _Stage:
    """A stage at some point of its program."""

    def __init__(self, number: int, operations: Sequence[StageOperation], links: _Links, pipeline: Pipeline):
        self.number, self.operations, self.links, self.pipeline = number, operations, links, pipeline
        self.position, self.clock, self.busy = 0, 0.0, 0.0
        self.received: set[_Message] = set()
        self.made: set[_Message] = set()

    @property
    def is_done(self) -> bool:
        return self.position == len(self.operations)

    def next_shown(self) -> str:
        step = self.operations[self.position]
        return f"stage {self.number} for {step.operation.transfer} of call {step.operation.index}, part {step.part}"

    def advance(self, act: Act) -> bool:
        """Run until a message is missing; tell whether anything ran."""
        start = self.position
        while not self.is_done and self._run(self.operations[self.position], act):
            self.position += 1
        return self.position > start

    def _run(self, step: StageOperation, act: Act) -> bool:
        """Run one operation; False: it has to wait."""
        operation = step.operation
        if operation.kind is Kind.RECV:
            return self._receive(step, _transfer_of(operation))
        if operation.kind is Kind.SEND:
            self._send(step, _transfer_of(operation))
        else:
            self._compute(step, act)
        return True

    def _compute(self, step: StageOperation, act: Act) -> None:
        """Use up what was received, and make what is to be sent."""
        kind, index = step.operation.kind, step.operation.index
        flow = Flow.GRADIENT if kind is Kind.BACKWARD else Flow.ACTIVATION
        toward = -1 if kind is Kind.BACKWARD else 1
        call = Kind.PUSH if kind is Kind.PUSH else Kind.FORWARD
        here = step.part * self.pipeline.stages + self.number
        if kind is not Kind.FREE and 0 <= here - toward < self.pipeline.parts:
            self._take(self.received, _Message(flow=flow, call=call, index=index, part=step.part))
        seconds = act(self.number, step)
        self.clock += seconds
        self.busy += seconds
        if kind is not Kind.FREE and 0 <= here + toward < self.pipeline.parts:
            self.made.add(_Message(flow=flow, call=call, index=index, part=(here + toward) // self.pipeline.stages))

    def _take(self, messages: set[_Message], message: _Message) -> None:
        if message not in messages:
            raise ValueError(f"stage {self.number} needs {message} and does not have it")
        messages.remove(message)

    def _send(self, step: StageOperation, transfer: Transfer) -> None:
        toward = 1 if transfer.flow is Flow.ACTIVATION else -1
        message = _message(step, transfer, step.part + toward * transfer.wraps)
        self._take(self.made, message)
        self.links[transfer.flow, self.number, transfer.peer].append((message, self.clock))

    def _receive(self, step: StageOperation, transfer: Transfer) -> bool:
        link = self.links[transfer.flow, transfer.peer, self.number]
        if not link:
            return False
        message, sent = link.popleft()
        expected = _message(step, transfer, step.part)
        if message != expected:
            raise ValueError(f"stage {self.number} expects {expected} from stage {transfer.peer} and gets {message}")
        self.received.add(message)
        self.clock = max(self.clock, sent)
        return True


def _message(step: StageOperation, transfer: Transfer, part: int) -> _Message:
    return _Message(flow=transfer.flow, call=transfer.call, index=step.operation.index, part=part)


def _transfer_of(operation: Operation) -> Transfer:
    if operation.transfer is None:
        raise ValueError(f"a {operation.kind} of call {operation.index} does not say what it moves")
    return operation.transfer
