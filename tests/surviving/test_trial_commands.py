import sys
from pathlib import Path

import pytest

from allranks import fault_points
from allranks.fault_points import Fault, read_fired
from allranks.surviving import trial_commands
from allranks.surviving.trial_commands import run_until_done

PROGRAM = """
import os, subprocess, sys, tempfile
from allranks import fault_points
fault_points.join(os.environ, 0)
print(sys.argv[1:], flush=True)
if sys.argv[1] == "litter":
    open(os.path.join(tempfile.gettempdir(), "litter"), "w").close()
    os.mkdir(os.path.join(tempfile.gettempdir(), "torchinductor_me"))
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
fault_points.reach("forward")
sys.exit(3 if sys.argv[1] == "refuse" else 0)
"""


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A package `allranks` that is the program above stands before the real one, but finds its modules there."""
    real = Path(fault_points.__file__).parent
    stand_in = tmp_path / "stand_in" / "allranks"
    stand_in.mkdir(parents=True)
    (stand_in / "__init__.py").write_text(f"__path__.append({str(real)!r})\n")
    (stand_in / "__main__.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(stand_in.parent))
    points = tmp_path / "points"
    points.mkdir()
    return points, tmp_path


def codes(folders: tuple[Path, Path], first: str, again: str = "again") -> tuple[list[int], trial_commands.Left]:
    commands, left = run_until_done((first,), (again,), *folders, "it")
    assert [command.log.name for command in commands] == [f"it-{n}.log" for n in range(1, len(commands) + 1)]
    words = [first, *[again] * (len(commands) - 1)]
    assert [command.lines()[0] for command in commands] == [repr([word]) for word in words]
    return [command.code for command in commands], left


def test_an_end_that_a_new_fault_has_brought_about_is_followed_by_a_resume(folders: tuple[Path, Path]) -> None:
    fault_points.write_schedule(folders[0], [Fault(n, "forward", 0, 0, 1, "exit") for n in range(2)])
    assert codes(folders, "first") == ([7, 7, 0], trial_commands.Left())
    assert list(read_fired(folders[0])) == [0, 1]


def test_an_end_without_one_is_the_end(folders: tuple[Path, Path]) -> None:
    assert codes(folders, "refuse")[0] == [3]


def test_what_is_left_is_seen(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_commands, "GONE_SECONDS", 0.1)
    _, left = codes(folders, "litter")
    assert left.temporary == ("litter",)
    (process,) = left.processes
    pid, _, words = process.partition(" ")
    assert words.startswith(sys.executable[:20])
    import psutil

    psutil.Process(int(pid)).kill()
