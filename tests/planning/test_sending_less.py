"""The rule of slow links says what the engine says."""

from dataclasses import replace
from typing import Any

import pytest

from allranks.config import resolve_config
from allranks.errors import LayoutError
from allranks.planning.sending_less import slow_links
from allranks.slow_links import check_slow_links
from tests.planning.profiles import choose, cluster, decoder

DEGREES = (
    {"dp_replicate": 8},
    {"dp_shard": 8},
    {"dp_replicate": 2, "dp_shard": 4},
    {"tp": 8},
    {"pp": 4, "dp_replicate": 2},
)


@pytest.mark.parametrize("degrees", DEGREES, ids=str)
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
@pytest.mark.parametrize("mode", [{}, {"ddp_hook": "bfloat16"}, {"ddp_hook": "powersgd"}, {"local_sgd": 10}], ids=str)
def test_as_the_engine(degrees: dict[str, int], precision: str, mode: dict[str, Any]) -> None:
    choice = replace(choose(**degrees, **mode), precision=precision)
    config = resolve_config(task_defaults={}, toml=None, overrides=(f"train.precision={precision}",))
    try:
        check_slow_links(config, choice.layout)
        said = None
    except LayoutError as error:
        said = str(error)
    refusal = slow_links(decoder(), cluster(1, 8), choice)
    assert (None if refusal is None else refusal.because) == said
