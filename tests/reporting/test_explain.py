"""From a log or a run's directory to the cause: what is certain first, consequences last."""

import json
from pathlib import Path

import pytest

from allranks.config import Config
from allranks.errors import ConfigError, RunError
from allranks.failure import Failure
from allranks.reporting.explain import GENERAL, MAX_LINE, explain, explain_log, explain_silence
from allranks.run import Run
from allranks.verdict import Verdict
from tests.reporting.test_signatures import LINES


def timeout(rank: int, seq: int = 41, op: str = "ALLREDUCE", size: int = 4096) -> str:
    call = f"WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn={size}, NumelOut={size}, Timeout(ms)=600000)"
    return f"[rank{rank}]: [Rank {rank}] Watchdog caught collective operation timeout: {call} ran for 600029 ms\n"


def log(folder: Path, *lines: str) -> Path:
    path = folder / "train.log"
    path.write_text("starting\n" + "".join(line.rstrip("\n") + "\n" for line in lines))
    return path


def test_a_consequence_comes_after_its_cause(tmp_path: Path) -> None:
    found = explain_log(log(tmp_path, LINES["P1"], LINES["E6"], LINES["E10"], LINES["P1"]))
    assert [one.kind for one in found] == ["E10", "P1", "E6"]
    assert "node-a.cluster, port 29500" in found[0].what and "nc -vz node-a.cluster 29500" in found[0].next
    assert found[0].evidence[0].startswith(f"{tmp_path / 'train.log'}:4: ")
    assert "2 times in this log" in found[1].evidence


def test_what_is_not_confirmed_says_so(tmp_path: Path) -> None:
    first, second = explain_log(log(tmp_path, LINES["E22"], LINES["E9"]))
    assert GENERAL in first.evidence and GENERAL not in second.evidence


@pytest.mark.parametrize(
    ("lines", "what", "next"),
    [
        ([timeout(0), timeout(1, 42, "BROADCAST")], "rank 0 in ALLREDUCE number 41, rank 1 in BROADCAST", "depends on"),
        ([timeout(0), timeout(2)], "rank 1 did not come", "rank 1 died"),
        ([timeout(0), timeout(40)], "ranks 1 to 39 did not come", "ranks 1 to 39 died"),
        ([timeout(0), timeout(99_999_999_999)], "NCCL waited in vain in ALLREDUCE (number 41, 4096 values)", "compare"),
        ([timeout(0, size=1), timeout(1, size=1)], "ranks 0, 1, all that this log has, alike", "early stop"),
        (
            [timeout(0), timeout(1)],
            "ranks 0, 1, all that this log has, alike",
            "else the same call everywhere: look at",
        ),
        ([timeout(0)], "NCCL waited in vain in ALLREDUCE (number 41, 4096 values)", "compare"),
    ],
)
def test_timeouts_of_several_ranks_are_compared(tmp_path: Path, lines: list[str], what: str, next: str) -> None:
    (found,) = explain_log(log(tmp_path, *lines))
    assert found.kind == "E1" and what in found.what and next in found.next


def begin(run: Run, rank: int, log_bytes: int | None, reason: str = "") -> None:
    """What a worker of four writes as it begins and, where it comes so far, as it ends."""
    start = {"t": 3.0, "event": "start", "attempt": run.attempts, "world_size": 4, "log_bytes": log_bytes}
    end = {"t": 4.0, "event": "end", "reason": reason}
    with run.journal(rank).open("a") as journal:
        journal.write("".join(json.dumps(line) + "\n" for line in ([start, end] if reason else [start])))


def wait(run: Run, rank: int, seq: int) -> None:
    named = f"[rank{rank}]: [PG ID 0 PG GUID 0(default_pg) Rank {rank}]  failure detected by watchdog at work "
    with run.log(rank).open("a") as log:
        log.write(timeout(rank, seq) + f"{named}sequence id: {seq} PG status: last enqueued work: {seq}\n")


def of_timeouts(run: Run) -> Verdict:
    (found,) = (one for one in explain(run.path) if one.kind == "E1")
    return found


