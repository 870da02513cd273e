"""`allranks train`: whole runs in real processes, with real signals."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from allranks import fault_points
from allranks.cli import running as module
from allranks.cli.main import main
from allranks.fault_points import Fault
from allranks.request import TrainRequest
from allranks.run import Run
from allranks.surviving import forkserver
from tests.commands import (
    POINTS,
    alive,
    allranks,
    environment,
    running,
    steps,
    tensor_digests,
    wait_for,
    worker_pids,
)
from tests.free_port import free_port
from tests.test_documentation import ROOT

QUICK = ("train.steps=20", "train.global_batch=10", "optimizer.lr=0.05", "schedule.name=cosine", "schedule.warmup=3")


@pytest.mark.parametrize("hindered", [False, True])
def test_what_would_wait_for_ever_at_the_end_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], hindered: bool
) -> None:
    """Also after a success: the thread of a call to a host that is lost, a worker that SIGKILL does not end."""

    class Ended(Exception):
        pass

    def end(code: int) -> NoReturn:
        raise Ended(code)

    monkeypatch.setattr(module, "_train_here", lambda *_: (0, {"reason": "done"}))
    monkeypatch.setattr(module, "hinders_the_end", lambda: hindered)
    monkeypatch.setattr(module, "end_process", end)
    if hindered:
        with pytest.raises(Ended, match="0"):
            module.train(TrainRequest(json=True))
    else:
        assert module.train(TrainRequest(json=True)) == 0
    assert json.loads(capsys.readouterr().out) == {"reason": "done"}, "what was asked for is printed before"


def test_a_run_from_start_to_report(tmp_path: Path) -> None:
    ran = allranks("train", POINTS, *QUICK, "--run", "run", "--json", folder=tmp_path)
    document = json.loads(ran.stdout)
    assert document["reason"] == "done" and document["step"] == 20
    assert 0 < document["validation"]["accuracy"] <= 1
    assert "What 2 processes change" in ran.stderr and "because" in ran.stderr

    run = Run.open(tmp_path / "run")
    start, *_ = run.events()
    assert start["event"] == "start" and start["world_size"] == 2 and run.ranks() == [0, 1]
    assert list(steps(run.path)) == list(range(1, 21))
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-00000020"]
    assert run.config().train.steps == 20
    assert run.log(1).is_file() and "resumed" not in run.log(0).read_text()

    assert "layout dp_replicate=2, micro_batch 5, because " in ran.stderr
    assert json.loads(run.plan_path.read_text())["best"]["layout"] == start["layout"] == "dp_replicate=2"
    report = json.loads(allranks("report", "run", "--json", folder=tmp_path).stdout)
    assert report["state"] == "done" and report["step"] == 20
    assert report["predicted"]["step_seconds"]["ratio"] > 0 and report["predicted"]["differs"] == ""
    assert "The next plan for this machine knows that ddp took" in ran.stderr
    checkpoints = json.loads(allranks("checkpoint", "verify", "run", "--json", folder=tmp_path).stdout)
    assert checkpoints


@pytest.mark.full
def test_files_beside_the_task_take_the_place_of_no_module_of_pythons(tmp_path: Path) -> None:
    """Such as the tokenize.py of somebody who trains a tokenizer."""
    shutil.copy(POINTS, tmp_path / "task.py")
    for name in ("tokenize", "re", "random"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('this is the user')\n")
    words = ("train", "task.py", *QUICK, "--nproc", "2", "--run", "run")
    program = tmp_path / "bin" / "program.py"
    program.parent.mkdir()
    program.write_text("from allranks.cli.main import command\ncommand()\n")
    ran = subprocess.run(
        [sys.executable, str(program), *words],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ran.returncode == 0 and "this is the user" not in ran.stdout + ran.stderr, ran.stderr
    assert "workers start from a fork server" in ran.stdout + ran.stderr


def test_a_breakpoint_has_the_keyboard_where_the_page_says(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "tutorial" / "your-own-model.md").read_text()
    written = next(line for line in page.splitlines() if line.startswith("$ torchrun"))
    program, *words = written.removeprefix("$ ").split()
    lines = (ROOT / "examples" / "digits" / "task.py").read_text().splitlines(keepends=True)
    place = next(number for number, line in enumerate(lines) if "def loss(" in line)
    (tmp_path / "task.py").write_text("".join([*lines[: place + 1], "        breakpoint()\n", *lines[place + 1 :]]))
    ran = subprocess.run(
        [str(Path(sys.executable).with_name(program)), *words],
        cwd=tmp_path, env=environment(), input="p output.shape\nq\n", capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert "loss()" in ran.stdout and "(Pdb) torch.Size([" in ran.stdout


@pytest.mark.full
def test_who_reads_the_first_line_alone_does_not_end_the_run(tmp_path: Path) -> None:
    """As `allranks train ... 2>&1 | head -1`: what nobody reads stands in the log of the rank."""
    with running("train", POINTS, *QUICK, "--run", "run", folder=tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip()
        process.stdout.close()
        process.stdout = None
        assert process.wait(120) == 0
    run = Run.open(tmp_path / "run")
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-00000020"]
    assert "done, every step was made" in run.log(0).read_text()


@pytest.mark.full
def test_tensorboard_reads_each_step_once_after_a_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    allranks("train", POINTS, *QUICK, "checkpoint.every=8", "--run", "run", folder=tmp_path)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000020")
    allranks("train", "--resume", "run", folder=tmp_path)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    tags = events.Tags()["scalars"]
    assert {"train/loss", "train/lr", "train/grad_norm", "train/samples_per_second", "train/tflops"} <= set(tags)
    assert {"validation/accuracy", "validation/loss"} <= set(tags)
    assert [point.step for point in events.Scalars("train/loss")] == list(range(1, 21))


@pytest.mark.parametrize(
    ("nproc", "layout", "more"),
    [
        (2, "ddp", ()),
        pytest.param(4, "ddp", ("layout.static_graph=true",), marks=pytest.mark.full),
        pytest.param(4, "ddp", (), marks=pytest.mark.full),
        pytest.param(2, "fsdp", (), marks=pytest.mark.full),
        pytest.param(4, "dp_replicate=2,dp_shard=2", (), marks=pytest.mark.full),
    ],
)
def test_killed_and_resumed_is_bitwise_the_uninterrupted_run(
    tmp_path: Path, nproc: int, layout: str, more: tuple[str, ...]
) -> None:
    settings = (*QUICK, *more, "checkpoint.every=4", "checkpoint.keep=9", "--layout", layout, "--nproc", str(nproc))
    allranks("train", POINTS, *settings, "--run", "whole", folder=tmp_path)
    killed = tmp_path / "killed"
    with running("train", POINTS, *settings, "task.pause=0.1", "--run", "killed", folder=tmp_path) as command:
        wait_for(lambda: max(steps(killed), default=0) >= 10, "step 10")
        command.send_signal(signal.SIGKILL)
        wait_for(lambda: not any(map(alive, worker_pids(killed))), "the end of the workers", seconds=2.0)
    done = max(steps(killed))
    assert done < 20
    allranks("train", "--resume", "killed", "task.pause=0", "--change", "task.pause", folder=tmp_path)

    assert tensor_digests(killed, 20) == tensor_digests(tmp_path / "whole", 20)
    ours, theirs = steps(killed), steps(tmp_path / "whole")
    for name in ("loss", "grad_norm", "ledger", "lr", "samples"):
        assert {step: event[name] for step, event in ours.items()} == {
            step: event[name] for step, event in theirs.items()
        }


@pytest.mark.full
def test_resumed_at_other_sizes_and_layouts_sees_the_same_samples(tmp_path: Path) -> None:
    exact = (
        "train.precision=float64",
        "train.global_batch=11",
        "task.width=5",
        "optimizer.name=sgd",
        "optimizer.lr=0.1",
    )
    settings = (*exact, "checkpoint.keep=9", "schedule.steps=16")
    no_dropout = str(Path(POINTS).with_name("plain_points.py"))
    allranks("train", no_dropout, *settings, "train.steps=16", "--nproc", "1", "--run", "one", folder=tmp_path)
    moved = ("--run", "moved")
    allranks("train", no_dropout, *settings, "train.steps=4", "--nproc", "2", *moved, folder=tmp_path)
    for total, nproc, layout in ((8, "3", "ddp"), (12, "1", "single"), (16, "2", "fsdp")):
        more = ("--nproc", nproc, "--layout", layout)
        allranks("train", "--resume", "moved", f"train.steps={total}", *more, folder=tmp_path)
    expected, found = steps(tmp_path / "one"), steps(tmp_path / "moved")
    assert {step: event["ledger"] for step, event in found.items()} == {
        step: event["ledger"] for step, event in expected.items()
    }
    for step, event in expected.items():
        assert found[step]["loss"] == pytest.approx(event["loss"], rel=1e-10, abs=0)


def test_ctrl_c_saves_and_leaves_nothing_running(tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = ("train.steps=1000", "train.global_batch=10", "task.pause=0.05", "--run", "run")
    with running("train", POINTS, *settings, folder=tmp_path) as command:
        wait_for(lambda: max(steps(run), default=0) >= 3, "step 3")
        command.send_signal(signal.SIGINT)
        output, _ = command.communicate(timeout=60)
        assert command.returncode == 130, output
        assert output.count("stopping after the step in hand, then saving (once more: now)") == 1
        assert not any(map(alive, worker_pids(run)))
    last = max(steps(run))
    assert (run / "checkpoints" / f"step-{last:08d}" / "COMMITTED").is_file()
    assert json.loads(allranks("report", "run", "--json", folder=tmp_path).stdout)["state"] == "stopped"


@pytest.mark.full
@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 76), ("SIGINT", 130)])
def test_a_second_request_during_a_save_ends_it_now_and_leaves_the_older_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    """Rank 1 stands still while it writes its part: so the save takes as long as it is waited for."""
    run, folder = tmp_path / "run", tmp_path / "faults"
    folder.mkdir()
    fault_points.write_schedule(folder, [Fault(0, "checkpoint.write", 1, 6, 1, "stop")])
    monkeypatch.setenv(fault_points.VARIABLE, str(folder))
    rank = ("--nproc", "2", "--layout", "ddp", "--run", "run", "guard.stopped_seconds=60", "checkpoint.every=3")
    with running("train", POINTS, "train.steps=12", *rank, folder=tmp_path) as command:
        wait_for(lambda: fault_points.read_fired(folder), "a save that stands still")
        command.send_signal(signal.Signals[name])
        with pytest.raises(subprocess.TimeoutExpired):
            command.wait(2)
        command.send_signal(signal.Signals[name])
        output, _ = command.communicate(timeout=20)
        assert command.returncode == code, output
        assert output.count("stopping after the step in hand, then saving (once more: now)") == 1
        assert not any(map(alive, worker_pids(run)))
    monkeypatch.delenv(fault_points.VARIABLE)
    assert [path.name for path in (run / "checkpoints").glob("step-*") if (path / "COMMITTED").is_file()] == [
        "step-00000003"
    ]
    allranks("train", "--resume", "run", folder=tmp_path)
    assert list(steps(run)) == list(range(1, 13)) and Run.open(run).events()[-1]["event"] == "end"


@pytest.mark.full
def test_a_schedulers_warning_to_all_and_the_end_of_the_time_save(tmp_path: Path) -> None:
    """What Slurm sends to every process of a job step; and where it sends nothing, the run's own limit."""
    run = tmp_path / "run"
    settings = ("train.steps=1000", "task.pause=0.05", "--nproc", "2", "--layout", "ddp", "--run", "run")
    with running("train", POINTS, *settings, folder=tmp_path) as command:
        wait_for(lambda: max(steps(run), default=0) >= 3, "step 3")
        os.killpg(command.pid, signal.SIGUSR1)
        output, _ = command.communicate(timeout=60)
        assert command.returncode == 75, output
    last = max(steps(run))
    assert (run / "checkpoints" / f"step-{last:08d}" / "COMMITTED").is_file()
    ended = allranks("train", "--resume", "run", "train.max_seconds=1", folder=tmp_path, check=75)
    because = r"the run stops after step \d+, saves and ends with 75, because \d+ s of train\.max_seconds=1 have passed"
    assert len(re.findall(because, ended.stdout)) == 1
    last = max(steps(run))
    assert (run / "checkpoints" / f"step-{last:08d}" / "COMMITTED").is_file()


