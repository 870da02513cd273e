"""The programs that break runs of ours and of torchrun from outside; bench/ has no packages."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.commands import environment

BENCH = Path(__file__).parents[1] / "bench"
pytestmark = [pytest.mark.distributed, pytest.mark.full, pytest.mark.timeout(1200)]


def measured(program: str, *words: str) -> Any:
    command = [sys.executable, str(BENCH / program), *words, "--json"]
    ran = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=1100, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_a_minute_of_faults() -> None:
    document = measured("hour_of_faults.py", "--quick")
    ours, stock = document["ways"]
    assert (ours["way"], stock["way"]) == ("allranks", "torchrun")
    assert ours["faults"] and all("seconds" in fault for fault in ours["faults"][:-1]), "the next waits for a recovery"
    assert 0 < ours["ettr"] < 1 and ours["restarts_without_a_fault"] == 0 and ours["step_seconds"] > 0.05


def test_recoveries_beside_torchrun() -> None:
    ours, stock = measured("recovery.py", "--kills", "2")["rows"]
    assert (ours["kills"], ours["recovered"]) == (2, 2) and 0 < ours["median"] <= ours["worst"]
    assert stock["kills"] == 2 and stock["recovered"] <= 2


def test_a_host_joins_and_is_lost_beside_torchrun() -> None:
    ours, stock = measured("hosts.py", "--quick")["rows"]
    assert (ours["way"], stock["way"]) == ("allranks", "torchrun")
    assert len(ours["joins"]) == len(ours["losses"]) == 1 and ours["joins"][0] > 0 < ours["losses"][0]
    assert len(stock["joins"]) <= 1 >= len(stock["losses"])
