"""A process ends with all that it has written, and without destructors."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from allranks.process_end import is_observed


@pytest.mark.parametrize(("code", "said"), [(0, ["thread", "exit function"]), (76, ["exit function"])])
def test_the_end_waits_for_threads_after_success_and_never_for_destructors(code: int, said: list[str]) -> None:
    program = f"""
import atexit, threading, time
from allranks.process_end import end_process
class Slow:
    def __del__(self): print("gone")
slow = Slow()
atexit.register(print, "exit function")
threading.Thread(target=lambda: (time.sleep(0.5), print("thread"))).start()
end_process({code})
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.splitlines()) == (code, said)


def test_the_end_waits_for_no_executor_that_has_nothing_to_do() -> None:
    """torch's compiler leaves such threads behind, and so do many loaders of data: they wait for work without end."""
    program = r"""
import time
from concurrent.futures import ThreadPoolExecutor
from allranks.process_end import end_process
pool = ThreadPoolExecutor(2)
busy = [pool.submit(lambda: (time.sleep(0.5), print("work\n", end=""))) for _ in range(3)]
end_process(0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.splitlines()) == (0, ["work"] * 3)


LEFT_OPEN = """
import os, sys
from allranks import process_end
folder = sys.argv[1]
text, raw = open(f"{folder}/text", "w"), open(f"{folder}/raw", "wb")
closed = open(f"{folder}/closed", "w")
closed.close()
detached = open(f"{folder}/detached", "w")
detached.detach()
for file, said in ((text, "header "), (raw, b"header ")):
    file.write(said)
"""


@pytest.mark.parametrize("code", [0, 1])
def test_what_files_hold_back_is_written(tmp_path: Path, code: int) -> None:
    program = LEFT_OPEN + f"import torch.distributed\nprocess_end.end_process({code})"
    words = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (code, "")  # torch warns of what is asked of some objects
    assert [(tmp_path / name).read_text() for name in ("text", "raw")] == ["header ", "header "]


def test_each_forked_process_writes_its_own_and_nothing_twice(tmp_path: Path) -> None:
    program = (
        LEFT_OPEN
        + """
process_end.freeze()
for child in range(2):
    if os.fork() == 0:
        text.write(f"{child} ")
        process_end.end_process(0)
    os.wait()
process_end.end_process(0)
"""
    )
    subprocess.run([sys.executable, "-c", program, tmp_path], timeout=60, check=True)
    assert (tmp_path / "text").read_text() == "header 0 1 "
    assert (tmp_path / "raw").read_text() == "header "


def test_a_pipe_that_nobody_reads_is_not_waited_for_without_end(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    program = """
import os, sys
from allranks import process_end
process_end.FLUSH_SECONDS = 0.2
reader = os.open(sys.argv[1], os.O_RDONLY | os.O_NONBLOCK)
pipe = open(sys.argv[1], "w", buffering=1 << 20)
pipe.write("x" * 500_000)  # more than a pipe takes
process_end.end_process(0)
"""
    subprocess.run([sys.executable, "-c", program, tmp_path / "pipe"], timeout=60, check=True)


def test_who_is_looked_at_ends_as_python_ends(tmp_path: Path) -> None:
    profile = tmp_path / "profile"
    words = [sys.executable, "-m", "cProfile", "-o", str(profile), "-m", "allranks", "report", str(tmp_path / "none")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.startswith("allranks: error:") and profile.stat().st_size > 1000


def test_nobody_looks_at_most_processes() -> None:
    before = sys.gettrace()
    sys.settrace(lambda *_: None)
    try:
        assert is_observed()
    finally:
        sys.settrace(before)
    program = "from allranks.process_end import is_observed; print(is_observed())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"