SLOW = "from pathlib import Path\nimport time\nPath('here').touch()\ntime.sleep(60)\n"
SWALLOWS = """from pathlib import Path
import time
try:
    Path('here').touch()
    time.sleep(60)
except BaseException:
    pass
time.sleep(60)
"""


@pytest.mark.parametrize("module", [SLOW, SWALLOWS], ids=["slow", "swallows"])
def test_a_request_before_there_are_workers_ends_with_76_and_leaves_nothing(tmp_path: Path, module: str) -> None:
    """While the task's module is imported, say, which may take as long as torch does."""
    (tmp_path / "slow.py").write_text(module)
    with running("train", "slow.py", "--run", "run", folder=tmp_path) as command:
        wait_for((tmp_path / "here").exists, "the import")
        command.send_signal(signal.SIGUSR1)
        output, _ = command.communicate(timeout=60)
    assert command.returncode == 76, output
    assert "stopped by SIGUSR1 before the run started" in output and "Traceback" not in output
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == ["here", "slow.py"]


@pytest.mark.full
def test_under_torchrun_a_schedulers_warning_saves(tmp_path: Path) -> None:
    """torchrun passes on what it is told to, and dies of it else."""
    run, signals = tmp_path / "run", "--signals-to-handle=SIGTERM,SIGINT,SIGUSR1"
    words = ("train", POINTS, "train.steps=1000", "task.pause=0.05", "--run-dir", "run")
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", signals, "-m", "allranks")
    with subprocess.Popen([sys.executable, *launch, *words], cwd=tmp_path, env=environment()) as command:
        try:
            wait_for(lambda: max(steps(run), default=0) >= 3, "step 3")
            command.send_signal(signal.SIGUSR1)
            assert command.wait(60) != 0, "torchrun's own code for a signal is 1"
        finally:
            command.kill()
    last = max(steps(run))
    assert (run / "checkpoints" / f"step-{last:08d}" / "COMMITTED").is_file()
    assert [Run.open(run).events(rank)[-1]["reason"] for rank in (0, 1)] == ["stopped", "stopped"]


