"""From a spec to the user's class: each mistake is one TaskError that shows the user's own line."""

import importlib
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from allranks.errors import TaskError
from allranks.task import Task
from allranks.task_loading import TaskSpec, load_class

BODY = """
    def model(self): ...
    def dataset(self, split): return Squares()
    def loss(self, output, batch): ...
"""
SQUARES = """
class Squares:
    def __len__(self): return 4
    def __getitem__(self, index): return index * index
"""


@pytest.fixture(autouse=True)
def _own_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo what loading does to this process: the folders on sys.path and the modules."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_text("from allranks.task import Task\n" + text)
    return file


def refusal(spec: str | Path) -> str:
    with pytest.raises(TaskError) as caught:
        load_class(TaskSpec.parse(str(spec)), Task)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "file", "module", "name"),
    [
        ("a/b.py", "/w/a/b.py", "", None),
        ("b.py:Name", "/w/b.py", "", "Name"),
        ("/x/b.py:Name", "/x/b.py", "", "Name"),
        ("package.module:Name", None, "package.module", "Name"),
        ("package.module", None, "package.module", None),
    ],
)
def test_specs(text: str, file: str | None, module: str, name: str | None) -> None:
    spec = TaskSpec.parse(text, Path("/w"))
    assert spec == TaskSpec(None if file is None else Path(file), module, name)
    assert TaskSpec.parse(str(spec)) == spec


@pytest.mark.parametrize("text", ["", "a/b", "x.py:", "x.py:not a name", ":Name", "run.toml2/x", "a-b.c"])
def test_what_is_no_spec(text: str) -> None:
    with pytest.raises(TaskError, match=r"expected file.py, file.py:Name or package.module:Name"):
        TaskSpec.parse(text)


def test_a_missing_file_names_the_nearest(tmp_path: Path) -> None:
    write(tmp_path, "training.py", "")
    assert f"{tmp_path} has no trainin.py; did you mean training.py?" in refusal(tmp_path / "trainin.py")
    assert "no folder" in refusal(tmp_path / "no" / "task.py")
    (tmp_path / "folder.py").mkdir()
    assert "is a folder" in refusal(tmp_path / "folder.py")


def test_a_syntax_error_shows_the_users_file_line_and_caret(tmp_path: Path) -> None:
    file = write(tmp_path, "torn.py", "x = 1\ndef model(:\n    pass\n")
    text = refusal(file)
    assert f'File "{file}", line 3' in text
    assert "    def model(:" in text
    assert "^" in text.splitlines()[-2]


def test_a_failing_import_shows_the_users_last_line(tmp_path: Path) -> None:
    file = write(tmp_path, "needy.py", "import json\nimport nothing_like_this\n")
    text = refusal(file)
    assert f'File "{file}", line 3' in text
    assert "import nothing_like_this" in text
    assert "ModuleNotFoundError: No module named 'nothing_like_this'" in text
    helper = write(tmp_path, "beside_it.py", "import json\njson.loads('')\n")
    text = refusal(write(tmp_path, "deep.py", "import beside_it\n"))
    assert f'File "{helper}", line 3' in text
    assert "json/decoder" not in text
    assert "deep.py cannot be imported" in text
    assert "SystemExit: 3" in refusal(write(tmp_path, "leaves.py", "raise SystemExit(3)\n"))


def test_a_missing_module_is_told_from_a_missing_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "no module 'nowhere.tasks'" in refusal("nowhere.tasks:Name")
    write(tmp_path, "local_module.py", "import nothing_like_this\n")
    assert "import nothing_like_this" in refusal("local_module:Name")


def test_none_and_several(tmp_path: Path) -> None:
    none = refusal(write(tmp_path, "none.py", "x = 1\n"))
    assert "none.py has no Task: write `class MyTask" in none
    assert "A loop of your own is started by torchrun or python" in none and "how-to/own-loop.md" in none
    two = write(tmp_path, "two.py", f"class A(Task):{BODY}\nclass B(Task):{BODY}\n")
    assert "two.py has several Tasks (A, B): name one, as in two.py:A" in refusal(two)
    assert load_class(TaskSpec.parse(f"{two}:B"), Task).__name__ == "B"


