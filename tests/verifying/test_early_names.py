"""Functions of torch under names that modules have given to them."""

import gc
import sys
from types import ModuleType

import torch
from torch import nn

from allranks.verifying.early_names import renaming

PROGRAM = """
import torch
from torch.nn.functional import dropout as drop
kept = {"drop": drop}
def run(x):
    return drop(x)
"""


def module_of(name: str, text: str) -> ModuleType:
    """A module that is in no sys.modules."""
    module = ModuleType(name)
    exec(compile(text, name, "exec"), module.__dict__)
    return module


def test_names_are_others_inside_and_torchs_own_again_behind_it() -> None:
    program, ours = module_of("user_program", PROGRAM), module_of("allranks.models.some", PROGRAM)
    torchs = nn.functional.dropout

    def other(x: torch.Tensor) -> str:
        return "other"

    with renaming({torchs: other}):
        assert program.run(torch.ones(2)) == "other" and program.torch is torch
        assert program.kept["drop"] is ours.drop is torchs is nn.functional.dropout
        program.__dict__["made"] = 1
    assert program.drop is torchs and program.__dict__["made"] == 1
    assert "user_program" not in sys.modules


def test_a_name_that_the_program_gives_away_meanwhile_stays_given_away() -> None:
    program = module_of("user_program", "from torch import randn")
    with renaming({torch.randn: lambda: 0}):
        assert program.randn() == 0
        program.__dict__["randn"] = 7
    assert program.randn == 7


def test_modules_that_a_fork_server_has_frozen_are_searched_too() -> None:
    program = module_of("user_program", "from torch import randn")
    gc.freeze()
    try:
        with renaming({torch.randn: lambda: 0}):
            assert program.randn() == 0
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
