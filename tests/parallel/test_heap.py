"""Freed memory stays with the process where a step will need it again."""

import ctypes
import os
import subprocess
import sys
from unittest import mock

import pytest

from allranks.parallel import heap

ROUNDS = 5
PROGRAM = f"""
import ctypes, resource, sys
from allranks.parallel.heap import keep_heap
library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
if sys.argv[1] == "keep":
    assert keep_heap()
def make_and_free():
    blocks = [library.malloc(ctypes.c_size_t(size << 20)) for size in (31, 30, 29)]
    for block in blocks:
        library.memset(ctypes.c_void_p(block), 1, ctypes.c_size_t(29 << 20))
    for block in blocks:
        library.free(ctypes.c_void_p(block))
make_and_free()
make_and_free()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range({ROUNDS}):
    make_and_free()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(how: str) -> int:
    ran = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True, timeout=60)
    return int(ran.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_what_is_freed_is_there_again_without_new_pages() -> None:
    pages = ROUNDS * (3 * 29 << 20) // os.sysconf("SC_PAGE_SIZE")
    assert page_faults("keep") < pages / 100
    assert page_faults("as it is") > pages / 2


@pytest.mark.parametrize("variable", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_ARENA_MAX"])
def test_the_users_own_settings_stay(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "1")
    with mock.patch.object(ctypes, "CDLL") as library:
        assert not heap.keep_heap()
    library.assert_not_called()


def test_another_c_library_is_left_alone() -> None:
    with mock.patch.object(ctypes, "CDLL", return_value=object()):
        assert not heap.keep_heap()
