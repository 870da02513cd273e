"""tools/setup.sh without a network: what it refuses in one line, what it asks pip for, and that it is done once."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NEEDED = ("sh", "cat", "cksum", "dirname", "mkdir", "rm", "sed", "touch")

# A python that makes a .venv holding a copy of itself, and whose pip writes down what it was asked for.
FAKE_PYTHON = """#!/bin/sh
case "$1 $2" in
    "-m venv") mkdir -p .venv/bin; cat "$0" >.venv/bin/python; chmod +x .venv/bin/python ;;
    "-m pip") echo "$*" >>pip.log; case "$*" in *REFUSED*) exit 1 ;; esac ;;
    "-c "*version_info*) exit 0 ;;
    "-c "*) exit 1 ;;
    --version*) echo "Python 3.12.1" ;;
esac
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder with what setup.sh reads, and a `bin` that is the whole PATH."""
    (tmp_path / "tools").mkdir()
    for name in ("tools/setup.sh", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "bin").mkdir()
    for name in (*NEEDED, "chmod"):
        (tmp_path / "bin" / name).symlink_to(str(shutil.which(name)))
    provide(tmp_path, "uname", "#!/bin/sh\necho Linux\n")
    provide(tmp_path, "python3", FAKE_PYTHON)
    return tmp_path


def provide(clone: Path, name: str, script: str) -> None:
    """Put a program on the PATH."""
    path = clone / "bin" / name
    path.write_text(script)
    path.chmod(0o755)


def setup(clone: Path, *arguments: str) -> tuple[int, list[str], list[str]]:
    """(exit code, what was said, what pip was asked to install since the last call)."""
    log = clone / "pip.log"
    log.unlink(missing_ok=True)
    environment = {"PATH": str(clone / "bin"), "HOME": str(clone)}
    command = [str(clone / "tools" / "setup.sh"), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    asked = [line for line in (log.read_text() if log.exists() else "").splitlines() if " install " in line]
    assert done.stdout == ""
    return done.returncode, done.stderr.splitlines(), [line.partition(" install ")[2] for line in asked]


has_driver = pytest.mark.skipif(os.path.exists("/proc/driver/nvidia/version"), reason="this machine has the driver")


@has_driver
def test_the_first_time_and_the_second(clone: Path) -> None:
    code, said, asked = setup(clone)
    assert (code, asked) == (0, ["-q --no-deps torch==2.13.0+cpu", "-q -c constraints.txt -e ."])
    assert "setup: no NVIDIA driver: downloading the CPU build of torch: about 200 MB" in said
    assert setup(clone) == (0, [], [])
    assert setup(clone, "dev")[2][-1] == "-q -c constraints.txt -e .[dev]"
    assert setup(clone, "dev") == (0, [], [])
    with (clone / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    assert setup(clone, "dev")[2] != []


@has_driver
def test_the_cpu_build_is_sought_in_two_places_and_then_the_default_taken(clone: Path) -> None:
    provide(clone, "python3", FAKE_PYTHON.replace("REFUSED", "+cpu"))
    code, said, asked = setup(clone)
    assert code == 0
    assert asked[1].startswith(
        "-q --no-deps --retries 0 --timeout 10 --index-url https://download.pytorch.org/whl/cpu "
    )
    assert asked[2] == "-q torch==2.13.0"
    assert any("downloading torch with CUDA: about 3 GB" in line for line in said)


@pytest.mark.parametrize("kind", ["driver", "mac"])
def test_the_default_build(clone: Path, kind: str) -> None:
    provide(
        clone, *(("nvidia-smi", "#!/bin/sh\nexit 0\n") if kind == "driver" else ("uname", "#!/bin/sh\necho Darwin\n"))
    )
    assert setup(clone)[2] == ["-q torch==2.13.0", "-q -c constraints.txt -e ."]


def test_an_old_python_is_refused_in_one_line(clone: Path) -> None:
    provide(clone, "python3", "#!/bin/sh\n[ \"$1\" = --version ] && echo 'Python 3.9.2' || exit 1\n")
    code, said, asked = setup(clone)
    assert (code, asked, len(said)) == (2, [], 1)
    assert "needs Python 3.11 or newer, and 'python3' is Python 3.9.2" in said[0]


def test_another_python_that_is_new_enough_is_found(clone: Path) -> None:
    provide(clone, "python3", "#!/bin/sh\nexit 1\n")
    provide(clone, "python3.12", FAKE_PYTHON)
    assert setup(clone)[0] == 0


def test_a_missing_venv_is_told_in_one_line(clone: Path) -> None:
    provide(clone, "python3", FAKE_PYTHON.replace('"-m venv") ', '"-m venv") exit 1; '))
    code, said, _ = setup(clone)
    assert code == 2
    assert said[-1].endswith("the venv module is missing; on Debian or Ubuntu: apt install python3-venv")
    assert not (clone / ".venv").exists()


def test_what_did_not_finish_is_not_taken_as_done(clone: Path) -> None:
    provide(clone, "python3", FAKE_PYTHON.replace("REFUSED", "-e"))
    assert setup(clone)[0] == 2
    provide(clone, "python3", FAKE_PYTHON)
    shutil.copy(clone / "bin" / "python3", clone / ".venv" / "bin" / "python")
    assert setup(clone)[2][-1] == "-q -c constraints.txt -e ."
