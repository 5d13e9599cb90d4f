"""What a person sees while work runs: messages, a progress line, memory."""

import resource
import sys
import warnings
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_CONSOLE = Console(stderr=True)


def quiet_host() -> None:
    """Silence what Megatron-Core prints about optional packages when it is imported; `apex` is never needed."""
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")


def only_rank(rank: int) -> None:
    """Keep all ranks but the first silent, and their progress lines away."""
    _CONSOLE.quiet = rank > 0


def say(message: str) -> None:
    """Print one line to standard error."""
    _CONSOLE.print(message, highlight=False, markup=False, soft_wrap=True)


class TrainProgress:
    """A bar with the numbers of the last update; plain lines where the output is no terminal."""

    def __init__(self, total: int):
        self.total = total
        self._progress = Progress(
            TextColumn("update"), MofNCompleteColumn(), BarColumn(20), TimeRemainingColumn(),
            TextColumn("{task.fields[line]}"), console=_CONSOLE,
        )  # fmt: skip
        self._task = self._progress.add_task("train", total=total, line="")

    def __enter__(self) -> "TrainProgress":
        if _CONSOLE.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, record: dict[str, Any]) -> None:
        """Advance by one update."""
        line = summary(record)
        if _CONSOLE.is_terminal:
            self._progress.update(self._task, advance=1, line=line)
        else:
            say(f"update {record['update']}/{self.total} {line}")


def summary(record: dict[str, Any]) -> str:
    """Return the numbers of an update in one line."""
    if record.get("skipped"):
        return "skipped: no trained token in the batch"
    names = {"loss": "loss", "reward": "reward", "kl": "KL", "entropy": "entropy", "clip_fraction": "clipped"}
    shown = [f"{label} {record[name]:.4g}" for name, label in names.items() if name in record]
    shown += [
        f"grad {record['grad_norm']:.3g}",
        f"{record['sequence_tokens_per_second']:,.0f} seq tok/s",
        f"{record['tree_tokens_per_second']:,.0f} tree tok/s",
        f"reuse {record['reuse']:.2f}x",
        f"{record['memory_gib']:.2f} GiB",
    ]
    return " | ".join(shown)


def peak_memory_gib() -> float:
    """Return the most memory this process has used: on the GPU where there is one, else resident."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