@pytest.mark.full
def test_a_second_run_in_the_same_directory_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with running("train", POINTS, "train.steps=1000", "task.pause=0.05", "--run", "run", folder=tmp_path):
        wait_for(lambda: steps(run), "the first step")
        refused = allranks("train", "--resume", "run", folder=tmp_path, check=78)
    assert "pid" in refused.stderr and "Traceback" not in refused.stderr


def test_the_first_failing_rank_is_shown_once_and_last(tmp_path: Path) -> None:
    settings = ("train.steps=50", "task.boom_rank=1", "--run", "run")
    ran = allranks("train", POINTS, *settings, folder=tmp_path, check=1)
    assert ran.stderr.count("ValueError: the user's own mistake") == 1
    assert ran.stderr.strip().endswith("ValueError: the user's own mistake")
    assert "rank 1" in ran.stderr and "closed by peer" not in ran.stderr
    assert "The run lies in" not in ran.stderr, "there is no checkpoint to go on from"
    assert json.loads(allranks("report", "run", "--json", folder=tmp_path).stdout)["state"] == "crashed"


@pytest.mark.full
def test_torchrun_with_two_agents_on_one_machine(tmp_path: Path) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    arguments = ("train", POINTS, *QUICK, "--run-dir", "run")
    launch = ("--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=t")
    command = [sys.executable, "-m", "torch.distributed.run", *launch, "-m", "allranks", *arguments]
    agents = [
        subprocess.Popen(
            command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for _ in range(2)
    ]
    try:
        outputs = [agent.communicate(timeout=120)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    run = Run.open(tmp_path / "run")
    assert run.ranks() == [0, 1, 2, 3] and list(steps(run.path)) == list(range(1, 21))
    assert json.loads(run.plan_path.read_text())["best"]["layout"] == "dp_replicate=4", "rank 0 has planned it"


@pytest.mark.full
def test_a_worker_of_two_agents_is_killed_and_all_start_again(tmp_path: Path) -> None:
    """torchrun's store outlives the attempt, with the addresses of its processes."""
    endpoint, run = f"127.0.0.1:{free_port()}", tmp_path / "run"
    arguments = ("train", POINTS, *QUICK, "task.pause=0.1", "checkpoint.every=2", "--layout", "ddp", "--run-dir", "run")
    launch = ("--nnodes=2", "--nproc-per-node=1", "--max-restarts=2", "--rdzv-backend=c10d", "--rdzv-id=t")
    command = [sys.executable, "-m", "torch.distributed.run", *launch, f"--rdzv-endpoint={endpoint}"]
    agents = [
        subprocess.Popen(
            [*command, "-m", "allranks", *arguments], cwd=tmp_path, env=environment(), stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    try:
        wait_for(lambda: (run / "run.json").is_file() and len(steps(run)) >= 4, "four steps", seconds=60.0)
        os.kill(worker_pids(run)[1], signal.SIGKILL)
        outputs = [agent.communicate(timeout=120)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    assert list(steps(run)) == list(range(1, 21)) and Run.open(run).attempts >= 2


@pytest.mark.full
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun (Debian: openmpi-bin)")
def test_mpirun_starts_the_processes(tmp_path: Path) -> None:
    launcher = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "3"]
    ran = allranks("train", POINTS, *QUICK, "--run-dir", "run", folder=tmp_path, launcher=launcher)
    run = Run.open(tmp_path / "run")
    assert run.ranks() == [0, 1, 2] and list(steps(run.path)) == list(range(1, 21))
    for line in ("Decided:\n", "done, every step was made\n"):
        assert ran.stdout.count(line) == 1, "one report, of one rank"


def test_show_starts_nothing(tmp_path: Path) -> None:
    shown = json.loads(allranks("train", POINTS, *QUICK, "--show", "--json", folder=tmp_path).stdout)
    assert shown["config"]["train.steps"] == 20 and shown["cut"]["samples per rank"] == [5, 5]
    assert any("processes" in decision["what"] for decision in shown["decisions"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_server")
@pytest.mark.parametrize(
    ("words", "because"),
    [
        (("--layout", "fsdp"), "fsdp over one process is single: nobody is there to share with, so it saves no memory"),
        (("--layout", "ddp"), "ddp over one process is single"),
        (("--layout", "single"), "the command line names it"),
        ((), "there is one process"),
    ],
)
def test_why_one_process_trains_by_itself(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], because: str
) -> None:
    assert main(["train", POINTS, "--nproc", "1", *words, "--show", "--json"]) == 0
    decisions = json.loads(capsys.readouterr().out)["decisions"]
    assert {"what": "layout single", "because": because} in decisions


@pytest.mark.usefixtures("no_server")
@pytest.mark.parametrize(
    ("words", "because"),
    [
        ((), "the config names it"),
        (("layout.batchnorm=local",), "the config names it"),
        (("layout.dp_replicate=2",), "the command line names it"),
        (("--layout", "ddp"), "the command line names it"),
    ],
)
def test_who_names_the_layout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], because: str
) -> None:
    (tmp_path / "run.toml").write_text(f'task = "{POINTS}"\n[layout]\ndp_replicate = "*"\n')
    assert main(["train", str(tmp_path / "run.toml"), "--nproc", "2", *words, "--show", "--json"]) == 0
    decisions = json.loads(capsys.readouterr().out)["decisions"]
    (found,) = [one["because"] for one in decisions if one["what"].startswith("layout dp_replicate=2")]
    assert found == because


def test_a_task_may_set_how_is_printed(tmp_path: Path) -> None:
    """As scripts begin that are to print any letter anywhere."""
    lines = "import sys\nsys.stdout.reconfigure(encoding='utf-8')\nprint(sys.stdout.name, '\u20ac')\n"
    (tmp_path / "task.py").write_text(lines + Path(POINTS).read_text())
    shown = allranks("train", "task.py", *QUICK, "--layout", "ddp", "--show", "--json", folder=tmp_path)
    assert json.loads(shown.stdout)["config"]["train.steps"] == 20
    assert "<stderr> \u20ac" in shown.stderr


@pytest.fixture
def no_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(forkserver, "start", lambda *_, **__: None)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("no_server")
@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("nofile.py",), 2, ("nofile.py", "allranks new")),
        ((POINTS, "train.global_batch=1", "--nproc", "2"), 2, ("global_batch(1)", "2")),
        ((POINTS, "--layout", "dp_shard=3", "--nproc", "2"), 2, ("dp_shard(3)", "= 3", "2 processes", "dp_shard=2")),
        ((POINTS, "--layout", "placement,pp=2"), 2, ("pp=2 with placement", "dp_replicate=N")),
        ((POINTS, "--layout", "tp=100000"), 2, ("100,000 processes", "at most 1,024", "allranks dryrun")),
        ((POINTS, "--nproc", "1025", "train.global_batch=2000"), 2, ("1,025 processes", "at most 1,024")),
        ((POINTS, "train.stepz=3"), 2, ("train.stepz", "train.steps")),
        ((POINTS, "train.steps=many"), 2, ("train.steps", "many")),
        ((POINTS, "task.widht=3"), 2, ("widht", "width")),
        ((POINTS, "data.text=*.txt"), 2, ("data.text", "text")),
        (("--resume", "nowhere"), 78, ("nowhere",)),
        (("--resume", "."), 78, ("run.json",)),
    ],
)
def test_bad_input_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, words: tuple[str, ...]
) -> None:
    before = sorted(Path().rglob("*"))
    assert main(["train", *arguments]) == code
    error = capsys.readouterr().err.strip()
    assert len(error.splitlines()) == 1
    assert all(word in error for word in words), error
    assert sorted(Path().rglob("*")) == before


def test_a_rank_that_a_shell_has_started_outlives_the_shell(tmp_path: Path) -> None:
    """`ssh HOST 'RANK=... nohup allranks train ... &'`: its parent is nobody who watches over it."""
    run, words = tmp_path / "run", "train.steps=8 task.pause=0.1"
    command = f"RANK=0 WORLD_SIZE=1 nohup {sys.executable} -m allranks train {POINTS} --run run {words} >log 2>&1 &"
    subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment(), check=True)

    def ends() -> list[str]:
        found = Run.open(run).events() if (run / "run.json").is_file() else []
        return [event["reason"] for event in found if event["event"] == "end"]

    wait_for(ends, "the end of the run")
    assert ends() == ["done"], (tmp_path / "log").read_text()
