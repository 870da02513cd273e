"""Our side gives the losses of the plain loop, and tells the journal."""

import json
from pathlib import Path

import pytest
import torch

from allranks.benchmarking.ours import our_steps
from allranks.benchmarking.raw import raw_steps
from allranks.layout import Layout
from allranks.observing.journal import Journal
from allranks.observing.recorder import Recorder
from allranks.parallel.backend import DeviceChoice
from allranks.process_environment import ALONE

CPU = torch.device("cpu")


def test_both_sides_lose_the_same(tmp_path: Path) -> None:
    layout, choice = Layout(kind="single"), DeviceChoice(CPU, "gloo", None, ())
    journal = Journal(tmp_path / "journal.jsonl", 0)
    recorder = Recorder(journal)
    ours = [told() for told in our_steps(layout, "tiny", 6, ALONE, choice, recorder)]
    recorder.close()
    journal.close()
    raw = [told() for told in raw_steps(layout, "tiny", 6, 0, CPU)]
    assert ours == pytest.approx(raw, rel=1e-5)
    lines = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["event"] == "step"] == [1, 2, 3, 4, 5, 6]
