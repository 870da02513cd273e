"""`allranks chaos`: train once undisturbed and once under faults, and prove that nothing was lost.

undisturbed   the real `allranks train`; every rank writes down which fault points it passes
schedule      drawn by the seed from those (fault_schedule.py)
broken        the same training, with the faults (trial_commands.py)
verdict       I1 to I7 (invariants.py), by incident (incidents.py)
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from allranks.config_guard import GuardConfig
from allranks.config_toml import read_toml
from allranks.errors import ConfigError
from allranks.fault_points import read_fired, read_passed, write_schedule
from allranks.run import Run
from allranks.surviving.fault_schedule import draw, parse_choices
from allranks.surviving.incidents import Incident, read_incidents
from allranks.surviving.invariants import Invariant, judge
from allranks.surviving.trial_commands import Command, run_until_done
from allranks.verdict import Decision

SAVED_EVERY = 5
REFUSED = (2, 78)
HOLDS, BROKEN, UNDETERMINED = 0, 1, 3


@final
@dataclass(frozen=True, slots=True)
class Trial:
    """What is asked.

    Attributes:
        arguments: task, TOML file and overrides, as `allranks train` takes them.
        options: its options, such as `--layout ddp --nproc 2`.
        kills: how many faults.
        seed: of their schedule.
        points: as `parse_choices` reads them.
        folder: gets the two runs and the evidence; must not be there, or be empty.
    """

    arguments: tuple[str, ...]
    options: tuple[str, ...]
    kills: int
    seed: int
    points: str | None
    folder: Path


@final
@dataclass(frozen=True, slots=True)
class Answer:
    """What came of it.

    Attributes:
        what: the verdict, one line.
        invariants: I1 to I7; empty where there was nothing to judge.
        incidents: the faults that happened, in order.
        planned: how many were planned.
        restarts: how often workers were started again.
        decisions: what was chosen for the user.
    """

    folder: Path
    exit_code: int
    what: str
    invariants: tuple[Invariant, ...] = ()
    incidents: tuple[Incident, ...] = ()
    planned: int = 0
    restarts: int = 0
    decisions: tuple[Decision, ...] = field(default=())

    def to_json(self) -> dict[str, object]:
        """One JSON object."""
        return {
            "verdict": self.what,
            "exit_code": self.exit_code,
            "folder": str(self.folder),
            "planned": self.planned,
            "happened": len(self.incidents),
            "recovered": sum(incident.recovered for incident in self.incidents),
            "restarts": self.restarts,
            "invariants": [one.to_json() for one in self.invariants],
            "incidents": [one.to_json() for one in self.incidents],
            "decisions": [{"what": one.what, "because": one.because} for one in self.decisions],
        }


def break_on_purpose(trial: Trial, say: Callable[[str], None]) -> Answer:
    """Run the trial; `say` is told what begins.

    Raises:
        ConfigError: what is asked is impossible, or `allranks train` refuses it.
    """
    choices = parse_choices(trial.points)
    if trial.kills < 1:
        raise ConfigError(f"--kills {trial.kills}: a trial without a fault proves nothing; give at least 1")
    arguments, decisions = _with_checkpoints(trial.arguments)
    folder = _prepare(trial.folder)
    say(f"training undisturbed, in {folder / 'undisturbed'}")
    train = ("train", *arguments, *trial.options)
    name = folder / "undisturbed"
    commands, _ = run_until_done((*train, "--run", str(name)), (), folder / "passed", folder, "undisturbed")
    if commands[-1].code:
        return _not_trained(folder, commands[-1])
    schedule = draw(read_passed(folder / "passed"), choices, trial.kills, trial.seed)
    write_schedule(folder / "faults", schedule)
    budget = _budget_for(len(schedule), trial.arguments)
    decisions += tuple(Decision(key, "the config names none, and faults may follow one another") for key in budget)
    say(f"training the same with {len(schedule)} faults, in {folder / 'broken'}")
    name = folder / "broken"
    again = ("train", "--resume", str(name), *_processes(trial.options))
    first = ("train", *arguments, *budget, *trial.options, "--run", str(name))
    commands, left = run_until_done(first, again, folder / "faults", folder, "broken")
    fired = read_fired(folder / "faults")
    reference, broken = Run.open(folder / "undisturbed"), Run.open(name)
    incidents = read_incidents(schedule, fired, broken.events(), commands)
    numbers = {"planned": len(schedule), "fired": len(fired)}
    invariants = judge(reference, broken, incidents, commands, left, numbers)
    code, what = _conclude(invariants, incidents, commands[-1])
    restarts = sum(incident.recovery == "restarted" for incident in incidents)
    told = (tuple(invariants), tuple(incidents), len(schedule), restarts, decisions)
    return Answer(folder, code, what, *told)


def _prepare(folder: Path) -> Path:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not empty: name another directory with --run DIR")
    try:
        for room in ("passed", "faults"):
            (folder / room).mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}; name another place with --run DIR") from error
    return folder.resolve()


def _with_checkpoints(arguments: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[Decision, ...]]:
    """The arguments, with a time between checkpoints where the user has none: else every fault costs the whole run."""
    if _is_named("checkpoint", "every", arguments):
        return arguments, ()
    key = f"checkpoint.every={SAVED_EVERY}"
    return (*arguments, key), (Decision(key, "the config names none, and every fault would cost the whole run"),)


def _budget_for(num_faults: int, arguments: tuple[str, ...]) -> tuple[str, ...]:
    """What lets the broken run start again after every fault, also where all follow each other without a further step.

    The budget is for runs that fail by themselves, as the undisturbed one may: that keeps its own.
    """
    if num_faults <= GuardConfig().restarts or _is_named("guard", "restarts", arguments):
        return ()
    return (f"guard.restarts={num_faults}",)


def _is_named(section: str, key: str, arguments: tuple[str, ...]) -> bool:
    """Whether the user's words or TOML file name the key."""
    named = any(argument.startswith(f"{section}.{key}=") for argument in arguments)
    for toml in (Path(argument) for argument in arguments if argument.endswith(".toml")):
        if toml.is_file():
            try:
                found = read_toml(toml).get(section, {})
            except ConfigError:
                found = None  # `allranks train` says what is wrong with it
            named |= not isinstance(found, dict) or key in found
    return named