def test_what_is_no_choice_does_not_count(tmp_path: Path) -> None:
    text = f"class Base(Task):\n    width: int = 1\nclass Only(Base):{BODY}\nAlias = Only\n"
    file = write(tmp_path, "based.py", text)
    assert load_class(TaskSpec.parse(str(file)), Task).__name__ == "Only"
    importer = write(tmp_path, "importer.py", f"from based import Only\nclass Other(Task):{BODY}\n")
    assert load_class(TaskSpec.parse(str(importer)), Task).__name__ == "Other"
    again = write(tmp_path, "again.py", "from based import Only\n")
    assert load_class(TaskSpec.parse(str(again)), Task).__name__ == "Only"


def test_a_wrong_name(tmp_path: Path) -> None:
    file = write(tmp_path, "named.py", f"class Digits(Task):{BODY}\nclass Net(dict): pass\nwidth = 3\n")
    assert "named.py has no Task Digit; did you mean Digits?" in refusal(f"{file}:Digit")
    assert "named.py has no Task Zebra; it has Digits" in refusal(f"{file}:Zebra")
    assert "Net in named.py is a class of dict, not a subclass of allranks.Task" in refusal(f"{file}:Net")
    assert "width in named.py is a int" in refusal(f"{file}:width")


def test_siblings_import_and_the_module_keeps_its_name(tmp_path: Path) -> None:
    write(tmp_path, "neighbour.py", "WIDTH = 7\n")
    file = write(
        tmp_path, "my_task.py", f"from neighbour import WIDTH\nclass Mine(Task):{BODY}    width: int = WIDTH\n"
    )
    found = load_class(TaskSpec.parse(str(file)), Task)
    assert found.__module__ == "my_task"
    assert vars(found)["width"] == 7
    assert load_class(TaskSpec.parse(str(file)), Task) is found


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("plain_name.py", "fork"),
        pytest.param("plain_name.py", "spawn", marks=pytest.mark.full),
        ("my-task.py", "spawn"),
        pytest.param("random.py", "spawn", marks=pytest.mark.full),
    ],
)
def test_worker_processes_of_a_dataloader_can_read_the_users_dataset(tmp_path: Path, name: str, method: str) -> None:
    file = write(tmp_path, name, f"{SQUARES}\nclass Mine(Task):{BODY}\n")
    program = f"""
from torch.utils.data import DataLoader
from allranks.task import load_task
if __name__ == "__main__":
    task = load_task({str(file)!r})
    loader = DataLoader(task.dataset("train"), batch_size=2, num_workers=1, multiprocessing_context={method!r})
    print([batch.tolist() for batch in loader])
"""
    script = tmp_path / "elsewhere" / "program_that_loads.py"
    script.parent.mkdir()
    script.write_text(program)
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=120)
    assert ran.stdout.strip() == "[[0, 1], [4, 9]]", ran.stderr


def test_two_files_of_one_name_stay_apart(tmp_path: Path) -> None:
    files = []
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        text = f"FOLDER = {folder!r}\n{SQUARES}\nclass Mine(Task):{BODY}    folder: str = FOLDER\n"
        files.append(write(tmp_path / folder, "same_name.py", text))
    classes = [load_class(TaskSpec.parse(str(file)), Task) for file in files]
    assert [vars(found)["folder"] for found in classes] == ["one", "two"]
    assert [pickle.loads(pickle.dumps(found)) for found in classes] == classes


def test_a_file_whose_name_is_no_utf8_is_found_again_by_any_process(tmp_path: Path) -> None:
    file = write(tmp_path, os.fsdecode(b"t\xe9.py"), f"{SQUARES}\nclass Mine(Task):{BODY}")
    found = load_class(TaskSpec.parse(str(file)), Task)
    del sys.modules[found.__module__]
    again = pickle.loads(pickle.dumps(importlib.import_module(found.__module__).Mine))
    assert again.__module__ == found.__module__ and again is not found
