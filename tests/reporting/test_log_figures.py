"""What numbers add: workers and memory, pieces, and who failed again."""

import os
import socket
from pathlib import Path

import pytest

from allranks.config import Config
from allranks.failure import Failure
from allranks.free_memory import whole_host_bytes
from allranks.reporting import log_figures
from allranks.reporting.explain import explain, explain_log
from allranks.reporting.log_figures import LogFigures, describe_pieces, tell_again, tell_memory
from allranks.run import Run
from allranks.units import format_bytes
from tests.reporting.test_signatures import LINES

GIB = 1 << 30
FAULT = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"


def read(*lines: str) -> LogFigures:
    figures = LogFigures()
    assert list(figures.passing(lines)) == [*lines]
    return figures


@pytest.mark.parametrize(
    ("num_workers", "worker_bytes", "told"),
    [
        (4, 8 * GIB, "4 workers of a host x 8.6 GB (x) = 34.4 GB; here has 17.2 GB: more than there is"),
        (4, GIB, "4 workers of a host x 1.1 GB (x) = 4.3 GB; here has 17.2 GB: 25% of it"),
        (4, 0, "here has 17.2 GB: with 4 workers of a host, as this log has at least, 4.3 GB each"),
        (1, 2 * GIB, "one worker x 2.1 GB (x) = 2.1 GB; here has 17.2 GB: 12% of it"),
        (0, 2 * GIB, "a worker had 2.1 GB (x); here has 17.2 GB"),
        (0, 0, "here has 17.2 GB"),
    ],
)
def test_what_workers_need_stands_beside_what_the_host_has(
    num_workers: int, worker_bytes: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_figures, "whole_host_bytes", lambda: 16 * GIB)
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    found = tell_memory(num_workers, worker_bytes, "x")
    assert found.replace(", where this is read,", "").replace(" (a container's limit counts)", "") == told


