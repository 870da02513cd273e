"""Layout strings: words, degrees and modes, and what is wrong with them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.config_keys import config_keys
from allranks.config_sections import AXES, LayoutConfig
from allranks.errors import ConfigError
from allranks.layout_string import MODES, WORDS, parse_layout, render_layout

DEGREE = "expected a whole number of at least 1 or '*'"

BAD_LAYOUTS = [
    ("dp_shards=2", "no axis or mode is called 'dp_shards'; did you mean 'dp_shard'?"),
    ("dp-shard=2", "no axis or mode is called 'dp-shard'; did you mean 'dp_shard'?"),
    (
        "x=2",
        "no axis or mode is called 'x'; the axes are dp_replicate, dp_shard, tp, cp, pp, ep, "
        "the modes sharding, schedule, recompute, offload, batchnorm, compile",
    ),
    ("tp=0", f"tp=0, {DEGREE}"),
    ("tp=-2", f"tp=-2, {DEGREE}"),
    ("tp=two", f"tp=two, {DEGREE}"),
    ("tp=²", f"tp=², {DEGREE}"),
    ("tp=", f"tp=, {DEGREE}"),
    ("tp", f"tp needs a value: {DEGREE.removeprefix('expected ')}"),
    ("tp=2,tp=4", "tp is given twice, by 'tp=2' and 'tp=4'"),
    ("tp=2,tp=2", "tp is given twice, by 'tp=2'"),
    ("ddp,dp_replicate=2", "dp_replicate is given twice, by 'ddp' and 'dp_replicate=2'"),
    ("single,tp=2", "tp is given twice, by 'single' and 'tp=2'"),
    ("ep=*", "ep takes no *: it divides dp_replicate * dp_shard; write a number"),
    ("fspd", "'fspd' is no layout; did you mean 'fsdp'?"),
    (
        "4",
        "'4' is no layout; the words are auto, single, ddp, fsdp, hsdp, data_parallel, placement, "
        "everything else has the form axis=N",
    ),
    ("tp=2,,pp=2", "a part of it is empty; write for example ddp, fsdp or dp_shard=4,tp=2"),
    (
        "fsdp,sharding=gradop",
        "sharding=gradop, expected one of full, grad_op, none, optimizer; did you mean 'grad_op'?",
    ),
    (
        "ddp,static_graph=true",
        "static_graph does not stand in the layout string; write layout.static_graph=true beside it",
    ),
    ("tp=*,dp_shard=*", "dp_shard and tp both take what is left (*): only one axis can"),
]


@pytest.mark.parametrize(("text", "message"), BAD_LAYOUTS, ids=[text for text, _ in BAD_LAYOUTS])
def test_a_bad_layout_string_is_named_with_what_is_right(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_layout(text)
    assert str(caught.value) == f"layout '{text}': {message}"


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("auto", "auto"),
        ("single", "single"),
        ("tp=1", "single"),
        ("ddp", "dp_replicate=*"),
        ("fsdp", "dp_shard=*"),
        ("hsdp", "dp_replicate=nodes,dp_shard=*"),
        ("data_parallel", "data_parallel"),
        ("placement", "placement"),
        ("placement,dp_replicate=2", "placement,dp_replicate=2"),
        ("ddp,placement", "placement,dp_replicate=*"),
        (" tp=2 , dp_shard = 4 ", "dp_shard=4,tp=2"),
        ("fsdp,sharding=grad_op,recompute=full", "dp_shard=*,sharding=grad_op,recompute=full"),
        ("recompute=full", "auto,recompute=full"),
    ],
)
def test_layout_words_mean_degrees(text: str, canonical: str) -> None:
    assert render_layout(parse_layout(text)) == canonical
    assert parse_layout(canonical) == parse_layout(text)


@st.composite
def layout_configs(draw: st.DrawFn) -> LayoutConfig:
    degrees: dict[str, object] = {axis: draw(st.integers(1, 16)) for axis in AXES}
    starred = draw(st.sampled_from(["", *AXES[:-1]]))
    keys = config_keys()
    modes = {mode: draw(st.sampled_from(keys[f"layout.{mode}"].words)) for mode in MODES}
    return LayoutConfig.model_validate({**degrees, **({starred: "*"} if starred else {}), **modes})


@given(layout_configs())
def test_parse_is_the_inverse_of_render(config: LayoutConfig) -> None:
    assert parse_layout(render_layout(config)) == config


def test_the_words_are_frozen() -> None:
    assert list(WORDS) == ["auto", "single", "ddp", "fsdp", "hsdp", "data_parallel", "placement"]
