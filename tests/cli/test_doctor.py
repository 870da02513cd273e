"""`allranks doctor`: what this machine is; --calibrate in real processes, what it writes, and what it refuses."""

import json
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch

from allranks.cli.main import main
from allranks.errors import ProcessError
from allranks.planning.cluster_file import read_cluster
from allranks.planning.hardware import find_cluster
from allranks.process_environment import num_cores
from allranks.surviving import launch as launching
from tests.commands import alive, allranks, running, wait_for

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def clusters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this user's calibrations are kept: nothing yet."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "configuration"))
    return tmp_path / "configuration" / "allranks" / "clusters"


def nobody(*_: object, **__: object) -> list[Any]:
    raise AssertionError("a process was started")


def test_what_this_machine_is(capsys: Capture) -> None:
    assert main(["doctor"]) == 0
    first, *evidence, move = capsys.readouterr().out.splitlines()
    assert f", {num_cores()} cores, " in first
    assert "a run takes " in first and "  measured: nothing yet" in evidence
    assert move == "  next: allranks doctor --calibrate measures how fast it is"
    assert main(["doctor", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["verdict"]["what"] == first and document["cores"] >= 1 and document["calibrated"] == []


@pytest.mark.parametrize("words", [["doctor"], ["doctor", "--calibrate"]])
def test_gpus_that_torch_cannot_use_are_one_line_and_2(
    words: list[str], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", fail)
    with patch.object(launching, "launch", nobody):
        assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1
    assert "sees 2 GPU(s) and cannot use them: " in err and "Error 802: system not yet initialized; update" in err
    assert main(["doctor", "--device", "cpu"]) == 0
    assert "a GPU that torch cannot use; a run takes cpu" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--nproc", "2"], "--nproc says how to measure: add --calibrate"),
        (["--quick"], "--quick says how to measure: add --calibrate"),
        (["--output", "a.toml"], "--output says how to measure"),
        (["--device", "tpu"], "--device tpu: expected one of auto, cpu, cuda"),
        (["--calibrate", "--nproc", "0"], "--nproc"),
        (["--calibrate", "--device", "cpu", "--nproc", "65"], "--nproc 65: at most 64 processes"),
        (["--calibrate", "--output", "."], "--output .: a cluster file ends in .toml: cluster.toml"),
        (["--calibrate", "--output", "a.json"], "--output a.json: a cluster file ends in .toml: a.toml"),
    ],
)
def test_bad_input_is_one_line_and_2(arguments: list[str], told: str, capsys: Capture) -> None:
    with patch.object(launching, "launch", nobody):
        assert main(["doctor", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("allranks: error: ") and told in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("words", [[], ["--json"], ["--calibrate"]])
def test_cuda_where_there_is_none_is_one_line_and_2(
    words: list[str], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with patch.object(launching, "launch", nobody):
        assert main(["doctor", "--device", "cuda", *words]) == 2
    assert "--device cuda, but torch sees no CUDA device; take --device cpu" in "".join(capsys.readouterr())


def test_a_place_that_cannot_be_written_is_refused_before_measuring(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "file").write_text("")
    with patch.object(launching, "launch", nobody):
        assert main(["doctor", "--calibrate", "--output", str(tmp_path / "file" / "a.toml")]) == 2
    assert (
        "cannot be written: what should hold it is a file; name another with --output FILE.toml"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("error", [ProcessError("rank 1 was killed"), RuntimeError("gloo said no\nmore")])
def test_what_could_not_be_measured_is_3_and_changes_nothing(error: Exception, tmp_path: Path, capsys: Capture) -> None:
    kept = tmp_path / "mine.toml"
    kept.write_text("as it was")

    def fail(*_: object, **__: object) -> Sequence[object]:
        raise error

    with patch.object(launching, "launch", fail):
        assert main(["doctor", "--calibrate", "--output", str(kept), "--json"]) == 3
    out, err = capsys.readouterr()
    assert json.loads(out)["exit_code"] == 3 and len(err.splitlines()) == 2  # what is measured, and the error
    assert str(error).splitlines()[0] in err and kept.read_text() == "as it was"


@pytest.mark.full
def test_two_processes_are_measured_and_local_takes_it(tmp_path: Path, clusters: Path) -> None:
    words = ("doctor", "--calibrate", "--quick", "--nproc", "2", "--device", "cpu")
    ran = allranks(*words, "--json", folder=tmp_path)
    document = json.loads(ran.stdout)
    (path,) = clusters.iterdir()
    assert document["file"] == str(path) and document["quick"] and "measuring 2 x " in ran.stderr
    found = find_cluster("2:cpu")
    device, link = found.device, found.inside
    assert device.measured and found.notes[-1] == f"figures as measured, because this machine's are kept in {path}"
    assert set(device.matmul_shapes) == {"float32", "bfloat16"} and min(device.matmul_flops.values()) > 1e6
    assert device.matmul_flops == device.peak_flops == document["cluster"]["device"]["matmul_flops"]
    assert device.memory_bandwidth > 1e6 and device.kernel_seconds and device.update_rate
    assert set(link.measured) == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"}
    assert all(set(groups) == {2} and len(groups[2]) == 3 for groups in link.measured.values())
    assert link.bandwidth > 1e5 and link.latency_seconds < 1
    assert device.cores == 1.0 and device.context_bytes is not None and 5e7 < device.context_bytes < 2e9
    fixed = document["cluster"]["device"]["fixed"]  # a share that is too small to be told from noise is none
    assert asdict(device.fixed) == fixed and min(fixed.values()) >= 0 < sum(fixed.values())
    assert found.storage_bandwidth == document["cluster"]["storage_bandwidth"] > 1e6
    about = allranks("doctor", folder=tmp_path)
    assert f"measured: {path}" in about.stdout


@pytest.mark.full
def test_one_process_alone_and_a_table_that_a_person_reads(tmp_path: Path, clusters: Path) -> None:
    output = tmp_path / "new" / "mine.toml"
    ran = allranks("doctor", "--calibrate", "--quick", "--nproc", "1", "--output", str(output), folder=tmp_path)
    lines = ran.stdout.splitlines()
    assert lines[-1] == f"wrote {output}; use it as --cluster {output}" and max(map(len, lines[:-1])) <= 100
    assert "the working directory takes " in ran.stdout
    assert "256 x 1024 x 1024" in ran.stdout and "groups of" not in ran.stdout
    assert "one process has nobody to talk to" in read_cluster(output).notes[0]
    assert not clusters.exists()


@pytest.mark.full
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGKILL])
def test_who_is_stopped_writes_nothing_and_leaves_nobody(stop: signal.Signals, tmp_path: Path, clusters: Path) -> None:
    with running("doctor", "--calibrate", "--nproc", "2", "--device", "cpu", folder=tmp_path) as command:
        workers: list[psutil.Process] = wait_for(
            lambda: [one for one in psutil.Process(command.pid).children(recursive=True) if busy(one, command.pid)],
            "a worker that measures",
        )
        command.send_signal(stop)
        try:
            assert command.wait(timeout=90) == (130 if stop == signal.SIGINT else -signal.SIGKILL)
        except subprocess.TimeoutExpired:
            command.kill()
            pytest.fail(command.communicate()[0])
        wait_for(lambda: not any(alive(worker.pid) for worker in workers), "the end of all workers", seconds=30)
    assert list(clusters.iterdir()) == []


def busy(process: psutil.Process, command: int) -> bool:
    """Whether a worker, which is a child of the command's fork server, has computed for a while."""
    try:
        return process.ppid() != command and process.cpu_times().user > 1.0
    except psutil.Error:
        return False
