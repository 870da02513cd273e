"""What workers had in hand when they ended: the step, its place in the order, and the dataset's own numbers."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from allranks.config import Config, override_config
from allranks.data.cut import Cut
from allranks.data.stream import DataStream
from allranks.observing.heartbeat import SLOT_BYTES, Heartbeat
from allranks.run import Run
from allranks.surviving.in_hand import InHand, explain_ends
from tests.commands import PROGRAMS, allranks

ONE = InHand(step=8, first=56, size=8, num_samples=40)
SEED_3 = override_config(Config(), ["train.seed=3", "data.skip=0:8"])


def order(seed: int, num_samples: int) -> DataStream:
    return DataStream(range(num_samples), cut=Cut(8), seed=seed)


def test_a_worker_shows_what_it_has_in_hand() -> None:
    fields = memoryview(bytearray(SLOT_BYTES)).cast("q")
    heart = Heartbeat(fields)
    assert InHand.read(fields) is None
    heart.order(40)
    heart.hold(8, 56, 8)
    assert InHand.read(fields) == ONE
    with heart.holding(9, 64, 8):
        assert InHand.read(fields) == replace(ONE, step=9, first=64)
    assert InHand.read(fields) == ONE
    with pytest.raises(ValueError, match="damaged"), heart.holding(9, 64, 8):
        raise ValueError("a sample is damaged")
    assert InHand.read(fields) == replace(ONE, step=9, first=64), "it ends with this in hand"
    heart.finish_step(8)
    assert InHand.read(fields) is None
    heart.order(None)
    heart.hold(8, 56, 8)
    found = InHand.read(fields)
    assert found is not None and found.samples(0) == []


def test_the_samples_are_those_that_the_step_feeds() -> None:
    fed = order(3, 40).samples_at(np.arange(56, 64)).tolist()
    assert ONE.samples(3) == fed and ONE.samples(4) != fed
    text = explain_ends([ONE, ONE, ONE], SEED_3)
    assert text.startswith(
        f"each ended in step 8, which feeds positions 56 to 63 in the order of samples: samples {fed[0]}, {fed[1]}, "
    )
    assert text.splitlines()[0].endswith(f"{fed[-1]} of dataset('train')")
    assert "data.skip=0:8,56:64 --change data.skip" in text.splitlines()[1]


def test_of_a_large_step_the_first_are_named() -> None:
    text = explain_ends([replace(ONE, size=40)] * 2, Config())
    assert len(re.findall(r"\d+(?=[, ])", text.partition(": samples ")[2].partition(" and 24 more")[0] + " ")) == 16


def test_what_ends_elsewhere_each_time_is_no_samples_fault() -> None:
    nine = replace(ONE, step=9, first=64)
    assert explain_ends([ONE, nine, ONE], SEED_3) == "they ended in step 8, 9: it is no single step's samples"
    assert explain_ends([ONE, None], SEED_3).startswith("they ended in step 8 and with none in hand: ")
    assert explain_ends([None, None], SEED_3) == "each ended with no step's samples in hand"
    assert explain_ends([ONE], SEED_3) == "", "once is no loop"
    no_length = replace(ONE, num_samples=0)
    text = explain_ends([no_length] * 2, SEED_3)
    assert "dataset" not in text and "data.skip=" in text


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize("loading", ["true", "false"])
def test_a_real_run_names_the_samples_that_killed_it_each_time_and_goes_around_them(
    tmp_path: Path, loading: str
) -> None:
    words = ("train.global_batch=4", "checkpoint.every=1", "guard.restarts=1", "track.tensorboard=false")
    task = (f"{PROGRAMS / 'poisoned.py'}", f"task.loading={loading}")
    ran = allranks("train", *task, *words, "--nproc", "2", "--layout", "ddp", "--run", "run", folder=tmp_path, check=93)
    samples = order(0, 40).samples_at(np.arange(40)).tolist()
    step = samples.index(11) // 4
    fed = ", ".join(map(str, samples[4 * step : 4 * step + 4]))
    last = ran.stderr
    assert f"2 attempts in a row ended without a step after step {step - (loading == 'true')}" in last
    assert f"each ended in step {step + 1}, which feeds positions {4 * step} to {4 * step + 3} " in last
    assert f"in the order of samples: samples {fed} of dataset('train')" in last
    skip = f"data.skip={4 * step}:{4 * step + 4}"
    assert f"{skip} --change data.skip" in last
    allranks("train", "--resume", "run", skip, "--change", "data.skip", folder=tmp_path)
    assert len(Run.open(tmp_path / "run").steps()) == 9
