"""What a measurement was made on, as it stands beside the figures."""

import os
import platform
import subprocess
from datetime import datetime
from pathlib import Path

import torch

from allranks import __version__
from allranks.process_environment import num_cores

PACKAGE = Path(__file__).parents[1]


def num_devices(device: str) -> int:
    """GPUs, or cores where there is none or `device` is "cpu": how many processes can compute at once."""
    return (torch.cuda.device_count() if device != "cpu" else 0) or num_cores()


def has_gpu(device: str) -> bool:
    """Whether runs with `--device DEVICE` go on GPUs."""
    return device != "cpu" and torch.cuda.is_available()


def describe_machine(device: str = "auto") -> dict[str, object]:
    """Date, versions, commit, devices, and how busy the machine is just now; JSON values."""
    gpus = range(torch.cuda.device_count() if has_gpu(device) else 0)
    return {
        "date": datetime.now().astimezone().isoformat(timespec="minutes"),
        "allranks": __version__,
        "commit": source_commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": num_cores(),
        "gpus": [torch.cuda.get_device_name(index) for index in gpus],
        "load": machine_load(),
    }


def source_commit(package: Path = PACKAGE) -> str | None:
    """The commit that a package is checked out at, "+changes" behind it where its files differ; None outside git.

    Only the package counts: the file that a measurement is written to is always changed while it is made.
    """

    def ask(*words: str) -> str:
        return subprocess.run(["git", "-C", package, *words], check=True, capture_output=True, text=True).stdout.strip()

    try:
        if not ask("ls-files", "--", "."):  # installed into a folder below somebody's repository
            return None
        return ask("rev-parse", "--short=12", "HEAD") + ("+changes" if ask("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def machine_load() -> float:
    """Processes that wanted a core, on average over the last minute."""
    return round(os.getloadavg()[0], 2)
