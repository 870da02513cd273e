"""A control group with a limit of memory, of whichever version this machine has; root only."""

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.commands import wait_for

MOUNT = Path("/sys/fs/cgroup")


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """The folder of one that ends with the block; where there can be none the test is skipped.

    Who writes 0 into its `cgroup.procs` is in it, with all children to come.
    """
    first = (MOUNT / "memory").is_dir()
    folder = (MOUNT / "memory" if first else MOUNT) / f"allranks-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here, which takes root: {error}")
    try:
        try:
            (folder / ("memory.limit_in_bytes" if first else "memory.max")).write_text(str(limit_bytes))
            with contextlib.suppress(OSError):  # where swap is counted, none of it is to be had
                (folder / ("memory.memsw.limit_in_bytes" if first else "memory.swap.max")).write_text(
                    str(limit_bytes if first else 0)
                )
        except OSError as error:
            pytest.skip(f"control groups limit no memory here: {error}")
        yield folder
    finally:
        wait_for(lambda: _removed(folder), f"the end of {folder}", 60)


def _removed(folder: Path) -> bool:
    """What was in it may take a moment to go."""
    with contextlib.suppress(OSError):
        folder.rmdir()
    return not folder.exists()
