"""Bad inputs through the real command: the exit code, one line that says it, and nothing left that blocks the next."""

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from allranks.cli.main import main
from allranks.run import Run
from allranks.surviving import forkserver
from tests.commands import POINTS, PROGRAMS, allranks, environment, steps

WRONG = str(PROGRAMS / "wrong.py")
GOOD = ("train.steps=4", "train.global_batch=8", "checkpoint.every=2", "track.tensorboard=false", "--nproc", "1")
Capture = pytest.CaptureFixture[str]


def one_line(ran: "subprocess.CompletedProcess[str]", *words: str) -> None:
    """What a refusal says on standard error."""
    assert len(ran.stderr.strip().splitlines()) == 1, ran.stderr
    assert all(word in ran.stderr for word in words), ran.stderr


def listing(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


def refused(*arguments: str, capsys: Capture) -> str:
    """What a command says that is refused, with 78, before it starts anything."""
    capsys.readouterr()
    assert main(["train", *arguments]) == 78
    error = capsys.readouterr().err.strip()
    assert len(error.splitlines()) == 1, error
    return error


def show(*arguments: str, capsys: Capture) -> list[str]:
    """What a command would decide, without starting it."""
    capsys.readouterr()
    assert main(["train", *arguments, "--show", "--json"]) == 0
    return [decision["what"] for decision in json.loads(capsys.readouterr().out)["decisions"]]


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("task.wrong=mean", ("Line.loss returns a mean over targets", "return the SUM")),
        pytest.param(
            "task.wrong=vector", ("float32 tensor [5, 1]", "return one floating-point number"), marks=pytest.mark.full
        ),
        pytest.param("task.wrong=detached", ("without a gradient",), marks=pytest.mark.full),
        pytest.param(
            "task.wrong=state",
            ("state_dict().mean: a torch.Tensor cannot be kept", "tensor.tolist()"),
            marks=pytest.mark.full,
        ),
        pytest.param("task.num_points=0", ("TensorDataset is empty",), marks=pytest.mark.full),
        ("task.num_points=7", ("7 samples, fewer than train.global_batch(8)", "train.global_batch=7")),
    ],
)
def test_what_only_a_worker_sees_is_refused_and_binds_nobody(
    tmp_path: Path, wrong: str, words: tuple[str, ...], capsys: Capture
) -> None:
    one_line(allranks("train", WRONG, *GOOD, wrong, "--run", "run", folder=tmp_path, check=78), "rank 0", *words)
    run = Run.open(tmp_path / "run")
    assert not steps(run.path) and not list(run.checkpoints.iterdir()) and run.holder() is None
    (anew, *_) = show(WRONG, *GOOD, "--run", str(run.path), capsys=capsys)
    assert "begins anew" in anew


