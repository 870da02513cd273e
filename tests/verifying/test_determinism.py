"""Two runs of one device: what counts as the same, what is told of the first difference, what the answer says."""

import math
from collections.abc import Callable

import pytest
import torch

from allranks.verifying.determinism import OTHER_SEED, find_noise, first_difference, incomparable
from allranks.verifying.recording import Noise, OneDevice, Part, RunRecord
from tests.verifying.records import one_device, scale


def changed(change: Callable[[RunRecord], object]) -> RunRecord:
    run = one_device()
    change(run)
    return run


def bias(run: RunRecord, value: float) -> None:
    run.steps[1].buffers["mean"].value[0] = value


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda run: scale(run.steps[0].raw, 1 + 1e-9), "step 0: the gradient of weight differs by 1e-09 of"),
        (lambda run: scale(run.steps[1].gradients, 1.5), "step 1: the gradient of weight differs by 0.5 of"),
        (lambda run: run.steps[0].gradients.pop("bias"), "step 0: the gradient of bias is not there"),
        (lambda run: scale(run.steps[0].parameters, 1 + 1e-6), "step 0: parameter weight differs by 1e-06"),
        (lambda run: bias(run, 9.0), "step 1: buffer mean differs by 3.5 of"),
        (lambda run: scale(run.start.parameters, 1 + 1e-15), "parameter weight begins with other values"),
        (lambda run: run.steps[0].rows.append(9), "step 0: the samples are others"),
        (lambda run: run.steps[0].rows.reverse(), ""),  # that is rounding
        (lambda run: run.steps[0].settings[0].update(lr=0.2), "step 0: lr is 0.1 in one and 0.2 in the other"),
        (lambda run: setattr(run.steps[0], "loss", 2.1), "step 0: the loss is 2.0 in one and 2.1 in the other"),
        (lambda run: setattr(run.steps[0], "updates", 2), "step 0: the optimizer is called 1 and 2 times"),
        (lambda run: run.steps[0].kept.update(ema=Part(None, torch.tensor(3.0))), ""),  # one has none to compare
        (lambda run: run.steps.pop(), "one makes 2 steps, the other 1"),
        (lambda run: run.evaluation.update(accuracy=0.5), "evaluation: accuracy is 0.75 in one and 0.5 in the other"),
        (lambda run: setattr(run, "error", "no"), "the second one fails: no"),
        (lambda run: scale(run.steps[0].raw, 1 + 1e-14), ""),
        (lambda run: run.steps[0].kept.update(zero=Part(None, torch.zeros(2))), ""),
        (lambda run: None, ""),
    ],
)
def test_the_first_difference(change: Callable[[RunRecord], object], told: str) -> None:
    said = first_difference(one_device(), changed(change))
    assert said.startswith(told) and bool(said) == bool(told)


def test_as_much_as_the_precision_of_the_program_rounds() -> None:
    other = changed(lambda run: scale(run.steps[0].raw, 1 + 1e-7))
    assert first_difference(one_device(), other) and not first_difference(one_device(), other, 1e-6)


def test_what_is_not_finite_is_the_same_again_and_is_not_compared() -> None:
    one, again = (changed(lambda run: scale(run.steps[1].raw, math.nan)) for _ in range(2))
    assert first_difference(one, again) == ""
    stopped = incomparable(OneDevice(one), "the Task")
    assert stopped is not None and str(stopped).startswith(
        "could not be verified: the Task computes no finite number on one device\n"
        "  step 1: the gradient of weight is not finite"
    )
    for change in (
        lambda run: setattr(run.steps[0], "loss", math.inf),
        lambda run: run.evaluation.update(accuracy=math.nan),
    ):
        assert incomparable(OneDevice(changed(change)), "the Task") is not None
    assert incomparable(OneDevice(one_device()), "the Task") is None


def test_seeds_are_asked_for_only_where_other_ones_matter() -> None:
    noisy, asked = changed(lambda run: scale(run.steps[0].raw, 2.0)), list[int]()

    def again(with_seeds: dict[int, RunRecord]) -> Callable[[int], RunRecord]:
        def run(seed: int) -> RunRecord:
            asked.append(seed)
            return with_seeds[seed]

        return run

    def found(same: RunRecord, other: RunRecord) -> Noise | None:
        return find_noise(one_device(), again({0: same, OTHER_SEED: other}), lambda seeded: [f"seeded {seeded}"])

    assert found(one_device(), one_device()) is None and asked == [OTHER_SEED]
    seeded, wild = found(one_device(), noisy), found(noisy, noisy)
    assert seeded is not None and (seeded.seeded, seeded.operations) == (True, ("seeded True",))
    assert wild is not None and (wild.seeded, wild.operations) == (False, ("seeded False",))


@pytest.mark.parametrize(
    ("noise", "told"),
    [
        (Noise("D", True, ("rand", "randn")), "it draws random numbers: rand, randn\n  two runs with other seeds"),
        (Noise("D", True), "it draws random numbers\n  two runs with other seeds differ: D"),
        (
            Noise("D", False, ("os.urandom",)),
            "no seed reaches what it draws from: os.urandom\n  two runs with",
        ),
        (Noise("D", False), "nothing was seen to draw random numbers\n  two runs with the same seeds differ: D"),
    ],
)
def test_the_answer_names_what_draws_and_how_to_compare_anyway(noise: Noise, told: str) -> None:
    stopped = incomparable(OneDevice(one_device(), noise=noise), "the program")
    assert stopped is not None and stopped.exit_code == 3
    assert f"the program is not deterministic on one device\n  {told}" in str(stopped)
    assert "next: leave the noise out for the time of the comparison; or draw it by torch.randn" in str(stopped)
