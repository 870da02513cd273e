"""What a worker answers from outside: its stack by a signal, its collectives by its thread."""

import json
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch

from allranks.observing.collectives import collectives_file
from allranks.observing.heartbeat import PULSE
from allranks.surviving import evidence
from allranks.surviving.beats import SharedBeats
from allranks.surviving.evidence import Frame, main_stack, question, read_collectives
from allranks.surviving.kernel import process_state
from tests.processes import wait_until
from tests.surviving.rows import row, witness

WRITTEN = """Step 3, loss 2.1
Thread 0x00007f3b7a7fc6c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait

Current thread 0x00007f3b9b3bf740 (most recent call first):
  File "/home/me/my task.py", line 24 in loss
  File "/work/allranks/stepping/passes.py", line 147 in <lambda>
"""


def test_the_main_threads_stack_is_the_last() -> None:
    first, second = main_stack(WRITTEN)
    assert first == Frame("/home/me/my task.py", 24, "loss")
    assert (second.line, second.function) == (147, "<lambda>")
    assert main_stack("nothing of the kind\n") == ()
    alone = WRITTEN.replace("Current thread 0x00007f3b9b3bf740", "Stack")
    assert main_stack(alone) == (first, second), "of a main thread alone it says no number"


def test_whose_code_a_line_is() -> None:
    ours = Frame(str(Path(question.__code__.co_filename)), 3, "question")
    theirs = Frame(str(Path(torch.__file__).parent / "nn" / "linear.py"), 4, "forward")
    assert not any(frame.of_the_user for frame in (ours, theirs, Frame(re.__file__, 1, "match")))
    assert Frame("/home/me/task.py", 1, "loss").of_the_user
    assert str(theirs) == "torch/nn/linear.py:4 in forward" and str(ours).startswith("allranks/surviving/")


def test_the_place_is_the_users_line_where_there_is_one() -> None:
    assert str(witness(0).place) == "/home/me/task.py:31 in loss"
    assert str(witness(0, file=torch.__file__).place).endswith("torch/__init__.py:31 in loss")


def test_who_waits_in_pythons_own_library_waits_for_its_caller() -> None:
    ours, waits = Frame(question.__code__.co_filename, 3, "settle"), Frame(re.__file__, 331, "wait")
    assert witness(0).place is not None
    own = Frame("/home/me/task.py", 1, "main")
    for stack, place in (((waits, waits, ours), ours), ((waits,), waits), ((), None), ((waits, ours, own), own)):
        assert evidence.Testimony(row(0), stack).place == place


def test_workers_answer_and_one_that_cannot_keeps_nobody(tmp_path: Path) -> None:
    beats = SharedBeats(2)
    beats.clear()
    log = tmp_path / "rank-00004.log"
    script = f"""
import time
from pathlib import Path
from allranks.observing import collectives, heartbeat
place = dict(group="0", axis="tp", ranks=[4], name="all_gather", seq=5, p2p=False, sizes=[[2, 3]], waits=True)
collectives.last_collectives = lambda *_, **__: [place]
heartbeat.join({beats.path!r}, 0, Path({str(log)!r}))
def waiting():
    Path({str(tmp_path / "waits")!r}).touch()
    time.sleep(600)
waiting()
"""
    sleeping = "import time; time.sleep(600)"
    with (
        subprocess.Popen([sys.executable, "-c", script]) as able,
        subprocess.Popen([sys.executable, "-c", sleeping]) as dumb,
    ):
        try:
            wait_until(lambda: beats.slot(0)[PULSE])
            wait_until((tmp_path / "waits").exists)
            wait_until(lambda: process_state(able.pid) == "S")
            asked = [replace(row(4), pid=able.pid), replace(row(5, pulse_seconds=None), pid=dumb.pid)]
            answers, silent = question(asked, {4: 0, 5: 1}, beats, tmp_path)
            assert dumb.poll() is None, "the signal ends who is not prepared for it"
        finally:
            able.send_signal(signal.SIGKILL)
            dumb.send_signal(signal.SIGKILL)
            beats.close()
    assert [frame.function for frame in answers.stack] == ["waiting", "<module>"]
    written = log.read_text()
    assert written.count("in waiting") == 2 and " in _beat" in written, "of the main thread, and then of all"
    assert written.index("Stack (most") < written.index("Current thread 0x")
    assert str(answers.waits_in) == "all_gather number 5 over tp, of [2, 3]"
    assert (silent.stack, silent.collectives, silent.waits_in) == ((), (), None)
    assert not collectives_file(log).exists()


def test_what_cannot_be_read_is_nothing(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    for text in ("", "{", "[{}]", json.dumps({"groups": [{"group": 1}]}), "3"):
        path.write_text(text)
        assert read_collectives(path) == ()
    assert read_collectives(tmp_path / "absent") == ()
