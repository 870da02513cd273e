"""`allranks plan`: will it fit, which layout, how fast, how much, and why not the others."""

from pathlib import Path
from typing import Annotated, Any

import typer

from allranks.cli.size_options import Experts, Ffn, Heads, Hidden, KvHeads, Layers, TopK, Vocab
from allranks.errors import ConfigError
from allranks.plan_request import PlanRequest


def _option(name: str, text: str, metavar: str = "N", panel: str | None = None) -> Any:
    return typer.Option(name, metavar=metavar, help=text, show_default=False, rich_help_panel=panel)


Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="TASK|NAME|config.json [RUN.toml] [KEY=VALUE]",
        help="What to plan: a Task (file.py, file.py:Name, package.module:Name), a name such as llama3-8b, or a "
        "Hugging Face config.json; for a Task also a config file and config keys, else keys of the section layout.",
        show_default=False,
    ),
]
CLUSTER = _option("--cluster", "8x8:a100-80g, 4:h100@ndr400, 1x2:cpu, local or a TOML file; several: compared.", "C")
PRECISION = _option(
    "--precision", "bfloat16, float16, float32, float64, float8, several with commas, or any (the first three).", "P"
)
SAVES = _option("--checkpoint-every", "Steps between checkpoints; not given: as the Task's config says.")
LAYOUT = _option("--layout", "Weigh this layout; auto,recompute=full: fix a mode, search the rest.", "L")
SEQ = _option("--seq", "Positions of a sample (32k); ?: as many as fit.", "N|?")
WHAT_IF = _option("--what-if", "One more change to look at: recompute=full, tp=4, seq=32768.", "KEY=VALUE")
MEASURED = typer.Option("--measured", help="Take a Task's costs from real steps on this machine, not from a trace.")
CHECK = typer.Option("--check", help="Rehearse the best few (allranks dryrun) and correct the plan; some minutes.")
JSON = typer.Option("--json", help="One JSON document on standard output, all else on standard error.")


def _guide(options: dict[str, Any]) -> int:
    """Print the decision guide, which has no model in it. Raises ConfigError where something else is asked with it."""
    from allranks.cli.output import print_json
    from allranks.planning.guide import guide_document, render_guide

    json = options.pop("json")
    others = [f"--{name.replace('_', '-')}" for name, given in options.items() if given not in (None, False)]
    if others:
        first = f"'{options['arguments'][0]}'" if options["arguments"] else others[0]
        raise ConfigError(
            f"--guide is the guide without a model, and takes no {first}: leave it out, or add --cluster C for the"
            " guide with its numbers"
        )
    if json:
        print_json(guide_document())
    else:
        print(render_guide())
    return 0


def plan(
    arguments: Arguments = None,
    cluster: Annotated[list[str] | None, CLUSTER] = None,
    seq: Annotated[str | None, SEQ] = None,
    global_batch: Annotated[int | None, _option("--global-batch", "Samples per optimizer step.")] = None,
    micro_batch: Annotated[int | None, _option("--micro-batch", "Samples per forward; not given: searched.")] = None,
    precision: Annotated[str | None, PRECISION] = None,
    gpus: Annotated[str | None, _option("--gpus", "Devices of this kind; ?: as few as do.", "N|?")] = None,
    layout: Annotated[str | None, LAYOUT] = None,
    what_if: Annotated[list[str] | None, WHAT_IF] = None,
    tokens: Annotated[str | None, _option("--tokens", "To train on (15T): time, money, energy.")] = None,
    deadline: Annotated[str | None, _option("--deadline", "The time for them: 30d, 12h.", "TIME")] = None,
    budget: Annotated[float | None, _option("--budget", "The money for them.", "MONEY")] = None,
    price: Annotated[float | None, _option("--price", "Of one device for an hour.", "MONEY")] = None,
    watts: Annotated[float | None, _option("--watts", "Of one device.", "W")] = None,
    checkpoint_every: Annotated[int | None, SAVES] = None,
    measured: Annotated[bool, MEASURED] = False,
    check: Annotated[bool, CHECK] = False,
    explain: Annotated[bool, typer.Option("--explain", help="The decision guide and the blocks, in numbers.")] = False,
    guide: Annotated[bool, typer.Option("--guide", help="The decision guide, without a model.")] = False,
    save: Annotated[Path | None, _option("--save", "Write plan.json and RUN.toml there.", "DIR")] = None,
    html: Annotated[Path | None, _option("--html", "Write the plan as one page.", "FILE")] = None,
    layers: Layers = None,
    hidden: Hidden = None,
    heads: Heads = None,
    kv_heads: KvHeads = None,
    ffn: Ffn = None,
    vocab: Vocab = None,
    experts: Experts = None,
    top_k: TopK = None,
    json: Annotated[bool, JSON] = False,
) -> int:
    """Say before anything is rented whether a model fits, which layout is the fastest, how fast, and why not others.

    Exit code 0: it fits; 1: it does not, or not within the limits; 2: refused.
    """
    options = dict(locals())
    if options.pop("guide") and not cluster:
        return _guide(options)
    if not cluster:
        raise ConfigError(
            "plan needs --cluster: 8x8:a100-80g, local or a TOML file; `allranks plan --guide` needs none"
        )
    from allranks.cli.planning import answer

    return answer(PlanRequest.of({**options, "explain": explain or guide}))
