"""`allranks dryrun`: one step of the real program at the full world size, on this machine, without its devices."""

from pathlib import Path
from typing import Annotated, Any

import typer

from allranks.cli.size_options import Experts, Ffn, Heads, Hidden, KvHeads, Layers, TopK, Vocab
from allranks.errors import ConfigError
from allranks.plan_request import SIZES


def _option(name: str, text: str, metavar: str) -> Any:
    return typer.Option(name, metavar=metavar, help=text, show_default=False)


Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="TASK|NAME|config.json [RUN.toml] [KEY=VALUE]",
        help="What to rehearse: a Task (file.py, file.py:Name, package.module:Name), a name such as llama3-8b, or a "
        "Hugging Face config.json; also a config file, and config keys.",
        show_default=False,
    ),
]
CLUSTER = _option("--cluster", "8x8:a100-80g, 4:h100@ndr400, 1x2:cpu, local or a TOML file.", "C")
GPUS = _option("--gpus", "So many devices of this kind; by default all of the cluster's.", "N")
LAYOUT = _option("--layout", "How to spread it: ddp, fsdp, dp_shard=8,tp=8 ...", "L")
RANKS = typer.Option("--ranks", metavar="R", help="kinds: one of each; all; or numbers, as in 0,20.")
TIMELINE = typer.Option("--timeline", help="Print the step unit by unit: gather, compute, drop, reduce.")
FULL = typer.Option("--full-trace", help="Trace every block, however many are alike.")
REMEDIES = typer.Option("--remedies", help="Rehearse a few changes that save memory, too.")
JSON = typer.Option("--json", help="One JSON document on standard output, all else on standard error.")


def dryrun(
    arguments: Arguments = None,
    cluster: Annotated[str | None, CLUSTER] = None,
    gpus: Annotated[int | None, GPUS] = None,
    layout: Annotated[str | None, LAYOUT] = None,
    ranks: Annotated[str, RANKS] = "kinds",
    timeline: Annotated[bool, TIMELINE] = False,
    svg: Annotated[Path | None, _option("--svg", "Draw the first rank's step there, unit by unit.", "FILE")] = None,
    trace: Annotated[Path | None, _option("--trace", "Write the predicted step for Perfetto.", "FILE")] = None,
    full_trace: Annotated[bool, FULL] = False,
    remedies: Annotated[bool, REMEDIES] = False,
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
    """Run one step of the real program for a cluster that is not there: memory, messages, and what would fail.

    Exit code 0: it fits; 1: it does not, or would fail; 2: refused; 3: it cannot be rehearsed.
    """
    given = dict(locals())
    sizes = {name: given[name] for name in SIZES if given[name] is not None}
    if not cluster:
        raise ConfigError("dryrun needs --cluster: 8x8:a100-80g, 1x2:cpu, local or a TOML file")
    if not arguments and not sizes:
        raise ConfigError(
            "dryrun needs a model: a Task, a name such as llama3-8b, a config.json, or --layers --hidden --heads"
        )
    from allranks.cli.rehearsed_question import Asked
    from allranks.cli.rehearsing import answer

    words = tuple(arguments or ())
    options = (layout, ranks, timeline, svg, trace, full_trace, remedies, json, sizes, gpus)
    return answer(Asked(words, cluster, *options))
