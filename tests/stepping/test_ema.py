"""The average of the parameters: its arithmetic, its names, and what is told of it."""

from typing import Any

import pytest
import torch

from allranks.stepping.ema import Ema, describe_ema
from allranks.stepping.session import Session
from tests.distributed.sessions import config_of, session_of, step_through
from tests.distributed.tasks import Tiny

DECAY = 0.9


def session(kind: str = "mlp", precision: str = "float32") -> Session:
    return session_of(Tiny(kind=kind), config_of("single", f"train.ema={DECAY}", precision=precision))


def values(found: Session) -> dict[str, torch.Tensor]:
    assert found.ema is not None
    return {entry.name: part.clone() for entry, part in found.ema.parts()}


def parameters(found: Session) -> dict[str, torch.Tensor]:
    return {f"ema.{name}": found.spread.local(name).clone() for name in found.spread.trainable()}


def test_it_begins_as_the_parameters_and_follows_each_step() -> None:
    found = session(precision="float64")
    expected = parameters(found)
    assert values(found).keys() == expected.keys()
    for _ in step_through(found, 3):
        now = parameters(found)
        expected = {name: DECAY * value + (1 - DECAY) * now[name] for name, value in expected.items()}
        for name, value in values(found).items():
            assert torch.allclose(value, expected[name], rtol=1e-14, atol=1e-16)
    assert not any(torch.equal(value, parameters(found)[name]) for name, value in values(found).items())


def test_it_keeps_trainable_parameters_only_and_tied_ones_once() -> None:
    found = session("frozen")
    assert set(values(found)) == {f"ema.{name}" for name in found.spread.trainable()}
    assert not any("first" in name or "steps" in name for name in values(found))
    tied = session("tied")
    assert tied.ema is not None
    assert tied.ema.aliases() == {"ema.head.weight": "ema.embedding.weight"}
    assert "ema.head.weight" not in values(tied)


def test_in_place_the_model_has_the_averages_and_afterwards_its_own_again() -> None:
    found = session()
    list(step_through(found, 2))
    own, averaged = parameters(found), values(found)
    assert found.ema is not None

    def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
        return all(torch.equal(one[name], value) for name, value in other.items())

    with pytest.raises(KeyError), found.ema.in_place():
        assert same(parameters(found), averaged)
        raise KeyError
    assert same(parameters(found), own) and same(values(found), averaged)
    found.ema.begin()
    assert same(values(found), own)


def test_a_tensor_kept_of_it_is_no_part_of_a_graph() -> None:
    found = session()
    list(step_through(found, 1))
    assert not any(part.requires_grad for part in values(found).values())
    assert isinstance(found.ema, Ema)


def test_what_is_told() -> None:
    (measured,) = describe_ema(0.999, 10_000, evaluates=True)
    assert measured.what == "validation measures the average of the parameters, with the model's own buffers"
    assert describe_ema(0.999, None, evaluates=False) == ()
    (held,) = describe_ema(0.999, 1000, evaluates=False)
    assert held.what == "at the end 37% of the average is still the initial values"
    assert held.because == "train.ema=0.999 over 1000 steps; 0.997 would leave 5%"