def test_the_timeouts_of_a_runs_newest_attempt_are_compared_over_its_logs(run: Run) -> None:
    """A Run knows how many ranks it has, and where the newest attempt begins in each log."""
    run.begin_attempt()
    for rank in range(4):
        run.log(rank).write_text("step 1\r\nstep 2\rstep 3\n")
        begin(run, rank, 0)
    for rank in (1, 2, 3):
        wait(run, rank, 41)
    assert of_timeouts(run).what.endswith("ranks 1 to 3 alike; the logs here have no such wait of rank 0")
    sizes = [run.log(rank).stat().st_size for rank in range(4)]
    run.begin_attempt()
    for rank in range(4):
        begin(run, rank, sizes[rank])
    for rank in (1, 2):
        wait(run, rank, 7)
    found = of_timeouts(run)
    assert found.what.endswith(
        "(number 7, 4096 values): ranks 1, 2 alike; the logs here have no such wait of ranks 0, 3"
    )
    assert found.next.startswith("look first at what ranks 0, 3 last did (rank 0 prints to the terminal)")
    assert found.evidence[0].startswith(f"{run.log(1)}:6: ") and found.evidence[1:] == (), "in the whole log"
    begin(run, 3, sizes[3], "done")
    assert of_timeouts(run).what == "NCCL waited in vain in ALLREDUCE (number 7, 4096 values): rank 3 did not come"


def test_where_nobody_knows_which_attempt_a_log_is_of_its_timeouts_are_not_compared(run: Run) -> None:
    for _ in range(2):
        run.begin_attempt()
    for rank in (1, 3):
        wait(run, rank, 41)
        begin(run, rank, None)
    assert of_timeouts(run).what == "NCCL waited in vain in ALLREDUCE (number 41, 4096 values)"
    run.begin_attempt()
    begin(run, 1, run.log(1).stat().st_size)
    assert [one.kind for one in explain(run.path)] == ["data"], "ranks that have not begun have said nothing yet"


def test_a_log_that_was_emptied_since_is_read_whole(run: Run) -> None:
    run.begin_attempt()
    begin(run, 1, 1 << 20)
    wait(run, 1, 41)
    assert of_timeouts(run).evidence[0].startswith(f"{run.log(1)}:1: ")


def test_what_means_something_only_beside_another_is_left_out_alone(tmp_path: Path) -> None:
    assert explain_log(log(tmp_path, LINES["E15"])) == []
    assert [one.kind for one in explain_log(log(tmp_path, LINES["E15"], LINES["E13"]))] == ["E13", "E15"]


def test_what_nccl_says_of_its_sockets_is_no_cause(tmp_path: Path) -> None:
    """Every run over sockets says so under NCCL_DEBUG=INFO."""
    assert [one.kind for one in explain_log(log(tmp_path, LINES["E11b"], LINES["E13b"]))] == ["E13b"]
    assert [one.kind for one in explain_log(log(tmp_path, LINES["E11b"], LINES["E11"]))] == ["E11", "E11b"]
    assert explain_log(log(tmp_path, LINES["E11b"])) == []


def test_nccls_start_is_told_where_nothing_comes_behind_it(tmp_path: Path) -> None:
    """A hang right behind it prints nothing; every run that is well goes on with words of its own."""
    more = "node-a:12:40 [0] NCCL INFO Init timings - ncclCommInitRank: rank 0 nranks 2 total 0.35"
    (found,) = explain_log(log(tmp_path, "epoch 0", LINES["E12"], LINES["E12"], more, ""))
    assert found.kind == "E12" and "NCCL_P2P_DISABLE=1" in found.next and GENERAL in found.evidence
    assert found.evidence[0].startswith(f"{tmp_path / 'train.log'}:4: ")
    assert explain_log(log(tmp_path, LINES["E12"], more, "step 1 loss 2.5")) == []


