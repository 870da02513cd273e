"""`allranks checkpoint`: what it says of good, damaged and absent checkpoints, in words, JSON and exit codes."""

import json
from pathlib import Path
from typing import Any

import pytest

from allranks.checkpointing.checkpoint import Checkpoint, Header
from allranks.checkpointing.reading import unless_read
from allranks.cli.main import main
from tests.checkpointing.worlds import flip, save_alone


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with checkpoints at 200 and 300; not to be changed."""
    run = tmp_path_factory.mktemp("runs") / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "run.json").write_text("{}")
    for step in (200, 300):
        save_alone(run / "checkpoints", step, state={"position": step, "best": float("nan")})
    return run


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    """A copy of it to damage."""
    import shutil

    return Path(shutil.copytree(original, tmp_path / "run"))


def answer(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, dict[str, Any]]:
    code = main(["checkpoint", *map(str, words), "--json"])
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, document


def tensor_file(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}" / "rank-00000.safetensors"


def test_list_is_newest_first(original: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "list", str(original)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["step", "samples", "saved", "size", "tensors", "layout", "state"]
    assert [line[0] for line in lines[1:]] == ["step-00000300", "step-00000200"]
    assert [line[1] for line in lines[1:]] == ["2.4k", "1.6k"]
    assert all(line[-2:] == ["ddp", "good"] for line in lines[1:])


@pytest.mark.parametrize("below", ["", "checkpoints"])
def test_list_as_json(original: Path, below: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, document = answer(capsys, "list", original / below)
    assert code == 0
    newest, _ = document["checkpoints"]
    assert (newest["step"], newest["samples"], newest["run"], newest["num_tensors"]) == (300, 2400, "run-a", 7)
    assert newest["damage"] is None
    assert newest["bytes"] == tensor_file(original, 300).stat().st_size


def test_list_of_one_that_lost_a_file(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensor_file(run, 300).unlink()
    assert main(["checkpoint", "list", str(run)]) == 1
    newest, older = capsys.readouterr().out.splitlines()[1:]
    assert "damaged: " in newest and "rank-00000.safetensors" in newest
    assert older.endswith("good")
    code, document = answer(capsys, "list", run)
    assert code == 1
    assert document["checkpoints"][0]["step"] is None


def test_show_the_newest(original: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "show", str(original)]) == 0
    out = capsys.readouterr().out
    assert "step-00000300: step 300, 2400 samples, run run-a, layout ddp" in out
    rows = [line.split()[:3] for line in out.splitlines()]
    assert ["model.embedding.weight", "float32", "13x7"] in rows
    assert ["model.scale", "float64", "scalar"] in rows
    assert ["model.head.weight", "is", "model.embedding.weight"] in rows
    assert "state: position, best" in out


def test_show_one_as_json(original: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, document = answer(capsys, "show", original / "checkpoints" / "step-00000200")
    assert code == 0
    assert document["step"] == 200
    assert document["tensors"]["model.layers.0.weight"]["shape"] == [5, 3, 4]
    assert document["aliases"] == {"model.head.weight": "model.embedding.weight"}
    assert document["state"] == {"position": 200, "best": {"__float__": "nan"}}


def test_verify_good_ones(original: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "verify", str(original)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": good (")[0] for line in lines] == [
        str(original / "checkpoints" / "step-00000300"),
        str(original / "checkpoints" / "step-00000200"),
    ]
    code, document = answer(capsys, "verify", original)
    assert (code, document["good"], len(document["checkpoints"])) == (0, True, 2)


def test_verify_sees_one_bit(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(tensor_file(run, 200), bit=8 * tensor_file(run, 200).stat().st_size - 1)
    assert main(["checkpoint", "verify", str(run)]) == 1
    good, damaged = capsys.readouterr().out.splitlines()
    assert ": good (" in good
    assert damaged.startswith(str(tensor_file(run, 200))) and "SHA-256" in damaged
    code, document = answer(capsys, "verify", run)
    assert (code, document["good"]) == (1, False)
    assert [row["damage"] is None for row in document["checkpoints"]] == [True, False]


@pytest.mark.parametrize("command", [["verify"], ["show"]])
def test_one_that_was_never_finished(command: list[str], run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = run / "checkpoints" / "step-00000300"
    (step / "COMMITTED").unlink()
    assert main(["checkpoint", *command, str(step)]) == 1
    out, err = capsys.readouterr()
    assert len((out + err).splitlines()) == 1
    assert "never finished" in out + err


@pytest.mark.parametrize("command", ["list", "show"])
def test_names_that_a_terminal_would_obey_are_escaped(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = "\x1b[2J\r\n"
    hostile = Header(run=evil + "run", generation=1, layout=evil + "ddp", step=400, samples=1)
    aliases = {"model." + evil: "model.embedding.weight"}
    save_alone(tmp_path / "checkpoints", 400, header=hostile, aliases=aliases, state={evil + "state": 1})
    assert main(["checkpoint", command, str(tmp_path / "checkpoints")]) == 0
    out = capsys.readouterr().out
    assert all(letter.isprintable() or letter == "\n" for letter in out)
    said = ["ddp"] if command == "list" else ["run", "ddp", "state"]
    assert all(r"\x1b[2J\r\n" + name in out for name in said)
    assert command == "list" or r"model.\x1b[2J\r\n" in out


@pytest.mark.parametrize("command", ["list", "verify"])
def test_what_is_passed_over_is_told(command: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run / "checkpoints"
    (folder / "step-00000300" / "COMMITTED").unlink()
    (folder / "step-00000250").symlink_to(folder / "step-00000200")
    assert main(["checkpoint", command, str(run)]) == 1
    newest, linked, good = capsys.readouterr().out.splitlines()[-3:]
    assert "step-00000300" in newest and "is not committed" in newest and newest.endswith("passed over")
    assert "step-00000250" in linked and "symbolic link" in linked and linked.endswith("passed over")
    assert "step-00000200" in good and "good" in good
    code, document = answer(capsys, command, run)
    assert code == 1 and [row["damage"] is None for row in document["checkpoints"]] == [False, False, True]
    (folder / "step-00000200" / "COMMITTED").unlink()
    assert main(["checkpoint", command, str(run)]) == 1
    assert capsys.readouterr().out.count("passed over") == 3


def test_a_damaged_one_is_not_exported(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(tensor_file(run, 300), bit=8 * 1000)
    out_file = run / "out.safetensors"
    assert main(["checkpoint", "export", str(run), str(out_file)]) == 1
    assert not list(run.glob("*out.safetensors*"))
    code, document = answer(capsys, "export", run, out_file)
    assert (code, document["exit_code"], document["kind"]) == (1, 1, "CheckpointError")


def test_export_says_what_it_wrote(original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out_file = tmp_path / "out.safetensors"
    code, document = answer(capsys, "export", original, out_file)
    assert code == 0
    assert document["checkpoint"] == str(original / "checkpoints" / "step-00000300")
    assert document["bytes"] == out_file.stat().st_size
    assert "head.weight" in document["tensors"]
    assert main(["checkpoint", "export", str(original), str(tmp_path / "b.safetensors")]) == 0
    assert capsys.readouterr().out.startswith(f"Wrote {tmp_path}/b.safetensors: 6 tensors, ")
    code, document = answer(
        capsys, "export", original, tmp_path / "c.safetensors", "--only", "head.*", "--only", "layers.*"
    )
    assert code == 0, document
    assert "head.weight" in document["tensors"] and len(document["tensors"]) < 6
    assert all(name.startswith("head.") or name.startswith("layers.") for name in document["tensors"])


REFUSED = [
    ("export {run} out.bin", 2, "'out.bin' is no safetensors file: write out.bin.safetensors"),
    ("export {run} {run}/there.safetensors", 2, "'{run}/there.safetensors' exists already, and is left as it is"),
    ("export {run} {run}/no/x.safetensors", 2, "'{run}/no/x.safetensors' cannot be written: "),
    ("export {run} {run}/x.safetensors --only hed.*", 2, "--only 'hed.*' names no tensor of the model; it has head."),
    ("list {run}/no", 78, "{run}/no: no such directory; name a run, its checkpoints folder or a step-* directory"),
    ("verify {run}/run.json", 78, "{run}/run.json: no such directory"),
    ("list {run}/logs", 78, "{run}/logs is no run and holds no checkpoint; name a run or a step-* directory"),
    ("show {run}/fresh", 78, "{run}/fresh holds no checkpoint yet; see checkpoint.every and checkpoint.seconds"),
    ("verify {run}/fresh", 78, "{run}/fresh holds no checkpoint yet: there is nothing to verify"),
]


@pytest.mark.parametrize(("words", "code", "message"), REFUSED, ids=[words for words, _, _ in REFUSED])
def test_what_cannot_be_answered_is_one_line(
    words: str, code: int, message: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "there.safetensors").write_text("mine")
    (run / "logs").mkdir()
    (run / "fresh").mkdir()
    (run / "fresh" / "run.json").touch()
    assert main(["checkpoint", *words.format(run=run).split()]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"allranks: error: {message.format(run=run)}")
    assert len(err.splitlines()) == 1
    assert (run / "there.safetensors").read_text() == "mine"


def test_a_fresh_run_lists_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.json").touch()
    assert main(["checkpoint", "list", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path} holds no checkpoint yet\n"
    assert answer(capsys, "list", tmp_path) == (0, {"checkpoints": []})


def test_what_a_command_reads_stays_meanwhile(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []

    def read(checkpoint: Checkpoint, out: Path | None = None, **_: object) -> list[str]:
        assert unless_read(checkpoint.path, lambda path: pytest.fail(f"{path} is read")) is None
        seen.append(checkpoint.path.name)
        if out is not None:
            out.touch()
        return []

    for name in ("check_everything", "export_model"):
        monkeypatch.setattr(f"allranks.cli.checkpoint_tensors.{name}", read)
    assert main(["checkpoint", "verify", str(original)]) == 0
    assert main(["checkpoint", "export", str(original), str(tmp_path / "m.safetensors")]) == 0
    assert seen == ["step-00000300", "step-00000200", "step-00000300"]
