"""Every process runs the same code."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist

from allranks.errors import TaskError
from allranks.stepping.same_code import code_of, find_other_code
from tests.distributed.pool import Pools
from tests.distributed.sessions import config_of, session_of
from tests.distributed.tasks import Tiny

# Its names are replaced below, which a type checker would only allow for names that it exports.
alike: Any = importlib.import_module("allranks.stepping.alike")
SAME = {"allranks": "1.0", "torch": "2.13.0", "python": "3.11.7", "task.py": "0123456789ab"}


def test_the_first_rank_that_runs_other_code_is_named_with_what_differs() -> None:
    assert find_other_code([("a", SAME)] * 3) is None
    error = find_other_code([("a", SAME), ("a", SAME), ("b", SAME | {"task.py": "ba9876543210"})])
    assert isinstance(error, TaskError)
    assert "rank 2 on b runs other code than rank 0 on a: task.py is ba9876543210 instead of 0123456789ab (" in str(
        error
    )
    error = find_other_code([("a", SAME), ("b", {name: "x" for name in SAME})])
    assert "torch is x instead of 2.13.0, python is x instead of 3.11.7 and 1 more (" in str(error)


def test_what_one_rank_alone_has_imported_differs_from_nothing() -> None:
    assert find_other_code([("a", SAME), ("b", SAME | {"drawing.py": "1"})]) is None
    assert find_other_code([("a", SAME | {"drawing.py": "1"}), ("b", SAME)]) is None


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's Task in a file, with a module beside it, one below it, and one that is installed below it."""
    installed = tmp_path / "env" / "site-packages"
    for place in (tmp_path / "parts", installed):
        place.mkdir(parents=True)
    for file in (
        tmp_path / "task_here.py",
        tmp_path / "beside.py",
        tmp_path / "parts" / "low.py",
        installed / "lib.py",
    ):
        file.write_text("class Mine:\n    pass\n")
        name = f"test_same_code_{file.stem}"
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
    (tmp_path / "unused.py").write_text("x = 1\n")
    return tmp_path


def test_the_users_own_files_count_by_their_content(folder: Path) -> None:
    task: Any = sys.modules["test_same_code_task_here"]
    before = code_of(task.Mine)
    assert list(before) == ["allranks", "torch", "python", "beside.py", "parts/low.py", "task_here.py"]
    (folder / "parts" / "low.py").write_text("class Mine:\n    size = 2\n")
    after = code_of(task.Mine)
    assert [name for name in before if before[name] != after[name]] == ["parts/low.py"]
    (folder / "beside.py").unlink()
    assert "beside.py" not in code_of(task.Mine), "what has gone differs from nothing"


def test_a_task_without_a_file_counts_by_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nowhere", ModuleType("nowhere"))
    assert list(code_of(type("Mine", (), {"__module__": "nowhere"}))) == ["allranks", "torch", "python"]


def start_with_other_code(task: Any) -> str:
    """In a worker: rank 1 has another version of torch."""
    real = alike.code_of
    alike.code_of = lambda of: real(of) | ({"torch": "1.0"} if dist.get_rank() == 1 else {})
    try:
        session_of(task, config_of("ddp", "train.global_batch=6"))
    except TaskError as error:
        return str(error)
    finally:
        alike.code_of = real
    return ""


@pytest.mark.distributed
def test_all_ranks_refuse_alike(pool: Pools) -> None:
    first, second = pool(2).run(start_with_other_code, Tiny())
    assert first == second and "rank 1 on " in first and "torch is 1.0 instead of 2." in first
