"""Planning beside training: a process of its own that answers messages one after the other.

A process, because a thread would hold the interpreter lock while training launches kernels; started before MPI is
initialised, because a process that uses MPI must not fork. Messages (see `wire`) go through its standard input and
output, each after a header: kind, length, seconds.
"""

import contextlib
import importlib
import os
import queue
import signal
import struct
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from megatron_dta.control.launch import without_launch
from megatron_dta.control.wire import pack, unpack
from megatron_dta.errors import UsageError

Handler = Callable[[dict[str, Any]], dict[str, Any]]

_HEADER = struct.Struct("<qqd")
_MESSAGE, _USAGE_ERROR, _ERROR = range(3)
_NICENESS = 5
_CLOSE_SECONDS = 2.0


class Planner(Protocol):
    """Answers messages in the order in which they were submitted."""

    def submit(self, message: dict[str, Any]) -> None:
        """Hand over a message; its arrays may be changed afterwards. Raises ValueError for what `pack` refuses."""

    def result(self) -> tuple[dict[str, Any], float, float]:
        """Return the oldest answer not yet returned, the seconds it took, and the seconds the caller waited for it.

        Raises UsageError where the handler did, with its text, and RuntimeError with the type, text and traceback of
        any other exception; RuntimeError as well where nothing was submitted.
        """

    def close(self) -> None:
        """End the planner; unread answers are lost. A second call does nothing."""


class InlinePlanner:
    """Runs the handler in this process when a message is submitted; the whole time counts as waited for."""

    def __init__(self, handler: str):
        self._handler = _load(handler)
        self._answers: queue.SimpleQueue[tuple[int, np.ndarray, float]] = queue.SimpleQueue()

    def __enter__(self) -> "InlinePlanner":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, message: dict[str, Any]) -> None:
        self._answers.put(_answer(self._handler, pack(message)))

    def result(self) -> tuple[dict[str, Any], float, float]:
        if self._answers.empty():
            raise RuntimeError(_NOTHING_SUBMITTED)
        kind, payload, seconds = self._answers.get()
        return _opened(kind, payload), seconds, seconds

    def close(self) -> None: ...


class PlannerProcess:
    """Runs the handler in a process of its own, at low priority, outside any MPI or torchrun launch.

    `handler` is "package.module:function", a function from message to message; what it prints goes to standard error.
    `environ` are the process's variables, less those of launchers (default: this process's). The process ends with
    `close`, with this object, or with this process, even if that is killed. Raises UsageError where MPI runs already.
    """

    def __init__(self, handler: str, *, environ: Mapping[str, str] | None = None):
        _split(handler)
        mpi = sys.modules.get("mpi4py.MPI")
        if mpi is not None and mpi.Is_initialized():
            raise UsageError("MPI is initialised and must not fork: start the planner before connecting to other ranks")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megatron_dta.control.service", handler],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=_child_environ(os.environ if environ is None else environ),
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._answers = self._process.stdout
        self._requests: queue.SimpleQueue[np.ndarray | None] = queue.SimpleQueue()
        self._outstanding = 0
        # A pipe holds 64 KiB. The writer waits for room in it, outside the interpreter lock, in submit's place.
        writer = threading.Thread(target=_write_all, args=(self._process.stdin, self._requests), daemon=True)
        writer.start()
        self._end = weakref.finalize(self, _end, self._process, self._requests, writer)

    def __enter__(self) -> "PlannerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, message: dict[str, Any]) -> None:
        self._check_open()
        self._requests.put(pack(message))
        self._outstanding += 1

    def result(self) -> tuple[dict[str, Any], float, float]:
        self._check_open()
        if not self._outstanding:
            raise RuntimeError(_NOTHING_SUBMITTED)
        start = time.perf_counter()
        answer = _receive(self._answers)
        if answer is None:
            raise RuntimeError(f"the planner process ended with exit status {self._process.wait()}")
        self._outstanding -= 1
        waited = time.perf_counter() - start
        kind, payload, seconds = answer
        return _opened(kind, payload), seconds, waited

    def close(self) -> None:
        self._end()

    def _check_open(self) -> None:
        if not self._end.alive:
            raise RuntimeError("the planner is closed")


