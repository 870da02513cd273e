"""The sizes of a model without a name, as options of the commands that take them."""

from typing import Annotated, Any

import typer


def _size(name: str, text: str) -> Any:
    return typer.Option(
        name,
        metavar="N",
        min=1,
        help=f"Of a model without a name, or instead of a named one's own: {text}.",
        show_default=False,
    )


Layers = Annotated[int | None, _size("--layers", "its blocks")]
Hidden = Annotated[int | None, _size("--hidden", "its width")]
Heads = Annotated[int | None, _size("--heads", "attention heads")]
KvHeads = Annotated[int | None, _size("--kv-heads", "key-value heads")]
Ffn = Annotated[int | None, _size("--ffn", "the feed-forward's width; without a name else 4 * hidden")]
Vocab = Annotated[int | None, _size("--vocab", "vocabulary")]
Experts = Annotated[int | None, _size("--experts", "experts of a layer")]
TopK = Annotated[int | None, _size("--top-k", "experts that a position uses")]
