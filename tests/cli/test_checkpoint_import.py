"""`allranks checkpoint import`: words, JSON and exit codes."""

import json
from pathlib import Path

import pytest
import torch

from allranks.cli.main import main
from tests.training.tasks import Curve

TASK = "tests.training.tasks:Curve"


def test_a_file_of_the_model_becomes_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "a.pt", tmp_path / "out"
    torch.save({"model": Curve().model().state_dict()}, file)
    assert main(["checkpoint", "import", str(file), str(out), "--task", TASK]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told == ["taken from the file's key 'model'", f"Wrote {out}/step-00000000: 4 tensors of {file}"]
    assert main(["checkpoint", "verify", str(out / "step-00000000")]) == 0
    assert main(["checkpoint", "import", str(file), str(out), "--task", TASK]) == 78


def test_what_differs_is_shown_and_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "a.pt", tmp_path / "out"
    values = {name: tensor.half() for name, tensor in Curve().model().state_dict().items()}
    torch.save(values, file)
    command = ["checkpoint", "import", str(file), str(out), "--task", TASK]
    assert main(command) == 1
    told = capsys.readouterr().out
    assert "0.weight  retyped  float16[6, 2]  float32[6, 2]" in told
    assert told.splitlines()[-1].endswith("4 tensors differ; nothing was written (--cast takes other types)")
    assert not out.exists()
    torch.save(values | {"more": torch.ones(2)}, file)
    assert main([*command, "--cast", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["checkpoint"] is None and document["differences"][0] == {
        "name": "more",
        "what": "extra",
        "file": "float32[2]",
        "model": "",
    }
    torch.save(values, file)
    assert main([*command, "--cast", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["checkpoint"] == str(out / "step-00000000")


def test_a_file_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["checkpoint", "import", str(tmp_path / "a.pt"), str(tmp_path / "out"), "--task", TASK]
    assert main(command) == 78
    assert capsys.readouterr().err.count("\n") == 1