@pytest.mark.full
def test_a_corrected_command_begins_anew_until_a_step_was_made(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("train", WRONG, *GOOD, "--run", "run")
    allranks(*asked, "train.global_batch=32", folder=tmp_path, check=78)
    first = Run.open(tmp_path / "run")
    ran = allranks(*asked, folder=tmp_path)
    assert "begins anew in run, because the attempt before made no step" in ran.stdout
    assert "train.global_batch 32 -> 8" in ran.stdout and "starts from the beginning" not in ran.stdout
    run = Run.open(tmp_path / "run")
    assert run.id != first.id and run.attempts == 1 and run.config().train.global_batch == 8
    assert list(steps(run.path)) == [1, 2, 3, 4] and "fewer than" not in run.log(0).read_text()
    report = json.loads(allranks("report", "run", "--json", folder=tmp_path).stdout)
    assert (report["state"], report["error"], len(report["attempts"])) == ("done", None, 1)
    assert "begins anew" in report["decisions"][0]["what"]

    before = listing(run.path)
    monkeypatch.setattr(forkserver, "start", lambda *_, **__: None)
    there = ("--run", str(run.path))
    assert "train.global_batch 8 -> 10" in refused(WRONG, *GOOD, "train.global_batch=10", *there, capsys=capsys)
    assert "is a run of" in refused(POINTS, *GOOD, *there, capsys=capsys)
    assert listing(run.path) == before and Run.open(run.path).id == run.id


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("trained")
    allranks("train", WRONG, *GOOD, "--run", "run", folder=folder)
    return folder / "run"


@pytest.fixture
def torn(trained: Path, tmp_path: Path) -> Path:
    """A copy of it, whose newest checkpoint has lost the end of a file; the file."""
    shutil.copytree(trained, tmp_path / "run")
    file = tmp_path / "run" / "checkpoints" / "step-00000004" / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    return file


@pytest.mark.full
def test_a_torn_checkpoint_is_passed_over_for_an_older_one(torn: Path, tmp_path: Path) -> None:
    ran = allranks("train", "--resume", "run", "train.steps=5", folder=tmp_path)
    assert "warning: passed over a newer checkpoint" in ran.stdout and torn.name in ran.stdout
    assert "resumed at step 2" in ran.stdout and max(steps(tmp_path / "run")) == 5


@pytest.mark.full
def test_a_torn_checkpoint_without_an_older_one_is_refused_and_kept(torn: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.rmtree(run / "checkpoints" / "step-00000002")
    content, before = torn.read_bytes(), listing(run / "checkpoints")
    one_line(allranks("train", "--resume", "run", folder=tmp_path, check=78), "no good checkpoint", str(torn))
    assert listing(run / "checkpoints") == before and torn.read_bytes() == content and len(steps(run)) == 4


@pytest.mark.full
def test_a_file_in_the_way_is_refused(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "runs").write_text("mine")
    one_line(allranks("train", WRONG, *GOOD, "--run", "notes.txt/run", folder=tmp_path, check=78), "notes.txt")
    monkeypatch.setattr(forkserver, "start", lambda *_, **__: None)
    monkeypatch.chdir(tmp_path)
    assert "notes.txt" in refused(WRONG, *GOOD, "--run", "notes.txt", capsys=capsys)
    assert "runs" in refused(WRONG, *GOOD, capsys=capsys)
    assert listing(tmp_path) == ["notes.txt", "runs"]


@pytest.fixture
def read_only(trained: Path, tmp_path: Path) -> Iterator[list[str]]:
    """A command before a command: what stands in tmp_path/place can be read, and is mounted read-only for it alone."""
    shutil.copytree(trained, tmp_path / "place" / "run")
    mount = 'mount --bind place place && mount -o remount,ro,bind place && exec "$@"'
    prefix = ["unshare", "--mount", "sh", "-c", mount, "sh"]
    tried = shutil.which("unshare") and subprocess.run(
        [*prefix, "true"], cwd=tmp_path, capture_output=True, check=False
    )
    if not tried or tried.returncode:
        pytest.skip("no read-only mount can be made here (needs root)")
    yield prefix


@pytest.mark.full
def test_a_read_only_place_is_refused(read_only: list[str], tmp_path: Path) -> None:
    before = listing(tmp_path)
    for arguments in ((WRONG, *GOOD, "--run", "place/new"), ("--resume", "place/run", "train.steps=5")):
        ran = allranks("train", *arguments, folder=tmp_path, check=78, launcher=read_only)
        one_line(ran, "place", "cannot be written: Read-only file system", "--run DIR")
    assert listing(tmp_path) == before


def test_a_port_in_use_is_transient(tmp_path: Path) -> None:
    """The one port that a user chooses is MASTER_PORT, where no launcher serves a store; our agent takes a free one."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        given = dict(zip(names, ("0", "0", "2", "2", "127.0.0.1", str(port)), strict=True))
        ran = subprocess.run(
            [sys.executable, "-m", "allranks", "train", WRONG, *GOOD[:2], "--run", "run"],
            cwd=tmp_path,
            env=environment() | given,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert ran.returncode == 76, ran.stderr
    one_line(ran, f"cannot listen on 127.0.0.1:{port}", "Address already in use", "MASTER_PORT")
    assert listing(tmp_path) == []
