"""A process that does not outlive its parent."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from allranks.surviving.trial_commands import GONE_SECONDS
from tests.processes import is_gone, wait_until

CHILD = """
import os, sys, time
from allranks import lifeline
{before}
lifeline.die_with_parent({parent})
open(sys.argv[1], "w").write(str(os.getpid()))
time.sleep(60)
"""
PARENT = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[2], sys.argv[1]])
time.sleep(60)
"""


@pytest.mark.parametrize("before", ["", "sys.platform = 'darwin'  # the thread that looks"])
def test_a_child_dies_with_its_killed_parent(
    tmp_path: Path, record_property: Callable[[str, object], None], before: str
) -> None:
    told = tmp_path / "pid"
    child = CHILD.format(before=before, parent="os.getppid()")
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(told), child])
    wait_until(lambda: told.exists() and told.read_text())
    pid = int(told.read_text())
    assert psutil.Process(pid).ppid() == parent.pid
    killed = time.monotonic()
    parent.kill()
    parent.wait()
    wait_until(lambda: is_gone(pid), GONE_SECONDS)
    record_property("gone_seconds", round(time.monotonic() - killed, 2))


def test_a_child_whose_parent_has_gone_already_dies_at_once(tmp_path: Path) -> None:
    child = CHILD.format(before="", parent=str(os.getppid()))  # not the parent of what is started here
    done = subprocess.run([sys.executable, "-c", child, str(tmp_path / "pid")], timeout=30, check=False)
    assert done.returncode == -9
    assert not (tmp_path / "pid").exists()
