"""Records travel between processes: whole, and as they were."""

import cloudpickle
import torch

from allranks.parameter_map import Box
from allranks.verifying.recording import Draw, OneDevice, Part, RunRecord, StepRecord


def test_a_record_survives_the_pipe() -> None:
    part = Part(Box((1,), (2,)), torch.ones(2, dtype=torch.float64))
    step = StepRecord(loss=1.5, rows=[1 << 60], raw={"w": part}, draws=[Draw(7, (2, 3), True)])
    one = OneDevice(RunRecord(steps=[step], resumed=RunRecord(error="no")), [RunRecord()])
    again: OneDevice = cloudpickle.loads(cloudpickle.dumps(one))
    there = again.run.steps[0]
    assert there.rows == [1 << 60] and there.draws == [Draw(7, (2, 3), True)] and there.raw["w"].box == part.box
    assert torch.equal(there.raw["w"].value, part.value) and again.run.resumed is not None
    assert again.run.resumed.error == "no" and there.gradients == {}


def test_what_recomputations_draw_is_told_apart() -> None:
    first, same, other = Draw(7, (2, 3), False), Draw(7, (2, 3), True), Draw(8, (2, 3), True)
    step = StepRecord(draws=[first, same, other])
    assert step.drawn == [first] and step.drawn_otherwise == [other]
