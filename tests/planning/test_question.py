"""What a plan is asked for: precisions, the usual batch, the space that follows."""

from dataclasses import replace

import pytest

from allranks.errors import ConfigError, LayoutError
from allranks.layout import parse_layout
from allranks.planning.hardware import find_cluster
from allranks.planning.question import choose_precisions, fixed_micro_steps, usual_batch
from tests.planning.profiles import cluster, decoder
from tests.planning.questions import ask

A100, CPU = find_cluster("1:a100-80g"), find_cluster("1x2:cpu")


def test_the_lower_precision_where_it_is_faster() -> None:
    found, notes = choose_precisions(None, A100)
    assert found == ("bfloat16",)
    assert notes == ("precision bfloat16, because a100-80g multiplies it 16 times as fast as float32",)
    assert choose_precisions(None, CPU)[0] == ("float32",)
    assert choose_precisions(None, cluster())[0] == ("bfloat16",)
    old = replace(A100, device=replace(A100.device, peak_flops={"float16": 125e12, "float32": 15e12}))
    assert choose_precisions(None, old)[0] == ("float16",)
    for name in ("rtx4090", "rtx3090", "rtx5090"):  # twice as fast, by their data sheets
        assert choose_precisions(None, find_cluster(f"8:{name}"))[0] == ("bfloat16",)


def test_precisions_that_the_user_names() -> None:
    assert choose_precisions("float32", A100) == (("float32",), ())
    assert choose_precisions("float32, bfloat16", A100)[0] == ("float32", "bfloat16")
    assert choose_precisions("any", A100)[0] == ("bfloat16", "float16", "float32")
    assert choose_precisions("any", CPU)[1] == ()
    found, (left,) = choose_precisions("float32,float4,float31", A100)
    assert found == ("float32",) and left.startswith("precision float4 and float31 left out, because a100-80g multipl")
    noted = ("precision float32, because the Task's defaults name it",)
    assert choose_precisions("float32", A100, "the Task's defaults") == (("float32",), noted)
    with pytest.raises(ConfigError, match=r"precision float4, which the Task's defaults name: a100-80g multiplies"):
        choose_precisions("float4", A100, "the Task's defaults")
    with pytest.raises(ConfigError, match=r"precision float4: a100-80g multiplies .*bfloat16"):
        choose_precisions("float4", A100)


def test_the_usual_batch_is_a_number_of_tokens() -> None:
    assert usual_batch(8192)[0] == 512 and usual_batch(2048)[0] == 2048
    assert "4.2M tokens" in usual_batch(8192)[1]
    assert usual_batch(121856) == (32, "global batch 32, because that is about 3.9M tokens a step of 121856 each")
    assert [usual_batch(seq)[0] for seq in (2**22, 2**23, 10**18)] == [1, 1, 1]


@pytest.mark.parametrize(
    ("layout", "micro_batch", "least"),
    [
        ("fsdp", None, 16),
        ("fsdp", 4, 16),
        ("hsdp", None, 16),
        ("dp_shard=2,tp=8", None, 4),
        ("dp_shard=4,pp=4,schedule=1f1b", None, 16),
        ("dp_shard=4,pp=4,schedule=1f1b", 2, 32),
        ("dp_shard=4,pp=4,schedule=interleaved", None, 32),
        (None, None, 4),
    ],
)
def test_a_batch_that_follows_the_length_leaves_no_rank_idle(
    layout: str | None, micro_batch: int | None, least: int
) -> None:
    """On 16 devices: of a million positions 4 samples are usual."""
    written = None if layout is None else parse_layout(layout)
    question = ask(layout=written, micro_batch=micro_batch, follows_length=True)
    found = question.of_length(2**20)
    assert (found.global_batch, found.seq, found.follows_length) == (least, 2**20, False)
    assert ("because the layout takes no less" in found.notes[-1]) == (least > 4)
    assert question.of_length(8192).global_batch == usual_batch(8192)[0] == 512
    assert replace(question, follows_length=False).of_length(2**20).global_batch == 32


def test_a_written_layout_takes_what_is_left() -> None:
    space = ask(layout=parse_layout("tp=4,dp_shard=*")).space()
    assert space.layout is not None and space.layout.dp_shard == 4
    hsdp = ask(layout=parse_layout("hsdp")).space().layout
    assert hsdp is not None and (hsdp.dp_replicate, hsdp.dp_shard) == (2, 8)
    with pytest.raises(LayoutError, match=r"dp_shard\(3\)"):
        ask(layout=parse_layout("dp_shard=3")).space()


def test_batch_statistics_and_coupled_losses_fix_the_micro_steps() -> None:
    assert fixed_micro_steps(decoder()) is None
    assert fixed_micro_steps(decoder(stateful=("norm",))) == 1
    assert fixed_micro_steps(decoder(coupled=True)) == 1
    coupled = decoder(coupled=True)
    question = replace(ask(), make_profile=lambda seq, precision: coupled)
    assert question.space().micro_steps == 1
    assert replace(question, micro_steps=4).space().micro_steps == 4


def test_a_micro_batch_is_refused_where_the_micro_steps_are_fixed() -> None:
    """The plan was of that micro-batch, and RUN.toml had the micro-steps."""
    with pytest.raises(ConfigError, match=r"micro_batch 4: .* fixed at 2, because it has micro_steps: leave --micro-b"):
        ask(micro_steps=2, micro_batch=4).space()
    coupled = decoder(coupled=True)
    question = replace(ask(micro_batch=4), make_profile=lambda seq, precision: coupled)
    with pytest.raises(ConfigError, match=r"fixed at 1, because its result depends on which samples share a forward"):
        question.space()
