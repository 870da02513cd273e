"""What keeps the tree readable: floors, sizes, names, no torch behind the command line. A changed number is reviewed.

Every check is also shown a sample that is bad in each of its ways: a check that cannot fail is a defect.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import allranks
from tests import guardrails

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "allranks"

# Modules without a test file of their own, and why.
WITHOUT_MIRROR: dict[str, str] = {}

# Bytes that a process gets from its own parent or child through a pipe; never from a disk or a store.
MAY_UNPICKLE = {
    "checkpointing/foreign.py: torch.load": "on request, weights_only=True: a reader of tensors that runs no code",
    "training/counted_parameters.py: torch.load": "the call of the user's own model(), with its file mapped",
    "surviving/hosts/backend.py: pickle.loads": "what torch's rendezvous pickled in this process, a moment ago",
    "surviving/launch.py: cloudpickle.loads": "function and results travel through pipes between parent and child",
}


def test_floors() -> None:
    assert guardrails.check_floors(SOURCE) == []


def test_no_import_circles() -> None:
    assert guardrails.check_circles(SOURCE) == []


def test_sizes() -> None:
    assert guardrails.check_sizes(SOURCE) == []


@pytest.mark.parametrize("folder", ["src", "tests", "tools", "bench", "examples"])
def test_names(folder: str) -> None:
    assert guardrails.check_names(ROOT / folder) == []


def test_every_module_has_a_mirror() -> None:
    assert guardrails.check_mirror(SOURCE, ROOT / "tests", WITHOUT_MIRROR) == []


def test_nobody_peels_wrappers_twice() -> None:
    assert guardrails.check_walkers(SOURCE) == []


def test_formulas_name_their_sources() -> None:
    assert guardrails.check_sources(SOURCE) == []


def test_nothing_is_unpickled() -> None:
    assert guardrails.check_unpickling(SOURCE, MAY_UNPICKLE) == []


def test_public_docstrings() -> None:
    assert guardrails.check_docstrings(SOURCE) == []


def test_nothing_is_full_as_a_whole_and_in_part() -> None:
    assert guardrails.check_marks(ROOT / "tests") == []


def torch_free_modules(root: Path) -> list[str]:
    """The dotted names of the modules that must not import torch or numpy, as far as they are there."""
    free = [guardrails.PACKAGE]
    for module in guardrails.modules(root):
        below = module.name.removeprefix(guardrails.PACKAGE + ".")
        if any(below == name or below.startswith(name + ".") for name in guardrails.TORCH_FREE):
            free.append(module.name)
    return free


def heavy_imports(names: list[str], folder: Path) -> list[str]:
    """One process imports all of them in turn: which brought torch or numpy first, and which failed."""
    code = """if True:
        import importlib, json, sys
        complaints, seen = [], set()
        for name in json.loads(sys.argv[1]):
            try:
                importlib.import_module(name)
            except Exception as error:
                complaints.append(f"{name}: {type(error).__name__}: {error}")
            new = {"torch", "numpy"} & sys.modules.keys() - seen
            seen |= new
            complaints += [f"{name} imports {heavy}" for heavy in sorted(new)]
        print(json.dumps(complaints))
    """
    command = [sys.executable, "-c", code, json.dumps(names)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    complaints: list[str] = json.loads(done.stdout)
    return complaints


def test_thinking_needs_no_torch() -> None:
    names = torch_free_modules(SOURCE)
    assert {"allranks", "allranks.config", "allranks.checkpointing.checkpoint", "allranks.cli.main"} <= set(names)
    assert heavy_imports(names, ROOT) == []


def test_the_front_door_is_what_can_be_reached() -> None:
    reached = {name: getattr(allranks, name) for name in allranks.__all__}
    assert sorted(allranks.__all__) == dir(allranks)
    rooms = {module.name.split(".")[1] for module in guardrails.modules(SOURCE) if "." in module.name}
    public = {name for name in vars(allranks) if not name.startswith("_")} - rooms - {"TYPE_CHECKING"}
    assert public | {"__version__"} == set(reached)
    with pytest.raises(AttributeError, match="no attribute 'train'"):
        allranks.train  # noqa: B018


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    """A package that breaks every rule, laid out from one text file."""
    root = tmp_path / "src" / "allranks"
    text = (ROOT / "tests" / "golden" / "bad_tree.txt").read_text()
    for block in text.split("=== ")[1:]:
        name, content = block.split("\n", 1)
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    with (root / "training" / "loop.py").open("a") as file:
        file.write('def long():\n    """Long."""\n' + "    x = 1\n" * 59 + "\n" * 240)
    return root


def test_floors_can_fail(bad: Path) -> None:
    assert guardrails.check_floors(bad) == [
        "attic.py: room 'attic' has no floor; add it to FLOORS in tests/guardrails.py",
        "data/stream.py:2: data imports allranks.parallel.mesh: packages of floor 2 do not know each other",
        "data/utils.py:2: imports allranks.Task through the front door: import the module that holds the name",
        "errors.py:2: errors (floor 0) imports allranks.layout (floor 1): imports point down",
        "parallel/mesh.py:6: parallel (floor 2) imports allranks.training.loop (floor 4): imports point down",
        "training/loop.py:3: imports allranks itself: import the module that holds the name, or "
        "`from allranks import __version__`",
    ]


def test_circles_can_fail(bad: Path) -> None:
    assert guardrails.check_circles(bad) == [
        "data/cut.py: in an import circle with allranks.data.stream",
        "data/stream.py: in an import circle with allranks.data.cut",
        "errors.py: in an import circle with allranks.layout",
        "layout.py: in an import circle with allranks.errors",
    ]


def test_sizes_can_fail(bad: Path) -> None:
    assert guardrails.check_sizes(bad) == [
        "training/loop.py: 305 lines, more than 300",
        "training/loop.py:5: long has 61 lines, more than 60",
    ]


def test_names_can_fail(bad: Path) -> None:
    (bad / "data" / "helpers").mkdir()
    assert guardrails.check_names(bad) == ["data/helpers: a drawer, not a noun", "data/utils.py: a drawer, not a noun"]


def test_the_mirror_can_fail(bad: Path, tmp_path: Path) -> None:
    tests = tmp_path / "tests"
    for path in bad.rglob("*.py"):
        mirror = tests / path.relative_to(bad).parent / f"test_{path.name}"
        mirror.parent.mkdir(parents=True, exist_ok=True)
        mirror.touch()
    (tests / "data" / "test_cut.py").unlink()
    (tests / "test_attic.py").unlink()
    exceptions = {"attic.py": "told elsewhere", "layout.py": "not needed", "gone.py": "gone"}
    assert guardrails.check_mirror(bad, tests, exceptions) == [
        "data/cut.py: no tests/data/test_cut.py",
        "layout.py: has a test file and needs no exception",
        "gone.py: an exception for a file that is not there",
    ]


def test_walkers_can_fail(bad: Path) -> None:
    assert guardrails.check_walkers(bad) == ["training/walk.py:5: named_parameters: take a ParameterMap as an argument"]


def test_sources_can_fail(bad: Path) -> None:
    (bad / "planning").mkdir(exist_ok=True)
    named = 'def ring_seconds() -> float:\n    """Of a ring (2310.01889)."""\n'
    bare = 'def all_bytes() -> float:\n    """Of a ring."""\n'
    (bad / "planning" / "rings.py").write_text(named + bare)
    assert guardrails.check_sources(bad) == ["planning/rings.py:3: all_bytes: its docstring names no source"]


def test_sources_of_private_functions_and_methods_can_fail(bad: Path) -> None:
    (bad / "planning").mkdir(exist_ok=True)
    private = 'def _gathered_bytes() -> float:\n    """Of a ring."""\n'
    (bad / "planning" / "rings.py").write_text(private)
    earnest = "    def _kept(self, size: float) -> float:\n        return 2 * size * 3 / self.tp\n"
    light = '    def all(self) -> float:\n        """Of both."""\n        return self.one + self.two\n'
    sourced = '    def few(self, n: float) -> float:\n        """Arithmetic."""\n        return 2 * n * n + n\n'
    (bad / "planning" / "memory.py").write_text(f"class Held:\n{earnest}{light}{sourced}")
    assert guardrails.check_sources(bad) == [
        "planning/memory.py:2: _kept: its docstring names no source",
        "planning/rings.py:1: _gathered_bytes: its docstring names no source",
    ]
    (bad / "planning" / "memory.py").rename(bad / "planning" / "search.py")  # which chooses, and calculates nothing
    assert len(guardrails.check_sources(bad)) == 1


def test_the_modules_of_formulas_are_there() -> None:
    assert {f"{name}.py" for name in guardrails.FORMULAS} <= {path.name for path in (SOURCE / "planning").iterdir()}


def test_unpickling_can_fail(bad: Path) -> None:
    allowed = {"training/read.py: pickle.loads": "its own parent's pipe", "training/walk.py: pickle.loads": "not there"}
    assert sorted(guardrails.check_unpickling(bad, allowed)) == [
        "training/read.py:6: torch.load unpickles",
        "training/read.py:8: all_gather_object unpickles",
        "training/read.py:9: allow_pickle unpickles",
        "training/walk.py: pickle.loads: allowed, and not there",
    ]
    assert "training/read.py:4: pickle.loads unpickles" in guardrails.check_unpickling(bad, {})


def test_docstrings_can_fail(bad: Path) -> None:
    assert guardrails.check_docstrings(bad) == [
        "parallel/__init__.py: no docstring",
        "parallel/mesh.py:3: g has no docstring",
        "training/bare.py: no docstring",
        "training/bare.py:1: Bare has no docstring",
        "training/bare.py:2: Bare.method has no docstring",
        "verifying/heir.py:14: Heir.untold has no docstring",
    ]


MARKED = """
import pytest
LONG: list = [1, pytest.param(2, marks=pytest.mark.full)]

