"""A Task on one device: real samples, real schedule, float64, and rounding that is told from mistakes."""

from typing import Any

import pytest
import torch
from torch import nn

from allranks.request import TrainRequest
from allranks.training.prepare import prepare
from allranks.verifying.observer import Observer
from allranks.verifying.own_loop import default_dtype
from allranks.verifying.task_alone import TaskAlone, Variation, plain_optimizer
from tests.commands import POINTS

PLAIN = Variation()


def run(variation: Variation = PLAIN, **more: Any) -> Any:
    words = (
        "train.precision=float64",
        "train.global_batch=9",
        "train.steps=3",
        "schedule.name=linear",
        "train.ema=0.9",
    )
    prepared = prepare(TrainRequest(task_spec=POINTS, overrides=words))
    observer = Observer()
    with observer.watching(), default_dtype(torch.float64):
        return TaskAlone(prepared.task, prepared.config, 3, observer, variation, **more).run()


def test_steps_are_recorded() -> None:
    record = run()
    assert record.error == "" and len(record.steps) == 3
    first, second = record.steps[:2]
    assert len(first.rows) == 9 and set(first.rows).isdisjoint(second.rows)
    assert first.settings[0]["lr"] > second.settings[0]["lr"]
    assert set(first.raw) == {"0.weight", "0.bias", "3.weight", "3.bias"} and first.norm > 0
    average = 0.9 * record.start.parameters["0.bias"].value + 0.1 * first.parameters["0.bias"].value
    assert torch.allclose(first.kept["ema.0.bias"].value, average, rtol=1e-15)
    assert set(record.evaluation) == {"loss", "accuracy"} and len(first.draws) == 1


def test_another_rounding_and_other_random_numbers() -> None:
    plain, moved, other = run(), run(Variation(shake=1, shuffled=True)), run(Variation(seed=5))
    apart = (plain.steps[0].raw["0.weight"].value - moved.steps[0].raw["0.weight"].value).abs().max()
    assert 0 < float(apart) < 1e-13
    assert torch.equal(plain.steps[2].parameters["0.weight"].value, other.steps[2].parameters["0.weight"].value)
    assert plain.steps[0].draws != other.steps[0].draws


def test_noise_goes_with_its_sample_when_samples_are_shuffled(monkeypatch: pytest.MonkeyPatch) -> None:
    def noisy(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x + torch.randn(x.shape), layer.weight, layer.bias)

    monkeypatch.setattr(nn.Linear, "forward", noisy)
    plain, moved = run(), run(Variation(shuffled=True))
    for name, part in plain.steps[0].raw.items():
        assert torch.allclose(part.value, moved.steps[0].raw[name].value, rtol=1e-12, atol=1e-14), name


def test_noise_goes_with_its_sample_in_whichever_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a forward for each sample, which shows what rounding does in a low precision, would show noise."""

    def noisy(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x + torch.randn_like(x), layer.weight, layer.bias)

    monkeypatch.setattr(nn.Linear, "forward", noisy)
    plain, apart = run(), run(Variation(apart=True, seed=7))
    assert torch.allclose(plain.steps[0].raw["0.weight"].value, apart.steps[0].raw["0.weight"].value, rtol=1e-11)


def test_each_sample_in_a_forward_of_its_own() -> None:
    plain, apart = run(), run(Variation(apart=True))
    assert (len(plain.steps[0].batch_sizes), len(apart.steps[0].batch_sizes)) == (1, 9)
    assert torch.allclose(plain.steps[0].raw["0.weight"].value, apart.steps[0].raw["0.weight"].value, rtol=1e-11)


def test_a_lower_precision() -> None:
    exact, low = run(), run(lowered=torch.bfloat16)
    gradient, rounded = exact.steps[0].raw["0.weight"].value, low.steps[0].raw["0.weight"].value
    assert rounded.dtype == torch.float32 and not torch.allclose(gradient.float(), rounded, rtol=1e-5)
    assert torch.allclose(gradient.float(), rounded, rtol=0.1, atol=0.05)
    without = run(Variation(exact=True), lowered=torch.bfloat16).steps[0].raw["0.weight"].value
    assert without.dtype == torch.float32 and torch.allclose(gradient.float(), without, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "kind"), [("sgd", torch.optim.SGD), ("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW)]
)
def test_optimizers_are_torchs(name: str, kind: type) -> None:
    words = (f"optimizer.name={name}", "optimizer.lr=0.3", "train.steps=1")
    config = prepare(TrainRequest(task_spec=POINTS, overrides=words)).config.optimizer
    made = plain_optimizer([torch.zeros(1, requires_grad=True)], config)
    assert type(made) is kind and made.param_groups[0]["lr"] == 0.3


def test_state_that_a_forward_moves_is_noted_and_forwards_are_made_as_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not run().stateful
    build = nn.Sequential.__init__

    def count(model: Any, _: Any) -> None:
        model.calls += 1

    def with_counter(model: nn.Sequential, *layers: nn.Module) -> None:
        build(model, *layers)
        model.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        model.register_forward_pre_hook(count)

    monkeypatch.setattr(nn.Sequential, "__init__", with_counter)
    plain, cut = run(), run(Variation(forwards=3))
    assert plain.stateful and cut.stateful
    calls = [[int(step.buffers["calls"].value) for step in record.steps] for record in (plain, cut)]
    assert calls == [[1, 2, 3], [3, 6, 9]]
    assert torch.allclose(cut.steps[0].raw["0.weight"].value, plain.steps[0].raw["0.weight"].value, rtol=1e-12)
