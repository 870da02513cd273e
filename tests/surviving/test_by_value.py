"""What travels by value says where it comes from."""

import subprocess
import sys
import traceback
from pathlib import Path

import cloudpickle
import pytest

from allranks.surviving.by_value import dumps


def test_a_closure_raises_in_its_own_file() -> None:
    number = 3

    def outer() -> int:
        def inner() -> int:
            raise ValueError(f"no {number}")

        return inner()

    with pytest.raises(ValueError, match="no 3") as caught:
        cloudpickle.loads(dumps(outer))()
    files = [frame.filename for frame in traceback.extract_tb(caught.tb)]
    assert files[-2:] == [__file__, __file__]


def test_another_process_reads_it(tmp_path: Path) -> None:
    """One that knows nothing of this module's functions."""
    number = 4
    (tmp_path / "function").write_bytes(dumps(lambda: number + 1))
    program = "import cloudpickle, sys; print(cloudpickle.loads(open(sys.argv[1], 'rb').read())())"
    command = [sys.executable, "-c", program, str(tmp_path / "function")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "5\n"
