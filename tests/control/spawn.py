"""Starts a script on several ranks, by mpiexec or as torchrun would, and returns what each printed."""

import contextlib
import functools
import importlib.util
import os
import random
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dta.control.launch import without_launch

ROOT = Path(__file__).parents[2]
_SECONDS = 600


def _environ() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return without_launch(os.environ) | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


@functools.cache
def _mpiexec() -> str:
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed")
    own = Path(sys.executable).with_name("mpiexec")
    found = str(own) if own.exists() else shutil.which("mpiexec")
    if found is None:
        pytest.skip(f"no mpiexec beside {sys.executable} or in PATH")
    return found


def _run(line: list[str], variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(line, env=_environ() | variables, capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"{error}\n{error.stdout!r}\n{error.stderr!r}")


def start_mpi(num_ranks: int, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `python command` under mpiexec, however it ends. Skips where there is no MPI."""
    return _run([_mpiexec(), "-n", str(num_ranks), sys.executable, *command], variables)


def run_mpi(num_ranks: int, *command: str, **variables: str) -> str:
    """Run `python command` under mpiexec; return standard output. Skips where there is no MPI."""
    ran = start_mpi(num_ranks, *command, **variables)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def run_torch(num_ranks: int, *command: str) -> str:
    """Run `python command` with the variables that torchrun sets, less its agent; return standard output."""
    processes = [
        subprocess.Popen(
            [sys.executable, *command],
            env=_environ() | torch_variables(rank, num_ranks, port),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for port in [free_port()]
        for rank in range(num_ranks)
    ]
    try:
        outputs = [process.communicate(timeout=_SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(process.returncode for process in processes), "".join(outputs)
    return "".join(outputs)


def run_alone(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run one process outside any launcher, whatever the variables say."""
    return _run([sys.executable, *command], variables)


def torch_variables(rank: int, size: int, port: int) -> dict[str, str]:
    numbers = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_PORT": port}
    return {name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": "127.0.0.1"}


def free_port() -> int:
    """Return a port to listen at, below those that outgoing connections are given: nobody takes it meanwhile."""
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
