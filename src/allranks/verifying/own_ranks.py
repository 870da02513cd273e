"""The ranks of an own loop, each in a process that `launch` has started."""

import os
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from allranks.errors import ProcessError
from allranks.surviving.launch import launch_without_gpus
from allranks.verifying.own_alone import Source, observer_of, read_program
from allranks.verifying.own_group import process_group
from allranks.verifying.own_loop import OwnLoop, Setting
from allranks.verifying.policies import without_policies
from allranks.verifying.program import Program
from allranks.verifying.recording import RunRecord


class RankFailed(RuntimeError):
    """The program raised on a rank."""


def _of_a_rank(source: Source, setting: Setting) -> Program:
    """In the precision in which one device computes."""
    program = read_program(source)
    return program if setting.lowered is not None else without_policies(program)


def run_load(source: Source, setting: Setting) -> RunRecord:
    """One process that is built as a rank is, and loads what the ranks have saved."""
    with observer_of(setting) as observer, process_group():
        program = _of_a_rank(source, setting)

        def build(distributed: bool) -> Any:
            assert program.load is not None
            model, optimizer = program.build(distributed)
            try:
                program.load(model, optimizer, Path(setting.folder))
            except SystemExit as error:  # so many ranks it does not load for
                raise RankFailed(str(error)) from error
            return model, optimizer

        alone = replace(program, build=build, data=[], evaluate=None, save=None, load=None, state=None)
        return OwnLoop(alone, replace(setting, num_steps=0, resume=False), 0, 1, True, observer).run()


def run_rank(source: Source, setting: Setting, salted: Collection[int] = ()) -> RunRecord:
    """One of the ranks; runs in a process that `launch` has started. Those of `salted` draw other noise."""
    with observer_of(setting) as observer, process_group() as (rank, size):
        observer.salt = int(rank in salted)
        os.makedirs(setting.folder, exist_ok=True)
        record = OwnLoop(_of_a_rank(source, setting), setting, rank, size, True, observer).run()
        if record.error:  # the others wait for this rank: the launcher ends them
            raise RankFailed(f"rank {rank}: {record.error}")
        return record


def in_its_own(setting: Setting) -> Setting:
    """In the precision that the program has itself, and with saves in a folder of their own."""
    return replace(setting, dtype=None, folder=f"{setting.folder}-own")


def run_in_own_precision(source: Source, setting: Setting, num_ranks: int) -> Sequence[RunRecord]:
    """All ranks in the precision that the program has itself; () where `setting` is that, or they fail in it."""
    if setting.dtype is None:
        return ()
    try:
        ranks: list[RunRecord] = launch_without_gpus(run_rank, source, in_its_own(setting), nproc=num_ranks)
    except (RankFailed, ProcessError):
        return ()
    return ranks
