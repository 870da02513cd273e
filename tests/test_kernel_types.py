"""The list of operators whose kernels refuse types is what torch's own samples show, for the torch that is pinned."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from allranks.rehearsing.kernels import REFUSED, read_refused

ROOT = Path(__file__).parents[1]
INSTALLED = torch.__version__.partition("+")[0]
KEPT: dict[str, Any] = json.loads(REFUSED.read_text())
of_this_torch = pytest.mark.skipif(
    KEPT["torch"] != INSTALLED, reason=f"the list is of torch {KEPT['torch']}: entries may differ in {INSTALLED}"
)


def made(*words: str) -> str:
    """What a process of its own prints: torch's list of samples changes torch where it is imported."""
    there = {**os.environ, "OMP_NUM_THREADS": "1"}
    told = subprocess.run([sys.executable, *words], cwd=ROOT, env=there, check=True, stdout=subprocess.PIPE, text=True)
    return told.stdout


def test_it_is_of_the_torch_that_is_pinned() -> None:
    assert f"torch=={KEPT['torch']}\n" in (ROOT / "constraints.txt").read_text()
    assert set(KEPT) == {"torch", "mixed", "alone", "left out"} and read_refused() == KEPT
    for names in (KEPT["mixed"], KEPT["alone"]):
        assert names == sorted(set(names)) and not set(names) & set(KEPT["left out"]["ends the process"])


@of_this_torch
def test_what_some_samples_show_is_listed() -> None:
    some = ("nn.functional.layer_norm", "index_add", "linalg.cholesky")
    told = json.loads(made("-m", "tools.kernel_types", *some))
    for kind, names in (("mixed", {"native_layer_norm", "index_add"}), ("alone", {"linalg_cholesky_ex", "abs"})):
        assert names <= set(told[kind]) & set(KEPT[kind])


@pytest.mark.full
@of_this_torch
def test_it_is_what_all_samples_show() -> None:
    program = "from tools import kernel_types as tool; print(tool.render(), end='')"
    assert made("-c", program) == REFUSED.read_text(), "run `OMP_NUM_THREADS=1 python -m tools.kernel_types`"


WRONG = """
import os
from allranks.rehearsing import kernels
from tools import kernel_types as tool

some = [one for one in tool.operators() if one.name in ("lerp", "index_add")]
real = tool.find_refusal
ending = lambda func, *rest: os.abort() if func is torch.ops.aten.lerp.Scalar else real(func, *rest)
import torch
tool.find_refusal = ending
print(tool.search(some).to_json())
tool.find_refusal = real
kernels.find_refusal = lambda func, args, kwargs, kinds: f"refuses {kernels._say(kinds)}: no; it takes none"
print(tool.search(some).to_json())
"""


@pytest.mark.full
def test_what_ends_the_process_and_what_refuses_sound_samples_is_left_out() -> None:
    ending, refusing = map(eval, made("-c", WRONG).splitlines())
    assert ending["left out"]["ends the process"] == ["lerp"] and "index_add" in ending["mixed"]
    assert "lerp" not in ending["alone"] and "abs" in ending["alone"]
    assert {"index_add", "abs"} <= set(refusing["left out"]["refuses what is sound"])
    assert "abs" not in refusing["alone"] and "index_add" not in refusing["mixed"]
