"""`allranks new`: the file it writes is a Task that runs and learns."""

import errno
import io
import json
import os
from pathlib import Path

import pytest
import torch

from allranks.cli import new
from allranks.cli.main import main
from allranks.errors import ConfigError
from allranks.task import Task, load_task
from allranks.task_loading import missing_methods


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_it_prints_the_next_commands(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "mine.py"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.splitlines()[0].startswith("Wrote mine.py: ")
    assert [line.strip() for line in out.splitlines()[2:]] == [
        "allranks train mine.py",
        "allranks train mine.py --nproc 2 train.epochs=5 task.width=128",
    ]


def test_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "mine.py", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["file"] == "mine.py"
    assert document["next"][0] == "allranks train mine.py"


def test_it_is_short_and_says_how_to_train_it(folder: Path) -> None:
    main(["new", "mine.py"])
    text = (folder / "mine.py").read_text()
    assert len(text.splitlines()) <= 45
    assert "allranks train mine.py" in text


BAD = [
    ("there.py", "'there.py' exists already, and is left as it is: name another file"),
    ("mine", "'mine' is no Python file: write mine.py"),
    ("no/mine.py", "'no/mine.py' cannot be written: No such file or directory"),
]


@pytest.mark.parametrize(("path", "message"), BAD, ids=[path for path, _ in BAD])
def test_what_cannot_be_written_is_refused(
    path: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "there.py").write_text("mine\n")
    assert main(["new", path]) == 2
    assert capsys.readouterr() == ("", f"allranks: error: {message}\n")
    assert (folder / "there.py").read_text() == "mine\n"
    assert sorted(file.name for file in folder.iterdir()) == ["there.py"]


def train_alone(task: Task, *, steps: int) -> None:
    """A plain loop: the template has to be right without allranks's own."""
    torch.manual_seed(0)
    model = task.model()
    assert isinstance(model, torch.nn.Module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=float(str(task.defaults["optimizer.lr"])))
    data = task.dataset("train")
    for step in range(steps):
        batch = task.collate([data[(step * 64 + n) % len(data)] for n in range(64)])
        optimizer.zero_grad()
        (task.loss(model(batch[0]), batch) / 64).backward()
        optimizer.step()
    held_out = task.dataset("validation")
    batch = task.collate([held_out[n] for n in range(len(held_out))])
    hits, count = task.metrics(model(batch[0]), batch)["accuracy"]
    assert hits / count > 0.95


@pytest.mark.full
def test_the_template_learns(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))  # torch sets it at the first optimizer's step
    main(["new", "mine.py"])
    task = load_task("mine.py", {"width": 32})
    assert task.settings == {"width": 32}
    assert missing_methods(type(task), Task) == []
    train_alone(task, steps=900)


def test_the_template_s_loss_is_a_sum_and_its_splits_differ(folder: Path) -> None:
    main(["new", "mine.py"])
    task = load_task("mine.py")
    data = task.dataset("train")
    model = task.model()
    assert isinstance(model, torch.nn.Module)
    three = task.collate([data[n] for n in range(3)])
    parts = [task.collate([data[0]]), task.collate([data[1], data[2]])]
    whole = task.loss(model(three[0]), three)
    torch.testing.assert_close(whole, sum(task.loss(model(part[0]), part) for part in parts))
    assert not torch.equal(data[0][0], task.dataset("validation")[0][0])


def test_a_full_disk_leaves_nothing_and_the_next_try_writes_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(file: io.BufferedWriter, data: bytes) -> None:
        file.write(data[:10])
        file.flush()
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(new, "_fill", fail)
        with pytest.raises(ConfigError, match=r"'mine.py' cannot be written: No space left on device"):
            new.write_template(Path("mine.py"))
    assert list(folder.iterdir()) == []
    assert main(["new", "mine.py"]) == 0


def test_a_name_that_is_no_utf8(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = os.fsdecode(b"t\xe9.py")
    assert main(["new", path]) == 0
    compile(Path(path).read_bytes(), path, "exec")
    assert "allranks train t\\udce9.py" in capsys.readouterr().out
