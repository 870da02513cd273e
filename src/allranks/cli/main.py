"""The command line: which commands there are, and how an error becomes one line and an exit code.

Importing this module imports neither torch nor numpy; a command imports what it calls when it runs.
"""

import os
import re
import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from allranks import __version__
from allranks.cli import bench, chaos, checkpoint, doctor, dryrun, explain, new, plan, report, simulate, train, verify
from allranks.cli.output import print_error
from allranks.errors import AllranksError, ConfigError, TaskError
from allranks.printable import printable
from allranks.process_end import end_process, is_observed
from allranks.standard_streams import steady_streams
from allranks.surviving.interrupts import ctrl_c_arrives
from allranks.users_code import user_line, user_place

INTERRUPTED = 130

app = typer.Typer(
    name="allranks",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["--help", "-h"]},
)
app.command("train")(train.train)
app.command("plan")(plan.plan)
app.command("verify")(verify.verify)
app.command("chaos")(chaos.chaos)
app.command("dryrun")(dryrun.dryrun)
app.command("simulate")(simulate.simulate)
app.command("new")(new.new)
app.command("doctor")(doctor.doctor)
app.command("report")(report.report)
app.command("explain")(explain.explain)
app.add_typer(checkpoint.app, name="checkpoint", help="List, show, verify, compare, export and import checkpoints.")
app.add_typer(
    bench.app, name="bench", help="Measure what strategies cost beside raw torch, and what more processes save."
)


@app.callback()
def start(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    """Train any PyTorch model on many processes, and know what they compute."""
    if version:
        typer.echo(f"allranks {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def command() -> NoReturn:
    """The process `allranks`: run one command and end with its code.

    It ends without the destructors of compiled libraries: those of torch take a second or two, and sometimes for ever.
    """
    code = main()
    if is_observed():
        sys.exit(code)
    end_process(code)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; an AllranksError is one line on standard error and its class's code."""
    with steady_streams():
        return _run(list(sys.argv[1:] if arguments is None else arguments))


def _run(words: list[str]) -> int:
    try:
        with ctrl_c_arrives():
            code = app(args=words, prog_name="allranks", standalone_mode=False)
    except AllranksError as error:
        return print_error(error, json="--json" in words)
    except typer.TyperException as error:
        return print_error(_as_config_error(error, words), json="--json" in words)
    except OSError as error:
        refusal = _refused_by_the_system(error)
        if refusal is None:
            raise
        return print_error(refusal, json="--json" in words)
    except SystemExit as error:  # no command ends so: the user's code does, and would say that all is well
        return print_error(_as_task_error(error), json="--json" in words)
    except typer.Abort as error:
        if isinstance(error.__cause__, EOFError):  # of a question that the user's code asks, and nobody answers
            return print_error(_as_task_error(error.__cause__), json="--json" in words)
        return INTERRUPTED
    except KeyboardInterrupt:
        return INTERRUPTED
    return int(code or 0)


def _as_task_error(error: BaseException) -> TaskError:
    return TaskError(f"the user's code ended the command:\n{user_line(error)}")


def _as_config_error(error: typer.TyperException, words: Sequence[str]) -> ConfigError:
    """What typer found wrong, in our form: starts small, ends with the next move."""
    message = error.format_message().replace("Value error, ", "").strip()
    if message.startswith("No such command") and re.search(r"\.py(:\w+)?$|\.toml$|=", words[0]):
        return ConfigError(f"no such command '{words[0]}'; did you mean 'allranks train {' '.join(words)}'?")
    if message.startswith("No such command") and "Did you mean" not in message:
        message += " `allranks --help` lists the commands."
    return ConfigError(message[:1].lower() + message[1:])


def _refused_by_the_system(error: OSError) -> ConfigError | None:
    """What the system says of a path that a command asked for, as one line; None where the user's own code asked.

    Whether a path exists is an error, too, where nobody may look, or where the name is too long.
    """
    if user_place(error):
        return None
    if error.filename is None:
        said = error.strerror or ""
        unusable = said.startswith("No usable temporary directory")
        return ConfigError(f"n{said[1:]}: set TMPDIR to one that can be written") if unusable else None
    if isinstance(error.filename, int):  # a descriptor is nothing that a user has named
        return None
    path = printable(os.fsdecode(error.filename))
    return ConfigError(f"{path}: {error.strerror}; name another path, or see to who may look there")
