"""examples/own_loop: one script, one process or several, and the same training."""

import re
from pathlib import Path

import pytest

from allranks.run import Run
from tests.examples.commands import EXAMPLES, run

SCRIPT = str(EXAMPLES / "own_loop" / "train.py")
TORCHRUN = ("-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "2", "--rdzv-backend", "c10d")


def result(output: str) -> tuple[float, int]:
    found = re.search(r"accuracy (\d\.\d+) on 1000 new points, (\d+) process", output)
    assert found is not None, output
    return float(found[1]), int(found[2])


@pytest.mark.full
@pytest.mark.distributed
def test_the_same_script_alone_and_under_torchrun(tmp_path: Path) -> None:
    for name in ("alone", "two"):
        (tmp_path / name).mkdir()
    alone, one = result(run(SCRIPT, folder=tmp_path / "alone"))
    together, two = result(run(*TORCHRUN, "--rdzv-endpoint", "127.0.0.1:0", SCRIPT, folder=tmp_path / "two"))
    assert (one, two) == (1, 2)
    assert alone > 0.9
    assert together == pytest.approx(alone, abs=0.004)  # the same steps up to rounding
    for name in ("alone", "two"):
        (directory,) = (tmp_path / name / "runs").iterdir()
        steps = Run.open(directory).steps()
        assert [entry["step"] for entry in steps] == list(range(1, 129))