def test_a_kill_in_a_log_is_set_beside_this_hosts_memory(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    kernel = "Out of memory: Killed process 3312 (python) total-vm:9000000kB, anon-rss:5242880kB, file-rss:0kB"
    log.write_text(f"  rank      : 7 (local_rank: 7)\n{LINES['E4']}\n{kernel}\n")
    found = next(one for one in explain_log(log) if one.kind == "E4")
    assert found.evidence[-1].startswith("8 workers of a host x 5.4 GB (the kernel's line here) = 42.9 GB; ")
    assert f"has {format_bytes(whole_host_bytes())}" in found.evidence[-1]


def test_of_a_bus_error_the_size_of_shared_memory_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "a.log"
    log.write_text(f"{LINES['E5']}\n")
    monkeypatch.setattr(log_figures, "SHARED_MEMORY", tmp_path)
    (found,) = explain_log(log)
    place = os.statvfs(tmp_path)
    assert f"where this is read: {format_bytes(place.f_blocks * place.f_frsize)}, " in found.evidence[-1]
    monkeypatch.setattr(log_figures, "SHARED_MEMORY", tmp_path / "none")
    assert len(explain_log(log)[0].evidence) == 1


@pytest.mark.parametrize(
    ("in_use", "in_pieces", "share", "move"),
    [("60.00 GiB", "9.50 GiB", "14%", "expandable"), ("60.00 GiB", "512.00 MiB", "1%", "micro_batch")],
)
def test_pieces_are_the_cause_above_a_tenth(in_use: str, in_pieces: str, share: str, move: str) -> None:
    found = describe_pieces(in_use, in_pieces)
    assert found is not None and f": {share} of what" in found[0] and move in found[1]
    assert describe_pieces("60 X", in_pieces) is None and describe_pieces("x GiB", in_pieces) is None


def test_the_share_in_pieces_is_computed_from_the_message(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text(LINES["E13"] + "\n" + LINES["E13"].replace("9.50", "6.00") + "\n")
    (found,) = explain_log(log)
    assert "14% of what torch holds (9.50 GiB beside 60.00 GiB)" in found.what and "expandable" in found.next
    log.write_text(LINES["E13"].replace("9.50", "6.00") + "\n")
    (found,) = explain_log(log)
    assert ": 9% of what" in found.what and "expandable" not in found.next


def test_who_faulted_in_two_starts_is_named() -> None:
    again = "[default0]: worker group FAILED. 1/3 attempts left; will restart worker group"
    first, second = f"[rank3]: {FAULT}", f"[rank5]: {FAULT}"
    assert read(first, first, again, first, second).tell("E29") == [
        "rank 3 faulted 2 times: the same one again, so suspect its hardware"
    ]
    assert read(first, again, second).tell("E29")[0].startswith("rank 3, rank 5 faulted once each: rather a kernel")
    assert read(first, first).tell("E29") == ["rank 3 faulted once, as far as this tells"]
    assert read(FAULT).tell("E29") == [] == tell_again({})


def test_of_the_kernels_log_the_lines_of_one_process_or_of_one_minute_are_one_fault() -> None:
    def xid(when: str, process: str, device: str = "3b") -> str:
        return f"{when}NVRM: Xid (PCI:0000:{device}:00): 13, {process}Graphics SM Warp Exception"

    again, once = "the GPU at PCI:0000:3b:00 faulted 2 times: the same one", "the GPU at PCI:0000:3b:00 faulted once,"
    for lines, told in (
        ([xid("[  100.25] ", "pid=77, name=python, "), xid("[  900.25] ", "pid=77, name=python, ")], once),
        ([xid("[  100.25] ", "pid='77', "), xid("[  100.26] ", "pid='78', ")], again),
        ([xid("[  100.25] ", "pid='<unknown>', "), xid("[  101.25] ", "")], once),
        ([xid("kernel: [  100.25] node-a ", ""), xid("kernel: [ 9100.25] node-a ", "")], again),
        ([xid("", ""), xid("", "")], once),
        ([xid("", ""), xid("", "", "5e")], "the GPU at PCI:0000:3b:00, the GPU at PCI:0000:5e:00 faulted once each"),
    ):
        assert read(*lines).tell("E29")[0].startswith(told), lines


def test_of_torchruns_own_words_the_first_rank_is_told() -> None:
    block = ["  host      : a", "  rank      : 0 (local_rank: 0)", "  exitcode  : -15 (pid: 1)"]
    root = ["Root Cause (first observed failure):", "[0]:", "  host      : b", "  rank      : 9 (local_rank: 1)"]
    figures = read(*block, *root, "  exitcode  : 1 (pid: 2)", "  error_file: <N/A>")
    assert figures.tell("E8") == ["torchrun saw first: rank 9 on b, exit code 1"]
    cut = read(*root[:1], "  rank      : 9 (local_rank: 1)", "  exitcode  : 1 (pid: 2)", "  host      : elsewhere")
    assert cut.tell("E8") == ["torchrun saw first: rank 9 on a host, exit code 1"], "the block is over"
    figures = read("Root Cause (first observed failure):", "  rank      : 9 (local_rank: 1)")
    assert list(figures.passing(["  host      : b"])) and "b" not in figures.tell("E8")[0].split(), "of another log"
    assert read(*block).tell("E8") == [] == figures.tell("E9")


def run_of(folder: Path, *events: dict[str, object]) -> Run:
    run = Run.create(folder, "Digits", Config(), {"task": "digits.py:Digits"})
    for rank in range(2):
        with run.journal(rank).open("a") as journal:
            for event in events:
                journal.write(str(event).replace("'", '"') + "\n")
    return run


def test_of_a_run_the_journals_peak_counts_on_a_cpu_alone(tmp_path: Path) -> None:
    killed = Failure(1, "node-a", 5, 2.0, 76, "was killed by SIGKILL: by somebody", signal="SIGKILL")
    for device, told in (("cpu", "2 workers of a host x 3.0 GB (the most, by the journals) = 6.0 GB"), ("cuda", "")):
        start = {"t": 1.0, "event": "start", "attempt": 0, "world_size": 2, "device": device, "host": "node-a"}
        (tmp_path / device).mkdir()
        run = run_of(tmp_path / device, start, {"t": 2.0, "event": "step", "step": 1, "memory_bytes": 3_000_000_000})
        killed.write(run.log().parent)
        assert explain(run.path)[0].evidence[-1].startswith(told) and explain(run.path)[0].kind == "E4"
        assert told or "3.0 GB (the most" not in str(explain(run.path)[0])


def test_of_a_run_the_restarts_before_count(tmp_path: Path) -> None:
    what = f"restart 1, after step 3: rank 1 on node-a: {FAULT}"
    restart = {"t": 1.0, "event": "verdict", "kind": "restart", "what": what, "evidence": [], "next": "nothing"}
    run = run_of(tmp_path, restart)
    for rank, told in ((1, "rank 1 faulted 2 times"), (0, "rank 0, rank 1 faulted once each")):
        Failure(rank, "node-a", 5, 2.0, 1, FAULT).write(run.log().parent)
        assert explain(run.path)[0].evidence[-1].startswith(told)
        (run.log().parent / f"failure-{rank:05d}.json").unlink()


def test_of_a_run_too_pieces_are_told_and_nccls_start_is_no_finding(tmp_path: Path) -> None:
    run = run_of(tmp_path, {"t": 1.0, "event": "start", "attempt": 0, "world_size": 2, "device": "cuda"})
    Failure(0, "node-a", 5, 2.0, 1, LINES["E13"], traceback=f"Traceback ...\n{LINES['E13']}").write(run.log().parent)
    run.log(1).write_text(LINES["E12"] + "\n")
    (found,) = explain(run.path)
    assert found.kind == "E13" and "14% of what torch holds" in found.evidence[-1] and "expandable" in found.next
