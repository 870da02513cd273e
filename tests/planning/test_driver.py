"""What a driver says, and what it does not: made up by a script in its place."""

from pathlib import Path

import pytest

from allranks.errors import ConfigError
from allranks.planning import driver, this_machine
from allranks.planning.driver import visible
from allranks.planning.hardware import find_cluster

ROWS = [("0", "GPU-aa", "A"), ("1", "GPU-bb", "B"), ("2", "GPU-bc", "C")]


@pytest.mark.parametrize(
    ("chosen", "names"),
    [(None, ("A", "B", "C")), ("", ()), ("2,0", ("C", "A")), ("GPU-bc", ("C",)), ("1,7,0", ("B",)), ("-1", ())],
)
def test_the_devices_that_a_process_may_use(chosen: str | None, names: tuple[str, ...]) -> None:
    assert visible(ROWS, chosen) == names


def says(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one nvidia-smi there is; "": there is none."""
    if script:
        (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(driver, "DEVICE_FILES", folder)


NAMES = "echo '0, GPU-aa, Disabled, NVIDIA H100 80GB HBM3'"
CUT = "echo '0, GPU-aa, [N/A], NVIDIA L4'; echo '1, GPU-bb, Enabled, NVIDIA H100 80GB HBM3'"


@pytest.mark.parametrize(
    ("script", "chosen", "device_file", "unnamed"),
    [
        ("", None, "nvidia0", "nvidia-smi cannot be run"),
        ("exit 9", "0,1", "nvidia0", "nvidia-smi ended with 9"),
        ("exec /bin/sleep 20", None, "nvidia0", "nvidia-smi said nothing for 0 s"),
        (NAMES, "MIG-aa", "nvidia0", "a part of one"),
        (CUT, None, "nvidia0", "one is cut into parts (MIG)"),
        (CUT, "1", "nvidia0", "one is cut into parts (MIG)"),
        ("", "", "nvidia0", ""),
        ("", "-1", "nvidia0", ""),
        ("", None, "nvidiactl", ""),  # as in a container without GPUs on a host that has some
        (NAMES, "7", "nvidia0", ""),
    ],
)
def test_gpus_that_nobody_names_are_no_processor(
    script: str, chosen: str | None, device_file: str, unnamed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(script, tmp_path, monkeypatch)
    (tmp_path / device_file).touch()
    monkeypatch.setattr(driver, "LOOK_SECONDS", 0.3 if "sleep" in script else 10.0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    facts = this_machine.look.__wrapped__()
    assert facts.devices == () and unnamed in facts.unnamed and bool(unnamed) == bool(facts.unnamed)
    monkeypatch.setattr(this_machine, "look", lambda: facts)
    if not unnamed:
        assert find_cluster("local").device.name == "cpu"
        return
    with pytest.raises(ConfigError, match=r"has GPUs, but .*--cluster 1x8:h100.*allranks doctor --calibrate") as told:
        find_cluster("local")
    assert "\n" not in str(told.value)


def test_a_gpu_beside_one_that_is_cut_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    says(CUT, tmp_path, monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    facts = this_machine.look.__wrapped__()
    assert facts.devices == ("NVIDIA L4",) and not facts.unnamed
