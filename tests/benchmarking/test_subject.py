"""The subject is ten million parameters, and its tokens are the same for everybody."""

import torch

from allranks.benchmarking.subject import MAX_NORM, SIZES, Tokens, make_config, make_model, make_moe
from allranks.layout import Layout


def test_ten_million_parameters_that_cut_into_four() -> None:
    size = SIZES["10m"]
    count = sum(parameter.numel() for parameter in make_model("10m").parameters())
    assert 10e6 <= count < 12e6
    assert 10e6 <= sum(parameter.numel() for parameter in make_moe("10m").parameters()) < 12e6
    assert size.heads % 4 == 0 and size.hidden % 4 == 0 and size.seq % 4 == 0


def test_tokens_are_fixed() -> None:
    one, other = Tokens(16, 100), Tokens(16, 100)
    assert len(one) == 100 and not one.draws
    assert torch.equal(one[70]["x"], other[70]["x"])
    assert torch.equal(one[3]["x"][1:], one[3]["y"][:-1])


def test_the_batch_grows_with_the_data_parallel_ranks() -> None:
    config = make_config(Layout(dp_shard=2, tp=2), 7)
    assert (config.train.global_batch, config.train.steps, config.train.max_norm) == (4, 7, MAX_NORM)
