"""The modes of a layout that the user asked for, where a plan chooses the rest; and those that no plan weighs."""

from collections.abc import Mapping

from allranks.config_sections import AXES, LayoutConfig

UNWEIGHED = (
    *("batchnorm", "static_graph", "ddp_bucket_mb", "powersgd_rank", "powersgd_start"),
    *("local_sgd", "outer_lr", "outer_momentum", "outer_nesterov"),
)
"""Keys of `[layout]` that a plan keeps, and whose bytes and seconds it does not know."""


def modes_of(config: LayoutConfig, named: Mapping[str, object]) -> dict[str, object]:
    """What every layout of a search has: modes that differ from the default, and of `named` those that do not, too."""
    usual = LayoutConfig()
    names = [name for name in LayoutConfig.model_fields if name not in (*AXES, "kind", "placement")]
    return {
        name: getattr(config, name)
        for name in names
        if getattr(config, name) != getattr(usual, name) or named.get(name) is not None
    }


def notes_of(config: LayoutConfig) -> tuple[str, ...]:
    """A note for each key that is set and that no plan weighs."""
    usual = LayoutConfig()
    given = [name for name in UNWEIGHED if getattr(config, name) != getattr(usual, name)]
    given += ["ddp_hook"] if config.ddp_hook == "powersgd" else []
    return tuple(
        f"layout.{name}={_written(getattr(config, name))} is kept, and no plan weighs it: the figures are those of a"
        " run without it"
        for name in given
    )


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