@pytest.mark.full
@pytest.mark.sample(2)
def test_sampled(): pass

@pytest.mark.full
@pytest.mark.parametrize("number", LONG)
def test_named(number): pass

@pytest.mark.full
class TestMany:
    @pytest.mark.sample(2)
    @pytest.mark.parametrize("number", [pytest.param(2, marks=[pytest.mark.full])])
    def test_one(self, number): pass

@pytest.mark.sample(2)
@pytest.mark.parametrize("number", LONG)
def test_either(number): pass

@pytest.mark.full
@pytest.mark.parametrize("number", [1, 2])
def test_long(number): pass
"""


def test_marks_can_fail(tmp_path: Path) -> None:
    (tmp_path / "test_marked.py").write_text(MARKED)
    (tmp_path / "inner").mkdir()
    whole = "import pytest\npytestmark = [pytest.mark.full]\n"
    (tmp_path / "inner" / "test_whole.py").write_text(whole + "@pytest.mark.sample(3)\ndef test_one(): pass\n")
    assert guardrails.check_marks(tmp_path) == [
        "inner/test_whole.py:4: test_one is full as a whole, and sample",
        "test_marked.py:7: test_sampled is full as a whole, and sample",
        "test_marked.py:11: test_named is full as a whole, and full in a case",
        "test_marked.py:17: test_one is full as a whole, and sample and full in a case",
    ]


def test_thinking_without_torch_can_fail(tmp_path: Path) -> None:
    for name, content in {"light.py": "", "heavy.py": "import numpy\n", "broken.py": "import nowhere\n"}.items():
        (tmp_path / name).write_text(content)
    assert heavy_imports(["light", "heavy", "broken"], tmp_path) == [
        "heavy imports numpy",
        "broken: ModuleNotFoundError: No module named 'nowhere'",
    ]
