"""The architecture as checks on the source: who may import whom, what nobody may use, how long a file may be."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = sorted((ROOT / "megatron_dta").rglob("*.py"))
SOURCES = sorted(file for folder in ("megatron_dta", "tools", "tests") for file in (ROOT / folder).rglob("*.py"))
KERNELS = {"attention/flash4.py"}
FORBIDDEN_NAMES = {"util", "utils", "helper", "helpers", "manager", "managers", "misc", "common", "v2"}
UNPICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}

STDLIB = sys.stdlib_module_names - UNPICKLERS
NUMPY, TORCH = {"numpy"}, {"torch"}
FLASH4 = {"cutlass", "flash_attn"}


def own(*modules: str) -> set[str]:
    return {f"megatron_dta.{module}" for module in modules}


ALLOWED = {
    "tree": STDLIB | NUMPY | own("errors", "model_config", "tree"),
    "data": STDLIB | NUMPY | own("errors", "data"),
    "rl": STDLIB | TORCH | own("rl"),
    "attention": STDLIB | NUMPY | TORCH | own("errors", "tree", "attention"),
    "control": STDLIB | NUMPY | own("errors", "tree", "data", "control"),
}
ALSO_ALLOWED = {"attention/flash4.py": FLASH4, "control/mpi.py": {"mpi4py"}, "control/gloo.py": TORCH}
COMMANDS = own("cli", "train", "verify", "verify_command", "verify_parallel", "plan_command", "profile_command")
COMMANDS |= own("profile_fit", "drawing")
FORBIDDEN = {
    "mcore": COMMANDS | own("engine", "checkpoint", "config", "data", "control", "processes", "progress"),
    "engine": COMMANDS | own("checkpoint", "control", "processes", "progress"),
    "checkpoint": COMMANDS | own("control", "processes"),
}


def name_of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def imports(file: Path, *, top_level: bool = False) -> list[str]:
    """List every imported module by its full name, `from a import b` as a.b; `top_level` skips those in functions."""
    tree = ast.parse(file.read_text())
    lazy = {n for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for n in ast.walk(f)} if top_level else set()
    found: list[str] = []
    for node in ast.walk(tree):
        if node in lazy:
            continue
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(file)}: relative import"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def is_in(module: str, packages: set[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def files_in(folder: str) -> list[Path]:
    files = sorted((ROOT / "megatron_dta" / folder).rglob("*.py"))
    assert files, f"no file in {folder}"
    return files


@pytest.mark.parametrize("folder", ALLOWED)
def test_folder_imports_only_what_it_may(folder):
    for file in files_in(folder):
        allowed = ALLOWED[folder] | ALSO_ALLOWED.get(file.relative_to(ROOT / "megatron_dta").as_posix(), set())
        foreign = [module for module in imports(file) if not is_in(module, allowed)]
        assert not foreign, name_of(file)


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_folder_does_not_import_what_is_above_it(folder):
    for file in files_in(folder):
        upward = [module for module in imports(file) if is_in(module, FORBIDDEN[folder])]
        assert not upward, name_of(file)


WITHOUT_TORCH = [
    "plan_command",
    "drawing",
    "profile_fit",
    "model_config",
    "progress",
    "config",
    "axes",
    "errors",
    "cli",
]


@pytest.mark.parametrize("module", [*WITHOUT_TORCH, "__main__"])
def test_planning_reaches_no_torch(module):
    """What `plan` runs starts without torch: its modules import neither torch nor a folder that does."""
    with_torch = TORCH | {"megatron"} | own("attention", "mcore", "engine", "rl", "checkpoint", "train", "verify")
    with_torch |= own("processes", "profile_command", "verify_command", "verify_parallel", "control.gloo")
    file = ROOT / "megatron_dta" / f"{module}.py"
    assert not [name for name in imports(file, top_level=True) if is_in(name, with_torch)]


def test_flash4_imports_its_package_when_it_runs():
    top_level = imports(ROOT / "megatron_dta/attention/flash4.py", top_level=True)
    assert not [module for module in top_level if is_in(module, FLASH4)]


def test_control_starts_neither_mpi_nor_torch_when_it_is_imported():
    for file in files_in("control"):
        # communicators are imported where one is made
        foreign = {"mpi4py"} | own("control.mpi", "control.gloo") | (TORCH if file.name != "gloo.py" else set())
        assert not [module for module in imports(file, top_level=True) if is_in(module, foreign)], name_of(file)


def test_only_mcore_imports_megatron():
    users = {name_of(file) for file in SOURCES for module in imports(file) if is_in(module, {"megatron"})}
    package_users = {user for user in users if user.startswith("megatron_dta/")}
    assert package_users, "nothing imports megatron.core: this test looks in the wrong place"
    assert all(user.startswith("megatron_dta/mcore/") for user in package_users)


def test_only_one_file_reads_parallel_state():
    readers = [name_of(file) for file in PACKAGE if names_in(file) & {"parallel_state", "mpu"}]
    assert readers == ["megatron_dta/mcore/parallel.py"]


def names_in(file: Path) -> set[str]:
    """Return every identifier that a file's code uses: names, attributes, imported modules."""
    tree = ast.parse(file.read_text())
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    used |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return used | {part for module in imports(file) for part in module.split(".")}


@pytest.mark.parametrize("file", [file for file in SOURCES if not name_of(file).startswith("tests/")], ids=name_of)
def test_g03_nothing_unpickles(file):
    assert not names_in(file) & UNPICKLERS
    for call in (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)):
        assert ast.unparse(call.func) not in ("torch.load", "eval", "exec")
        options = {option.arg: ast.unparse(option.value) for option in call.keywords}
        assert options.get("allow_pickle", "False") == "False"


@pytest.mark.parametrize("file", SOURCES, ids=name_of)
def test_files_stay_short_and_are_named_for_what_they_hold(file):
    num_lines = len(file.read_text().splitlines())
    assert num_lines <= 600
    assert not FORBIDDEN_NAMES & {
        word for part in file.relative_to(ROOT).with_suffix("").parts for word in part.split("_")
    }


@pytest.mark.parametrize("file", PACKAGE, ids=name_of)
def test_package_files_are_small_and_say_what_they_are(file):
    text = file.read_text()
    if not text.strip():
        assert file.name == "__init__.py", "only a package marker may be empty"
        return
    assert ast.get_docstring(ast.parse(text)), "no module docstring"
    if file.relative_to(ROOT / "megatron_dta").as_posix() not in KERNELS:
        assert len(text.splitlines()) <= 400
