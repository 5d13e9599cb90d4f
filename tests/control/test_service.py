import os
import signal
import subprocess
import sys
import textwrap
import time
import types
from pathlib import Path

import numpy as np
import pytest

from megatron_dta.control.service import InlinePlanner, PlannerProcess
from megatron_dta.errors import UsageError

ROOT = Path(__file__).parents[2]
HANDLERS = """
import os, subprocess, sys, time
import numpy as np
from megatron_dta.errors import UsageError

def echo(message):
    return message

def do(message):
    match message["what"]:
        case "double":
            return {"x": message["x"] * 2, "rows": [row if row is None else row + 1 for row in message["rows"]]}
        case "refuse":
            raise UsageError("tokens is 0; expected 1 or more")
        case "fail":
            return {"x": 1 / 0}
        case "unpackable":
            return {"x": object()}
        case "no dict":
            return 3
        case "exit":
            sys.exit(3)
        case "kill":
            os.kill(os.getpid(), 9)
        case "sleep":
            time.sleep(message["seconds"])
            return {}
        case "disturb":
            print("printed", flush=False)
            os.write(1, b"written to 1\\n")
            sys.__stdout__.write("to the first stdout\\n")
            subprocess.run([sys.executable, "-S", "-c", "print(input('asked'))"], check=False)
            return {"left": sys.stdin.read()}
        case "environment":
            modules = [name for name in ("torch", "mpi4py", "rich") if name in sys.modules]
            return {"environ": dict(os.environ), "pid": os.getpid(), "nice": os.nice(0), "modules": modules}
"""


@pytest.fixture(scope="module")
def environ(tmp_path_factory):
    """Return variables with which the process finds `planner_handlers`."""
    folder = tmp_path_factory.mktemp("handlers")
    (folder / "planner_handlers.py").write_text(HANDLERS)
    return dict(os.environ) | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}


@pytest.fixture(params=["process", "inline"])
def planner(request, environ, monkeypatch):
    if request.param == "process":
        made = PlannerProcess("planner_handlers:do", environ=environ)
    else:
        monkeypatch.syspath_prepend(environ["PYTHONPATH"])
        made = InlinePlanner("planner_handlers:do")
    with made:
        yield made


def double(n):
    return {"what": "double", "x": np.full(n, n), "rows": [np.arange(n), None]}


def test_answers_come_in_order_with_their_times(planner):
    for n in range(5):
        planner.submit(double(n))
    planner.submit({"what": "sleep", "seconds": 0.1})
    for n in range(5):
        message, worked, waited = planner.result()
        np.testing.assert_array_equal(message["x"], np.full(n, 2 * n))
        np.testing.assert_array_equal(message["rows"][0], np.arange(n) + 1)
        assert message["rows"][1] is None
        assert worked > 0
        assert waited > 0
    message, worked, waited = planner.result()
    assert message == {}
    assert worked >= 0.1
    with pytest.raises(RuntimeError, match="no message was submitted"):
        planner.result()


def test_a_message_is_what_it_was_when_submitted(planner):
    message = double(1000)
    planner.submit(message)
    message["x"][:] = 0
    assert planner.result()[0]["x"][0] == 2000


def test_errors_come_back_as_the_same_kind_and_end_nothing(planner):
    for what in ("refuse", "fail", "unpackable", "no dict", "unknown"):
        planner.submit({"what": what})
    planner.submit(double(1))
    with pytest.raises(UsageError, match=r"^tokens is 0; expected 1 or more$"):
        planner.result()
    with pytest.raises(RuntimeError, match=r"(?s)ZeroDivisionError: division by zero\nTraceback.*1 / 0"):
        planner.result()
    with pytest.raises(RuntimeError, match="x: object is neither an array nor a JSON value"):
        planner.result()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="AttributeError"):
            planner.result()
    assert planner.result()[0]["x"] == [2]


def test_what_cannot_be_packed_is_refused_by_submit(planner):
    with pytest.raises(ValueError, match="x: set is neither"):
        planner.submit({"x": {1}})
    planner.submit(double(1))
    planner.result()


def test_close_twice(planner):
    planner.submit({"what": "sleep", "seconds": 0.0})
    planner.close()
    planner.close()


@pytest.mark.parametrize("handler", ["planner_handlers", "planner_handlers.do", ":do", "planner_handlers:"])
def test_a_handler_is_a_module_and_a_function(handler):
    for kind in (PlannerProcess, InlinePlanner):
        with pytest.raises(ValueError, match=r"expected 'package\.module:function'"):
            kind(handler)


