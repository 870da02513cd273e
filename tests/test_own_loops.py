"""Runs of loops of one's own, in words."""

from pathlib import Path

import pytest

from allranks.errors import TaskError
from allranks.own_loops import OWN_LOOP, export_command, is_own_loop, refuse_own_loop, start_again


def test_what_goes_on_with_a_run() -> None:
    assert not is_own_loop("digits.py:Digits")
    assert start_again("digits.py:Digits", "runs/a") == "`allranks train --resume runs/a`"
    assert start_again(f"/x/train.py {OWN_LOOP}", "runs/a") == 'start /x/train.py again with join(run="runs/a")'
    assert start_again(OWN_LOOP, "runs/a") == 'start its program again with join(run="runs/a")', "a notebook"


def test_an_own_loop_names_no_task_and_the_refusal_says_what_to_do() -> None:
    refuse_own_loop("digits.py:Digits", Path("runs/a"))
    with pytest.raises(TaskError, match="names no Task") as caught:
        refuse_own_loop(f"/x/train.py {OWN_LOOP}", Path("runs/a"))
    told = str(caught.value)
    assert start_again(f"/x/train.py {OWN_LOOP}", "runs/a") in told and export_command("runs/a") in told