def serve(handler: str) -> None:
    """Answer the messages of standard input on standard output until its end, which ends the process at once."""
    os.nice(_NICENESS)
    # A signal to the whole process group or job step is for the training process, which may still want a plan for its
    # last update; this process ends with it in any case.
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)
    requests, answers = _private_pipes()
    waiting: queue.SimpleQueue[np.ndarray] = queue.SimpleQueue()
    threading.Thread(target=_read_all, args=(requests, waiting), daemon=True).start()
    try:
        function = _load(handler)
    except Exception as error:
        function = _raises(error)
    with contextlib.suppress(BrokenPipeError):
        while True:
            answer = _answer(function, waiting.get())
            sys.stdout.flush()
            _send(answers, *answer)


_NOTHING_SUBMITTED = "no message was submitted that has no result yet"


def _answer(function: Handler, request: np.ndarray) -> tuple[int, np.ndarray, float]:
    """Run a handler on a packed message; return the kind of the answer, the answer packed, and the seconds it took."""
    start = time.perf_counter()
    try:
        kind, payload = _MESSAGE, pack(function(unpack(request)))
    except UsageError as error:
        kind, payload = _USAGE_ERROR, pack({"text": str(error)})
    except Exception as error:
        text = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        kind, payload = _ERROR, pack({"text": text})
    return kind, payload, time.perf_counter() - start


def _opened(kind: int, payload: np.ndarray) -> dict[str, Any]:
    message = unpack(payload)
    if kind == _USAGE_ERROR:
        raise UsageError(message["text"])
    if kind == _ERROR:
        raise RuntimeError(f"the planner failed: {message['text']}")
    return message


def _split(handler: str) -> tuple[str, str]:
    module, colon, function = handler.partition(":")
    if not (module and colon and function):
        raise ValueError(f"handler is {handler!r}; expected 'package.module:function'")
    return module, function


def _load(handler: str) -> Handler:
    module, function = _split(handler)
    return getattr(importlib.import_module(module), function)


def _raises(error: Exception) -> Handler:
    def function(message: dict[str, Any]) -> dict[str, Any]:
        raise error

    return function


def _child_environ(environ: Mapping[str, str]) -> dict[str, str]:
    variables = without_launch(environ)
    folder = Path(__file__).parents[2]
    # In a source tree that is not installed the process finds the package by this. A folder of installed packages must
    # not get there: it would come before the standard library.
    if folder.name not in ("site-packages", "dist-packages"):
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), variables.get("PYTHONPATH")]))
    return variables


def _private_pipes() -> tuple[IO[bytes], IO[bytes]]:
    """Return the pipes that were standard input and output; leave an empty input, and standard error as the output.

    A handler that prints or reads, or a program it starts, thus cannot disturb the messages.
    """
    requests, answers = os.fdopen(os.dup(0), "rb", buffering=0), os.fdopen(os.dup(1), "wb", buffering=0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, answers


def _read_all(requests: IO[bytes], waiting: "queue.SimpleQueue[np.ndarray]") -> None:
    # Always reading, also while the handler works: the other side never waits long, and its end is seen at once.
    while (request := _receive(requests)) is not None:
        waiting.put(request[1])
    os._exit(0)


def _write_all(stdin: IO[bytes], requests: "queue.SimpleQueue[np.ndarray | None]") -> None:
    # a broken pipe is reported by `result`, which finds the exit status
    with contextlib.suppress(BrokenPipeError), stdin:
        while (request := requests.get()) is not None:
            _send(stdin, _MESSAGE, request, 0.0)


def _end(
    process: subprocess.Popen[bytes], requests: "queue.SimpleQueue[np.ndarray | None]", writer: threading.Thread
) -> None:
    requests.put(None)
    try:
        process.wait(_CLOSE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    writer.join()
    assert process.stdout is not None
    process.stdout.close()


def _send(pipe: IO[bytes], kind: int, payload: np.ndarray, seconds: float) -> None:
    for data in (memoryview(_HEADER.pack(kind, len(payload), seconds)), payload.data):
        at = 0
        while at < len(data):
            at += pipe.write(data[at:])


def _receive(pipe: IO[bytes]) -> tuple[int, np.ndarray, float] | None:
    """Return the next kind, payload and seconds; None where the other side has ended, also amid a message."""
    header = bytearray(_HEADER.size)
    if not _fill(pipe, memoryview(header)):
        return None
    kind, num_bytes, seconds = _HEADER.unpack(header)
    payload = np.empty(num_bytes, np.uint8)
    return (kind, payload, seconds) if _fill(pipe, payload.data) else None


def _fill(pipe: IO[bytes], data: memoryview) -> bool:
    at = 0
    while at < len(data):
        num_read = pipe.readinto(data[at:])  # type: ignore[attr-defined]
        if not num_read:
            return False
        at += num_read
    return True


if __name__ == "__main__":
    serve(sys.argv[1])
