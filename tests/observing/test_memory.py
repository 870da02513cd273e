"""The peak is this process's own, in bytes, and it sees what was needed."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from allranks.observing.memory import peak_memory_bytes, peak_rss_bytes


def test_the_peak_stays_after_the_memory_is_given_back() -> None:
    before = peak_rss_bytes()
    block = b"x" * (before + 50_000_000)
    del block
    after = peak_memory_bytes(torch.device("cpu"))
    assert before + 50_000_000 < after < 4 * before + 200_000_000


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc here")
def test_a_small_program_does_not_report_its_parent_s_peak() -> None:
    program = "import importlib.util as u, sys; s = u.spec_from_file_location('m', sys.argv[1])\n"
    program += "sys.modules['torch'] = type(sys)('torch'); sys.modules['torch'].device = object\n"
    program += "m = u.module_from_spec(s); s.loader.exec_module(m); print(m.peak_rss_bytes())"
    source = sys.modules[peak_rss_bytes.__module__].__file__
    assert source is not None
    peak = subprocess.run([sys.executable, "-c", program, source], capture_output=True, text=True, check=True)
    assert 1_000_000 < int(peak.stdout) < 60_000_000 < peak_rss_bytes()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc here")
@pytest.mark.parametrize("status", [None, "Name:\tpython\nVmSize:\t9 kB\nVmRSS:\t5 kB\n"])  # the latter: gVisor's
def test_where_proc_does_not_tell_another_count_serves(status: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    peak = peak_rss_bytes()

    def read(*_: object, **__: object) -> str:
        if status is None:
            raise FileNotFoundError
        return status

    monkeypatch.setattr(Path, "read_text", read)
    assert 0.5 * peak < peak_rss_bytes() < 2 * peak


def test_of_several_devices_the_fullest_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: (100, 300, 200)[device.index])
    devices = [torch.device("cuda", index) for index in range(3)]
    assert (peak_memory_bytes(*devices), peak_memory_bytes(devices[0], devices[2])) == (300, 200)


@pytest.mark.gpu
def test_on_cuda_it_is_what_torch_allocated() -> None:
    device = torch.device("cuda", 0)
    torch.cuda.init()
    torch.cuda.reset_peak_memory_stats(device)
    block = torch.empty(10_000_000, device=device, dtype=torch.uint8)
    assert 10_000_000 <= peak_memory_bytes(device) < 200_000_000
    del block