@pytest.mark.parametrize(
    ("handler", "words"), [("no_such_module:do", "ModuleNotFoundError"), ("planner_handlers:no", "AttributeError")]
)
def test_a_handler_that_cannot_be_imported_is_an_error_of_every_message(handler, words, environ):
    with PlannerProcess(handler, environ=environ) as planner:
        for _ in range(2):
            planner.submit({})
            with pytest.raises(RuntimeError, match=words):
                planner.result()


@pytest.fixture
def process(environ):
    with PlannerProcess("planner_handlers:do", environ=environ) as made:
        yield made


def test_big_messages_do_not_wait_for_a_busy_planner(environ):
    with PlannerProcess("planner_handlers:echo", environ=environ) as planner:
        big = np.arange(50_000_000, dtype=np.uint8)
        for n in range(2):
            planner.submit({"x": big, "n": n})
        for n in range(2):
            message, _, _ = planner.result()
            assert message["n"] == n
            np.testing.assert_array_equal(message["x"], big)


def test_submit_returns_before_the_planner_has_read(process):
    os.kill(process._process.pid, signal.SIGSTOP)
    try:
        process.submit(double(500_000))
    finally:
        os.kill(process._process.pid, signal.SIGCONT)
    assert len(process.result()[0]["x"]) == 500_000


@pytest.mark.parametrize(("what", "status"), [("exit", 3), ("kill", -9)])
def test_a_dead_planner_is_reported_with_its_exit_status(process, what, status):
    process.submit({"what": what})
    process.submit(double(500_000))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"the planner process ended with exit status {status}$"):
            process.result()
    process.submit(double(1))
    process.close()


def test_prints_and_reads_of_a_handler_disturb_nothing(environ, capfd):
    with PlannerProcess("planner_handlers:do", environ=environ) as planner:
        for _ in range(2):
            planner.submit({"what": "disturb"})
            assert planner.result()[0] == {"left": ""}
    out, err = capfd.readouterr()
    assert out == ""
    for words in ("printed", "written to 1", "to the first stdout", "asked"):
        assert err.count(words) == 2


def test_the_process_is_outside_the_launch_light_and_of_low_priority(environ):
    launch = {"PMI_RANK": "0", "PMI_FD": "9", "SLURM_PROCID": "1", "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}
    with PlannerProcess("planner_handlers:do", environ=environ | launch) as planner:
        planner.submit({"what": "environment"})
        seen = planner.result()[0]
    assert not set(launch) & set(seen["environ"])
    assert seen["environ"]["OMP_NUM_THREADS"] == "1"
    assert seen["modules"] == []
    assert seen["pid"] != os.getpid()
    assert seen["nice"] == min(os.nice(0) + 5, 19)


def test_close_ends_a_busy_process_soon(process):
    process.submit({"what": "sleep", "seconds": 60})
    start = time.perf_counter()
    process.close()
    assert process._process.returncode is not None
    assert time.perf_counter() - start < 10
    for call in (process.result, lambda: process.submit({})):
        with pytest.raises(RuntimeError, match="the planner is closed"):
            call()


def test_signals_to_the_whole_job_step_do_not_end_the_process(process):
    process.submit(double(1))
    process.result()
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(process._process.pid, number)
    process.submit(double(2))
    assert process.result()[0]["x"][0] == 4


PARENT = """
import os, signal, sys
from megatron_dta.control.service import PlannerProcess
planner = PlannerProcess("planner_handlers:do")
planner.submit({"what": "environment"})
planner.result()
planner.submit({"what": "sleep", "seconds": 60})
"""


@pytest.mark.parametrize(
    ("end", "status"),
    [("", 0), ("raise SystemExit(4)", 4), ("del planner", 0), ("os.kill(os.getpid(), signal.SIGKILL)", -9)],
)
def test_the_process_ends_with_its_parent(environ, end, status):
    variables = environ | {"PYTHONPATH": os.pathsep.join([environ["PYTHONPATH"], str(ROOT)])}
    # the planner process holds standard error: `run` returns when it has ended as well
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PARENT) + end], env=variables, capture_output=True, text=True, timeout=30
    )
    assert (ran.returncode, ran.stderr) == (status, "")


def test_f07_no_process_is_started_after_mpi_is_initialised(monkeypatch, environ):
    initialised = True
    mpi = types.SimpleNamespace(Is_initialized=lambda: initialised)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)
    with pytest.raises(UsageError, match="MPI is initialised and must not fork: start the planner before connecting"):
        PlannerProcess("planner_handlers:do", environ=environ)
    initialised = False
    with PlannerProcess("planner_handlers:do", environ=environ) as planner:
        planner.submit(double(1))
        planner.result()
