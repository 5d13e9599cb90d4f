"""How a job is laid out over processes: one table says which combinations are refused, and why.

Ranks are numbered as Megatron-Core does: tensor fastest, then context, data, pipeline stages last; experts are dealt
over the ranks of one stage, expert-tensor fastest, then expert.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatron_dta.errors import UsageError
from megatron_dta.model_config import ModelConfig
from megatron_dta.tree.budget import row_multiple

CP_COMMS = ("a2a", "allgather")


@dataclass(frozen=True, kw_only=True)
class Axes:
    """Sizes of the process axes; the data axis is what is left of the world."""

    tensor: int = 1
    sequence: bool = False
    """Deal rows over the tensor ranks wherever they are not split by heads or columns."""
    context: int = 1
    cp_comm: str = "a2a"
    """How context ranks attend: a2a deals heads, allgather deals queries and gathers keys and values."""
    pipeline: int = 1
    virtual: int = 1
    """Model parts per pipeline stage, interleaved."""
    expert: int = 1
    expert_tensor: int | None = None
    """Ranks that one expert's matrices are split over; None: as many as `tensor`."""

    def __post_init__(self):
        for name in ("tensor", "context", "pipeline", "virtual", "expert", "expert_tensor"):
            size = getattr(self, name)
            is_size = isinstance(size, int) and not isinstance(size, bool) and size >= 1
            if not is_size and not (name == "expert_tensor" and size is None):
                raise UsageError(f"parallel axis {name} is {size!r}; expected a positive whole number")
        if self.cp_comm not in CP_COMMS:
            raise UsageError(f"cp_comm is {self.cp_comm!r}; expected one of {', '.join(CP_COMMS)}")

    @property
    def expert_tensor_size(self) -> int:
        return self.tensor if self.expert_tensor is None else self.expert_tensor

    @property
    def replica_size(self) -> int:
        """Processes that hold one copy of the model."""
        return self.tensor * self.context * self.pipeline

    def replicas(self, world: int) -> int:
        """Count the data-parallel ranks of a world of so many processes."""
        return world // self.replica_size

    def replica_of(self, rank: int, world: int) -> int:
        """Return the data-parallel rank that a process belongs to."""
        return rank % (world // self.pipeline) // (self.tensor * self.context)

    @property
    def together(self) -> int:
        """Neighbouring replicas that exchange tokens for experts: they must run equally many calls."""
        return max(1, self.expert * self.expert_tensor_size // (self.tensor * self.context))

    def multiple(self, block: int = 1) -> int:
        """Return the multiple of rows that every call is padded to; `block` is what the user or a kernel asks for."""
        return row_multiple(
            block=block, tensor=self.tensor, sequence_parallel=self.sequence, context=self.context
        )  # fmt: skip

    def describe(self) -> str:
        """Name the axes that are in use, as `tp2 sp cp2(a2a) pp2 vpp2 ep2`."""
        parts = [
            *([f"tp{self.tensor}"] if self.tensor > 1 else []),
            *(["sp"] if self.sequence else []),
            *([f"cp{self.context}({self.cp_comm})"] if self.context > 1 else []),
            *([f"pp{self.pipeline}"] if self.pipeline > 1 else []),
            *([f"vpp{self.virtual}"] if self.virtual > 1 else []),
            *([f"ep{self.expert}"] if self.expert > 1 else []),
            *([f"etp{self.expert_tensor}"] if self.expert_tensor not in (None, self.tensor) else []),
        ]
        return " ".join(parts) or "one process a replica"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A combination that is refused at start."""

    name: str
    refused: Callable[[Axes, ModelConfig, int], bool]
    remedy: str


RULES = (
    Rule(
        name="processes not a multiple of tensor x context x pipeline",
        refused=lambda a, m, world: world % a.replica_size != 0,
        remedy="start that many processes, or a multiple",
    ),
    Rule(
        name="sequence parallelism without tensor parallelism",
        refused=lambda a, m, world: a.sequence and a.tensor == 1,
        remedy="it deals rows over tensor ranks: set tensor above 1 or leave it off",
    ),
    Rule(
        name="query or key/value heads not a multiple of tensor",
        refused=lambda a, m, world: m.num_heads % a.tensor != 0 or m.num_kv_heads % a.tensor != 0,
        remedy="key/value heads are not copied between ranks: choose tensor as a divisor of both",
    ),
    Rule(
        name="a2a with key/value heads of a tensor rank not a multiple of context",
        refused=lambda a, m, world: a.cp_comm == "a2a" and m.num_kv_heads // a.tensor % a.context != 0,
        remedy="choose cp_comm allgather, or fewer context ranks",
    ),
    Rule(
        name="MLP columns not a multiple of tensor",
        refused=lambda a, m, world: bool(
            m.expert_ffn_size % a.expert_tensor_size if m.num_experts else m.ffn_size % a.tensor
        ),
        remedy="choose tensor (for experts expert_tensor) as a divisor of the MLP's intermediate size",
    ),
    Rule(
        name="layers not a multiple of pipeline x virtual",
        refused=lambda a, m, world: m.num_layers % (a.pipeline * a.virtual) != 0,
        remedy="every model part has equally many layers: choose divisors",
    ),
    Rule(
        name="virtual stages without pipeline stages",
        refused=lambda a, m, world: a.virtual > 1 and a.pipeline == 1,
        remedy="set pipeline above 1 or virtual to 1",
    ),
    Rule(
        name="expert parallelism of a dense model",
        refused=lambda a, m, world: not m.num_experts and (a.expert > 1 or a.expert_tensor is not None),
        remedy="set expert to 1 and leave expert_tensor out",
    ),
    Rule(
        name="expert_tensor other than tensor without expert parallelism",
        refused=lambda a, m, world: a.expert == 1 and a.expert_tensor_size != a.tensor,
        remedy="Megatron sums such experts over the wrong ranks: set expert above 1 or leave expert_tensor out",
    ),
    Rule(
        name="experts not a multiple of expert",
        refused=lambda a, m, world: m.num_experts % a.expert != 0,
        remedy="choose expert as a divisor of the number of experts",
    ),
    Rule(
        name="mixture of experts with tensor but without sequence parallelism",
        refused=lambda a, m, world: m.num_experts > 0 and a.tensor > 1 and not a.sequence,
        remedy="set sequence, or every tensor rank would send all tokens to the experts",
    ),
    Rule(
        name="expert x expert_tensor does not tile the ranks of a stage",
        refused=lambda a, m, world: not _tiles(a, world),
        remedy="it must divide tensor x context or be a multiple of it, and divide the ranks of a stage",
    ),
)
"""Everything that is refused about axes; the README prints this table."""


def _tiles(axes: Axes, world: int) -> bool:
    shared, rows = axes.expert * axes.expert_tensor_size, axes.tensor * axes.context
    return (rows % shared == 0 or shared % rows == 0) and (world // axes.pipeline) % shared == 0


def violations(axes: Axes, model: ModelConfig, world: int) -> Iterator[Rule]:
    """Yield the rules that this layout of a model over `world` processes breaks."""
    return (rule for rule in RULES if rule.refused(axes, model, world))


def check_axes(axes: Axes, model: ModelConfig, world: int) -> None:
    """Raise UsageError, naming the rule and its remedy, for the first combination that is refused."""
    rule = next(violations(axes, model, world), None)
    if rule is not None:
        raise UsageError(
            f"refused: {rule.name}. Got {world} process(es) for {axes.describe()}; the model has {model.num_layers} "
            f"layers, {model.num_heads} query and {model.num_kv_heads} key/value heads, MLP size {model.ffn_size}, "
            f"{model.num_experts} experts. Remedy: {rule.remedy}"
        )