def test_bytes_that_are_no_text_are_read(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_bytes(b"\xff\xfe\x00 " * 5000 + b"\n" + LINES["E9"].encode() + b"\n")
    assert [one.kind for one in explain_log(path)] == ["E9"]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run.create(tmp_path, "Digits", Config(), {"task": "digits.py:Digits"})
    lines = [
        {"t": 1.0, "event": "verdict", "kind": "data", "what": "rank 1 loads", "evidence": ["a", "b"], "next": "look"},
        {"t": 2.0, "event": "verdict", "kind": "restart", "what": "restart 1", "evidence": [], "next": "nothing"},
    ]
    run.journal().write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def test_a_runs_own_verdict(run: Run) -> None:
    (found,) = explain(run.path)
    assert (found.kind, found.what, found.evidence, found.next) == ("data", "rank 1 loads", ("a", "b"), "look")


def test_the_first_failing_rank_comes_before_all(run: Run) -> None:
    cause = Failure(1, "h", 5, 2.0, 1, "ValueError: mine", traceback="Traceback ...\nValueError: mine")
    Failure(0, "h", 4, 1.0, 76, "Connection closed by peer", consequence=True).write(run.log().parent)
    cause.write(run.log().parent)
    run.log(0).write_text(LINES["P1"] + "\n")
    found = explain(run.path)
    assert [one.kind for one in found] == ["crash", "data", "P1"]
    assert found[0].what == "rank 1 on h: ValueError: mine" and found[0].evidence[-1] == "ValueError: mine"


def test_a_failure_with_a_signature_gets_its_remedy(run: Run) -> None:
    Failure(1, "h", 5, 2.0, 76, "was killed by SIGKILL: by somebody", signal="SIGKILL").write(run.log().parent)
    found = explain(run.path)
    assert found[0].kind == "E4" and "dmesg" in found[0].next and found[0].what.startswith("rank 1 on h was killed")


def start_of(run: Run, **end: object) -> None:
    """A journal of 40 steps, which breaks off where no `end` is given."""
    start = {"t": 1.0, "event": "start", "attempt": run.attempts, "host": "node-a", "total_steps": 100}
    lines = [start, {"t": 2.0, "event": "step", "step": 40, "loss": 1.0}]
    lines += [{"t": 3.0, "event": "end", "seconds": {}, **end}] if end else []
    run.journal().write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_run_whose_machine_went_away_is_told_from_its_state(run: Run) -> None:
    start_of(run)
    (found,) = explain(run.path)
    assert found.kind == "crashed" and "rank 0's journal breaks off" in found.what
    assert found.evidence[0].endswith("step 40 of 100") and "on node-a" in found.evidence[1]
    assert "none was committed" in found.evidence[-1] and found.next.startswith("start again")
    saved = run.checkpoints / "step-00000030"
    saved.mkdir()
    (saved / "COMMITTED").touch()
    (found,) = explain(run.path)
    assert found.evidence[-1] == "newest checkpoint: step-00000030"
    assert found.next == f"`allranks train --resume {run.path}`"


def test_what_was_found_earlier_does_not_hide_that_a_journal_breaks_off(run: Run) -> None:
    spike = {
        "t": 1.5,
        "event": "verdict",
        "kind": "spike",
        "what": "the loss is a spike",
        "evidence": [],
        "next": "look",
    }
    start_of(run)
    start, step = run.journal().read_text().splitlines()
    run.journal().write_text("\n".join((start, json.dumps(spike), step, "")))
    found = explain(run.path)
    assert [one.kind for one in found] == ["crashed", "spike"] and "rank 0's journal breaks off" in found[0].what
    run.journal().write_text("\n".join((start, step, json.dumps(spike | {"kind": "hang"}), "")))
    assert [one.kind for one in explain(run.path)] == ["hang"], "it ended the attempt"


def test_a_run_that_is_done_has_not_failed(run: Run) -> None:
    """A record that stands there is of another start."""
    start_of(run, reason="done")
    Failure(2, "b", 5, 2.0, 76, "Connection closed by peer", consequence=True).write(run.log().parent)
    assert explain(run.path) == []


def test_a_run_that_was_told_to_stop_is_told_that(run: Run) -> None:
    start_of(run, reason="stopped")
    (found,) = explain(run.path)
    assert found.kind == "stopped" and "told to stop" in found.what


def test_a_run_that_is_done_has_nothing_to_explain(run: Run) -> None:
    start_of(run, reason="done")
    assert explain(run.path) == []
    assert explain_silence(run.path).endswith("allranks knows; the run is done: every step was made")


def test_what_cannot_be_read_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file or directory; give"):
        explain(tmp_path / "nothing")
    with pytest.raises(RunError, match="not a run"):
        explain(tmp_path)


def test_a_line_without_an_end_is_read_in_pieces_and_only_its_beginning_counts(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text(f"{'x' * 10 * MAX_LINE} {LINES['E6']}\n{LINES['P1']}\n")
    (found,) = explain_log(path)
    assert found.kind == "P1" and found.evidence[0].startswith(f"{path}:2: ")
