"""`allranks train`: arguments told apart by form, one request, one call."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from allranks.cli.main import main
from allranks.cli.train import read_arguments
from allranks.errors import ConfigError
from allranks.request import TrainRequest


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[TrainRequest]:
    """The requests that reach the library, which answers 75 to each."""
    seen: list[TrainRequest] = []

    def train(request: TrainRequest) -> int:
        seen.append(request)
        return 75

    library = ModuleType("allranks.cli.running")
    library.train = train  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "allranks.cli.running", library)
    return seen


def test_nothing_asks_for_the_demo(requests: list[TrainRequest]) -> None:
    assert main(["train"]) == 75
    assert requests == [TrainRequest()]


def test_every_argument_reaches_the_request(requests: list[TrainRequest]) -> None:
    words = "train a/b.py:Net train.seed=-1 --layout dp_shard=2 run.toml --nproc 2 --run d --device cpu --show --json"
    assert main([*words.split(), "--change", "train.seed", "task.x=a b", "--change", "data.text"]) == 75
    assert requests == [
        TrainRequest(
            task_spec="a/b.py:Net",
            toml=Path("run.toml"),
            overrides=("train.seed=-1", "task.x=a b"),
            layout="dp_shard=2",
            nproc=2,
            run=Path("d"),
            resume=None,
            device="cpu",
            show=True,
            json=True,
            change=("train.seed", "data.text"),
        )
    ]


def test_resume_takes_keys(requests: list[TrainRequest]) -> None:
    assert main(["train", "--resume", "runs/x", "train.steps=9"]) == 75
    assert requests == [TrainRequest(resume=Path("runs/x"), overrides=("train.steps=9",))]


@pytest.mark.parametrize(
    "task", ["a.py", "a.py:Net", "./a/b.py", "/x y/a=b.py:Net", "package.module:Name", "module:Name", "~/a.py"]
)
def test_what_has_the_form_of_a_task(task: str) -> None:
    assert read_arguments([task]) == (task, None, ())


@pytest.mark.parametrize("toml", ["run.toml", "/a=b/run.toml", "a.py.toml"])
def test_what_has_the_form_of_a_config(toml: str) -> None:
    assert read_arguments([toml]) == (None, Path(toml), ())


@pytest.mark.parametrize("key", ["data.text=*.py", "task.file=run.toml", "task.spec=a:B", "train.micro-batch=4", "x="])
def test_what_has_the_form_of_a_key(key: str) -> None:
    assert read_arguments([key]) == (None, None, (key,))


FORMS = "expected a task (file.py, file.py:Name or package.module:Name), a config (RUN.toml) or key.sub=value"
BAD = [
    (["train", "mine"], f"argument 'mine' is neither a task nor a config nor a key; {FORMS}"),
    (["train", "package.module"], f"argument 'package.module' is neither a task nor a config nor a key; {FORMS}"),
    (["train", "=3"], f"argument '=3' is neither a task nor a config nor a key; {FORMS}"),
    (["train", "a.py:"], f"argument 'a.py:' is neither a task nor a config nor a key; {FORMS}"),
    (["train", ""], f"argument '' is neither a task nor a config nor a key; {FORMS}"),
    (["train", "here"], "argument 'here' is neither a task nor a config nor a key; did you mean 'here.py'?"),
    (["train", "a.py", "b.py"], "'a.py' and 'b.py' are two tasks: give one"),
    (["train", "a.toml", "b.toml"], "'a.toml' and 'b.toml' are two config files: give one"),
    (
        ["train", "--show", "--show-sharding"],
        "--show prints what a run would be, and --show-sharding makes a step of it: give one of them",
    ),
    (["train", "--run", "a", "--resume", "b"], "--run a and --resume b both name the run directory: give one of them"),
    (
        ["train", "--resume", "b", "run.toml"],
        "--resume continues with the run's own config.toml: give key=value instead of run.toml",
    ),
]


@pytest.mark.parametrize(("words", "message"), BAD, ids=[" ".join(words) for words, _ in BAD])
def test_a_bad_argument_is_refused_before_the_library_is_called(
    words: list[str],
    message: str,
    requests: list[TrainRequest],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "here.py").touch()
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert capsys.readouterr() == ("", f"allranks: error: {message}\n")
    assert requests == []


def test_read_arguments_raises_what_main_prints() -> None:
    with pytest.raises(ConfigError, match="two tasks"):
        read_arguments(["a.py", "m:N"])
