"""The commands and flags that users and their scripts type are frozen here (the config keys: test_config_keys.py)."""

from collections.abc import Iterator
from typing import Any

import typer.main
from typer.core import TyperGroup

from allranks.cli.main import app

SURFACE = {
    "allranks": "--help --version",
    "allranks train": (
        "ARGUMENTS... --change --device --help --json --layout --nodes --nproc --rendezvous --resume --run --run-dir "
        "--secret-file --show --show-sharding"
    ),
    "allranks plan": (
        "ARGUMENTS... --budget --check --checkpoint-every --cluster --deadline --experts --explain --ffn "
        "--global-batch --gpus --guide --heads --help --hidden --html --json --kv-heads --layers --layout --measured "
        "--micro-batch --precision --price --save --seq --tokens --top-k --vocab --watts --what-if"
    ),
    "allranks verify": "ARGUMENTS... --help --json --layout --nproc --steps",
    "allranks chaos": "ARGUMENTS... --help --json --kills --layout --nproc --points --run --run-dir --seed",
    "allranks dryrun": (
        "ARGUMENTS... --cluster --experts --ffn --full-trace --gpus --heads --help --hidden --json --kv-heads --layers "
        "--layout --ranks --remedies --svg --timeline --top-k --trace --vocab"
    ),
    "allranks simulate": (
        "ARGUMENTS... --cluster --days --detect --elastic --every --failures --global-batch --help --html --json "
        "--layout --load --peer-every --restart --runs --save-cost --seed --spares --step --storage"
    ),
    "allranks new": "PATH --help --json",
    "allranks doctor": "--calibrate --device --help --json --nproc --output --quick",
    "allranks report": "RUNS... --help --json",
    "allranks explain": "PATH --help --json",
    "allranks bench": "--help",
    "allranks bench scaling": (
        "ARGUMENTS... --device --help --json --layouts --limit --mode --nproc --plot --quick --repeats --steps"
    ),
    "allranks bench verify": "FOLDER --help --json --kinds --part --record --sentinels",
    "allranks bench strategies": "--help --json --layouts --nproc --quick --turns",
    "allranks checkpoint": "--help",
    "allranks checkpoint diff": "FIRST SECOND --help --json",
    "allranks checkpoint import": "FILE OUT --cast --help --json --key --task",
    "allranks checkpoint list": "DIRECTORY --help --json",
    "allranks checkpoint show": "DIRECTORY --help --json",
    "allranks checkpoint verify": "DIRECTORY --help --json",
    "allranks checkpoint export": "DIRECTORY OUT --ema --help --json --only",
}


def contexts() -> Iterator[Any]:
    todo = [typer.main.get_command(app).make_context("allranks", [], resilient_parsing=True)]
    while todo:
        context = todo.pop(0)
        yield context
        if isinstance(context.command, TyperGroup):
            children = context.command.commands.items()
            todo += [child.make_context(name, [], parent=context, resilient_parsing=True) for name, child in children]


def surface() -> Iterator[tuple[str, str]]:
    for context in contexts():
        words = []
        for parameter in context.command.get_params(context):
            many = "..." if parameter.nargs == -1 else ""
            name = str(parameter.name).upper() + many
            words += [name] if parameter.param_type_name == "argument" else [o for o in parameter.opts if o[:2] == "--"]
        yield context.command_path.split(" {")[0], " ".join(sorted(words, key=lambda word: (word[0] == "-", word)))


def test_where_all_exit_codes_are_listed_the_refusal_is_among_them() -> None:
    listed = {one.command_path: one.command.help or "" for one in contexts() if "code 0" in (one.command.help or "")}
    assert len(listed) > 5 and not [path for path, text in listed.items() if "2: refused" not in text]


def test_commands_and_flags_are_frozen() -> None:
    """Add to them; do not rename: scripts stand on them."""
    assert dict(surface()) == SURFACE
