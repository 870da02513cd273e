"""What NVIDIA's driver says of this machine's GPUs, without torch."""

import os
import subprocess
from pathlib import Path

LOOK_SECONDS = 10.0  # nvidia-smi answers within one; a driver that hangs must not hang a plan

DEVICE_FILES = Path("/dev")  # "nvidia0" and so on; the driver itself shows in containers that have no GPU, too


def driver_devices() -> tuple[tuple[str, ...], str]:
    """What the driver calls the devices that CUDA_VISIBLE_DEVICES leaves to this process.

    Behind them why devices that are there are not named; "" where none is missing.
    """
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    command = ["nvidia-smi", "--query-gpu=index,uuid,mig.mode.current,name", "--format=csv,noheader"]
    lines: list[str] = []
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=LOOK_SECONDS, check=True)
        lines, why = ran.stdout.splitlines(), "nvidia-smi names none"
    except subprocess.TimeoutExpired:
        why = f"nvidia-smi said nothing for {LOOK_SECONDS:.0f} s"
    except subprocess.CalledProcessError as error:
        why = f"nvidia-smi ended with {error.returncode}"
    except (OSError, subprocess.SubprocessError):
        why = "nvidia-smi cannot be run"
    rows = [[cell.strip() for cell in line.split(",", 3)] for line in lines if line.count(",") >= 3]
    if rows and chosen is not None and chosen.strip().startswith("MIG-"):
        return (), "CUDA_VISIBLE_DEVICES names a part of one (MIG-...), whose figures nobody knows"
    if rows:
        names = visible([(index, uuid, "" if cut == "Enabled" else name) for index, uuid, cut, name in rows], chosen)
        return (names, "") if all(names) else ((), "one is cut into parts (MIG), whose figures nobody knows")
    hidden = chosen is not None and (not chosen.strip() or chosen.strip().startswith("-"))
    return (), why if not hidden and any(DEVICE_FILES.glob("nvidia[0-9]*")) else ""


def visible(rows: list[tuple[str, str, str]], chosen: str | None) -> tuple[str, ...]:
    """The names of the devices that CUDA_VISIBLE_DEVICES chooses; as CUDA does, the list ends at the first unknown.

    Args:
        rows: (index, uuid, name) of every device.
        chosen: the variable, None where it is not set.
    """
    if chosen is None:
        return tuple(name for _, _, name in rows)
    names: list[str] = []
    for word in (part.strip() for part in chosen.split(",")):
        found = [name for index, uuid, name in rows if word == index or (word and uuid.startswith(word))]
        if not found:
            break
        names.append(found[0])
    return tuple(names)
