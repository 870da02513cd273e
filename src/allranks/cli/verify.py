"""`allranks verify`: does the distributed run compute what one device computes?"""

from typing import Annotated

import typer

from allranks.cli.output import print_json, stdout_kept_free
from allranks.cli.train import read_arguments
from allranks.errors import ConfigError
from allranks.request import TrainRequest


def verify(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TASK|FILE|RUN.toml|KEY=VALUE",
            help="A Task (file.py, file.py:Name or package.module:Name), or a file with a loop of its own: "
            "build(distributed), step(model, optimizer, batches) and data; a config file, and config keys.",
            show_default=False,
        ),
    ] = None,
    layout: Annotated[
        str | None, typer.Option(metavar="L", help="The layout of a Task: ddp, fsdp, tp=2,dp_shard=2 ...")
    ] = None,
    nproc: Annotated[int | None, typer.Option(metavar="N", min=1, help="Processes on this machine.")] = None,
    steps: Annotated[int, typer.Option(metavar="N", help="Optimizer steps, at least 2.")] = 4,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON document on standard output, all else on standard error.")
    ] = False,
) -> int:
    """Run a Task or an own loop on local processes and on one, and say what differs.

    Exit code 0: equal; 1: something differs; 2: refused; 3: it could not be verified.
    """
    spec, toml, overrides = read_arguments(arguments or ())
    if spec is None and toml is None:
        raise ConfigError(
            "verify needs a Task or a file with build, step and data: allranks verify task.py --layout ddp"
        )
    request = TrainRequest(
        task_spec=spec, toml=toml, overrides=overrides, layout=layout, nproc=nproc, device="cpu", json=json
    )
    with stdout_kept_free(json):
        from allranks.verifying.command import verify_request

        answer = verify_request(request, num_steps=steps)
    if json:
        print_json(answer.to_json())
    else:
        typer.echo(str(answer))
    return answer.exit_code