def _processes(options: tuple[str, ...]) -> tuple[str, ...]:
    """The option for the number of processes, which no config keeps."""
    at = options.index("--nproc") if "--nproc" in options else len(options)
    return options[at : at + 2]


def _not_trained(folder: Path, command: Command) -> Answer:
    last = next((line for line in reversed(command.lines()) if line.strip()), "no word")
    if command.code in REFUSED:
        if command.code == REFUSED[0]:  # nothing had begun: the next trial may take the name
            _empty(folder)
        raise ConfigError(last.removeprefix("allranks: error: "))
    what = f"undetermined: the undisturbed run itself ended with {command.code}: {last} (all of it: {command.log})"
    return Answer(folder, UNDETERMINED, what)


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _conclude(invariants: list[Invariant], incidents: list[Incident], last: Command) -> tuple[int, str]:
    failed = [one.name for one in invariants if one.holds is False]
    unknown = [one.name for one in invariants if one.holds is None]
    if last.code:
        return BROKEN, f"lost: the run ended with {last.code} and did not go on ({last.log})"
    if failed:
        return BROKEN, f"broken: {', '.join(failed)} of I1 to I7 did not hold"
    if unknown:
        return UNDETERMINED, f"undetermined: {', '.join(unknown)} could not be judged"
    return HOLDS, f"nothing was lost: {len(incidents)} faults, {len(incidents)} recoveries, I1 to I7 hold"
