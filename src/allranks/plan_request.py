"""PlanRequest: what `allranks plan` was asked, as one value."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

SIZES = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "experts", "top_k")


@final
@dataclass(frozen=True)
class PlanRequest:
    """The options of `allranks plan`, as they were written; nothing is checked yet.

    Attributes:
        arguments: a Task, a NAME or a config.json; for a Task also RUN.toml and `key.sub=value`, else `layout.key=...`.
        cluster: one `--cluster` each.
        sizes: of a model without a name, by the name of the option.
        seq, gpus: a number, or "?" for as many, or as few, as do.
        what_if: one `KEY=VALUE` each.
        tokens, deadline: numbers with a suffix (15T, 30d).
        checkpoint_every: steps between checkpoints; None: as the Task's config says.
        budget, price: money; watts: of one device.
        measured: whether a Task's profile comes from real steps on this machine.
        check: whether dry runs of the best few correct the plan.
    """

    arguments: tuple[str, ...] = ()
    cluster: tuple[str, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    seq: str | None = None
    global_batch: int | None = None
    micro_batch: int | None = None
    precision: str | None = None
    gpus: str | None = None
    layout: str | None = None
    what_if: tuple[str, ...] = ()
    tokens: str | None = None
    deadline: str | None = None
    budget: float | None = None
    price: float | None = None
    watts: float | None = None
    checkpoint_every: int | None = None
    measured: bool = False
    check: bool = False
    explain: bool = False
    save: Path | None = None
    html: Path | None = None
    json: bool = False

    @staticmethod
    def of(options: Mapping[str, Any]) -> "PlanRequest":
        """From the options by name: lists become tuples, the sizes go together, what is not given is left out."""
        given = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
        sizes: Any = {name: given.pop(name) for name in SIZES if given.get(name) is not None}
        kept: dict[str, Any] = {n: value for n, value in given.items() if n not in SIZES and value is not None}
        return PlanRequest(**kept, sizes=sizes)
