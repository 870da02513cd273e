"""One log per rank."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.live import Live

from allranks.errors import RunError
from allranks.training.logs import CopyingStream, log_of_rank

PROGRAM = """
import os, subprocess, sys
from pathlib import Path
from allranks.training.logs import log_of_rank
print("before")
with log_of_rank(Path(sys.argv[1]), rank=int(sys.argv[2])):
    print("from print")
    print("from stderr", file=sys.stderr)
    os.write(1, b"from compiled code\\n")
    subprocess.run(["echo", "from a child"])
    if sys.argv[3] == "die":
        os._exit(9)
print("after")
"""


def run(log: Path, rank: int, end: str = "") -> tuple[list[str], list[str]]:
    command = [sys.executable, "-c", PROGRAM, str(log), str(rank), end]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    return sorted((done.stdout + done.stderr).splitlines()), sorted(log.read_text().splitlines())


def test_a_rank_writes_to_its_log_alone(tmp_path: Path) -> None:
    log = tmp_path / "rank-00001.log"
    log.write_text("of an earlier attempt\n")
    screen, kept = run(log, 1)
    assert screen == ["after", "before"]
    assert kept == ["from a child", "from compiled code", "from print", "from stderr", "of an earlier attempt"]


def test_rank_0_keeps_the_terminal_and_a_copy(tmp_path: Path) -> None:
    screen, kept = run(tmp_path / "log", 0)
    assert screen == ["after", "before", "from a child", "from compiled code", "from print", "from stderr"]
    assert kept == ["from print", "from stderr"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_program_may_set_how_is_printed(tmp_path: Path, rank: int) -> None:
    setting = 'sys.stdout.reconfigure(encoding="utf-8"); print("\u20ac", sys.stdout.line_buffering, sys.stdout.name)'
    program = PROGRAM.replace('print("from print")', setting)
    environ = os.environ | {"PYTHONIOENCODING": "latin-1"}
    command = [sys.executable, "-c", program, str(tmp_path / "log"), str(rank), ""]
    done = subprocess.run(command, env=environ, capture_output=True, timeout=60, check=True)
    line = f"\u20ac {bool(rank)} <stdout>".encode()
    assert line in (tmp_path / "log").read_bytes() and done.stdout.count(line) == 1 - rank


@pytest.mark.parametrize("rank", [0, 1])
def test_a_program_that_writes_bytes_is_not_stopped(tmp_path: Path, rank: int) -> None:
    program = PROGRAM.replace('print("from print")', 'sys.stdout.buffer.write(b"in bytes\\n")')
    command = [sys.executable, "-c", program, str(tmp_path / "log"), str(rank), ""]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.splitlines().count("in bytes")) == (0, 1 - rank), done.stderr


@pytest.mark.parametrize("rank", [0, 1])
def test_a_dying_process_leaves_its_last_line(tmp_path: Path, rank: int) -> None:
    assert "from print" in run(tmp_path / "log", rank, "die")[1]


def test_everything_is_put_back(tmp_path: Path) -> None:
    before = sys.stdout, sys.stderr, os.fstat(1), len(os.listdir("/dev/fd"))
    for rank in (0, 1):
        with pytest.raises(KeyError), log_of_rank(tmp_path / "log", rank=rank):
            raise KeyError
        assert (sys.stdout, sys.stderr, os.fstat(1), len(os.listdir("/dev/fd"))) == before


def copy(write: list[str], tmp_path: Path) -> tuple[str, str]:
    screen = io.StringIO()
    with (tmp_path / "log").open("wb") as file:
        stream = CopyingStream(screen, file.fileno())
        for text in write:
            stream.write(text)
    return screen.getvalue(), (tmp_path / "log").read_text()


def test_the_copy_has_lines_and_no_styling(tmp_path: Path) -> None:
    written = ["step 1", " loss 2\n", "\x1b[31mred\x1b[0m\n", "10%\r50%\r100%\n", "rest"]
    screen, log = copy(written, tmp_path)
    assert screen == "".join(written)
    assert log == "step 1 loss 2\nred\n100%\n"


def test_a_progress_line_is_not_copied(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as file:
        screen = io.StringIO()
        console = Console(file=CopyingStream(screen, file.fileno()), force_terminal=True, highlight=False)  # type: ignore[arg-type]
        with Live("drawn 0", console=console, auto_refresh=False) as live:
            for number in range(1, 5):
                live.update(f"drawn {number}", refresh=True)
        console.print("[bold]told[/bold]")
    assert "drawn 3" in screen.getvalue()
    log = (tmp_path / "log").read_text()
    assert "told" in log
    assert log.count("drawn") <= 1
    assert "\x1b" not in log


def test_a_link_in_its_place_leads_to_no_other_file(tmp_path: Path) -> None:
    (tmp_path / ".bashrc").touch()
    (tmp_path / "log").symlink_to(".bashrc")
    refused = pytest.raises(RunError, match="log cannot be written: Too many levels of symbolic links")
    with refused, log_of_rank(tmp_path / "log", rank=0):
        print("rm -rf ~")
    assert not (tmp_path / ".bashrc").read_text()
