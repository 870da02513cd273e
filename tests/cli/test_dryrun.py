"""`allranks dryrun` from its words to its exit code."""

import importlib
import json
import re
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from allranks.cli.checking import OF_THE_LAYOUT
from allranks.cli.main import main
from tests.reporting.test_step_trace import check_format

NAME = "tests.rehearsing.tasks:Tokens"
FINDINGS = "tests.rehearsing.test_findings"
REFUSALS = "tests.rehearsing.test_refusals"


@pytest.fixture(scope="module", autouse=True)
def dynamo() -> None:
    """Fake tensors import this, which sets an environment variable: before any test looks."""
    importlib.import_module("torch._inductor.runtime.cache_dir_utils")
    importlib.import_module("torch._dynamo")


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """(exit code, standard output, standard error)."""
    code = main(["dryrun", *words])
    told = capsys.readouterr()
    return code, told.out, told.err


def test_a_model_that_fits(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "step.svg"
    words = (NAME, "--cluster", "1x4:a100-80g", "--layout", "tp=2,dp_shard=2", "--timeline", "--svg", str(picture))
    code, out, err = run(capsys, *words)
    assert code == 0, err
    assert "fits: " in out.splitlines()[1]
    assert "One step of rank 0" in out and "One step of rank 3" in out
    drawn = "".join(ElementTree.parse(picture).getroot().itertext()).replace("\xa0", " ")
    first = out.partition("One step of rank 0")[2].partition("One step of rank 3")[0]
    sizes = set(re.findall(r"\d[\d.]* [kM]?B\b", first))
    assert len(sizes) > 10 and all(size in drawn for size in sizes)
    assert all(word in drawn for word in ("layers.0", "layers.2", "the rest", "reduce-scatter", "one step of rank 0"))
    assert "kernels of CUDA" in out


@pytest.mark.full
def test_the_timeline_is_in_the_document_where_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    words = (NAME, "--cluster", "1x2:a100-80g", "--layout", "fsdp", "--ranks", "1", "--timeline", "--json")
    code, out, err = run(capsys, *words)
    assert code == 0, err
    moments = json.loads(out)["ranks"]["1"]["moments"]
    (gathered,) = [m for m in moments if (m["phase"], m["what"], m["unit"]) == ("forward", "gather", "layers.1")]
    assert gathered["num_bytes"] > 0 and gathered["live_by_category"]["gathered"] > 0
    assert sum(gathered["live_by_category"].values()) == gathered["live_bytes"] <= gathered["highest_bytes"]


def test_what_waits_on_the_host_is_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    words = (NAME, "--cluster", "1x4:a100-80g", "--layout", "fsdp,offload=parameters", "--ranks", "0")
    code, out, err = run(capsys, *words)
    assert code == 0, err
    assert "What waits in the host's memory for rank 0: " in out
    assert "in a step, over a link of 31.5 GB/s in each direction" in out
    assert "copies to and from the host: here each ends at once" in out


@pytest.mark.full
def test_a_name_that_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("llama3-8b", "task.layers=6", "train.global_batch=64", "task.seq=4096")
    code, out, _ = run(capsys, *words, "--cluster", "8:a100-40g", "--layout", "ddp", "--ranks", "5", "--json")
    document = json.loads(out)
    assert code == 1
    assert document["fits"] is False and document["free_bytes"] < 0
    assert list(document["ranks"]) == ["5"]
    assert document["ranks"]["5"]["blocks"] == {"traced": 4, "all": 6}


def test_a_model_by_its_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--layers", "2", "--hidden", "64", "--heads", "4", "--vocab", "100", "task.seq=32")
    words = (*sizes, "--cluster", "2:a100-80g", "--layout", "fsdp", "--ranks", "0", "train.global_batch=4", "--json")
    code, out, err = run(capsys, *words)
    assert code == 0, err
    assert json.loads(out)["model"] == "shape"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "needs --cluster"),
        (("--cluster", "4:a100-80g"), "needs a model"),
        (("--layers", "2", "--cluster", "4:a100-80g"), "needs hidden, heads too: --layers 32 --hidden"),
        ((NAME, "--layers", "2", "--cluster", "4:a100-80g"), "is a Task, which has its own sizes"),
        (("no/config.json", "--cluster", "4:a100-80g"), "no/config.json: no such file"),
        (("llama3-9b", "--cluster", "4:a100-80g"), "nearest: llama3-8b"),
        (("deepseek-v3", "--cluster", "4:a100-80g"), "can be planned and not rehearsed"),
        (("llama3-8b", "more", "--cluster", "4:a100-80g"), "write config keys there"),
        ((NAME, "--cluster", "4:a100-80g", "--layout", "tp=3"), "but the world has 4 processes; "),
        ((NAME, "--cluster", "8:a100-80g", "--layout", "tp=8"), "tp(8) does not divide; tp can be 1, 2, 4"),
        ((NAME, "--cluster", "3:a100-80g", "--layout", "cp=3"), "entry 'tokens': 30 or 33 do"),
        ((f"{FINDINGS}:Hinting", "--cluster", "2:a100-80g", "--layout", "fsdp"), "the nearest are layers."),
        ((f"{FINDINGS}:Misshapen", "--cluster", "2:a100-80g", "--layout", "ddp"), "(in 2); mend it there"),
        ((f"{FINDINGS}:Forgetful", "--cluster", "2:a100-80g", "--layout", "tp=2"), "say in hints().tensor sequence"),
        ((NAME, "--cluster", "4:a100-80g", "--layout", "pp=4"), "use fewer stages"),
        ((NAME, "--cluster", "4:a100-80g", "--ranks", "4"), "ranks are 0 to 3"),
        ((NAME, "--cluster", "4:a100-80g", "--layout", "ddp", "layout.ddp_hook=bfloat16"), "is not rehearsed"),
        ((NAME, "--cluster", "1x4:cpu", "--layout", "fsdp,offload=parameters"), "this device is the CPU"),
        ((NAME, "--cluster", "4:a100-81g"), "a100-80g"),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str) -> None:
    code, out, err = run(capsys, *words)
    assert code == 2 and not out
    (line,) = [line for line in err.splitlines() if line.startswith("allranks: error")]
    assert message in line


def test_the_predicted_step_is_written_for_perfetto(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    words = (NAME, "--cluster", "1x4:a100-80g", "--layout", "tp=2,dp_shard=2", "--ranks", "3", "--trace", str(file))
    code, _, err = run(capsys, *words)
    assert code == 0, err
    document = json.loads(file.read_text())
    check_format(document)
    tracks = {event["args"]["name"] for event in document["traceEvents"] if event["name"] == "thread_name"}
    assert tracks == {"compute", "tp", "dp_shard"}
    bars = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert {bar["pid"] for bar in bars} == {4} and sum(bar["dur"] for bar in bars if bar["tid"] == 1) > 0
    end = max(bar["ts"] + bar["dur"] for bar in bars) / 1e6
    assert end == pytest.approx(document["otherData"]["step_seconds"], abs=2e-9)
    assert document["otherData"]["layout"] == "dp_shard=2,tp=2"


@pytest.mark.full
def test_the_predicted_step_of_a_pipeline_has_all_its_stages(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Those of the ranks that were rehearsed, and of what no rank was rehearsed the nearest one's work."""
    file = tmp_path / "step.json"
    words = (NAME, "--cluster", "1x3:a100-80g", "--layout", "pp=3", "train.micro_batch=2", "--ranks", "0,2")
    code, _, err = run(capsys, *words, "--trace", str(file))
    assert code == 0, err
    document = json.loads(file.read_text())
    check_format(document)
    events = document["traceEvents"]
    processes = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    first, last, between = processes
    assert (first, last) == ("rank 0, stage 0", "rank 2, stage 2")
    assert between.startswith("stage 1: not rehearsed, with the work of rank ")
    for name, pid in processes.items():
        bars = [event["name"] for event in events if event["ph"] == "X" and event["dur"] > 0 and event["pid"] == pid]
        assert {"send", "receive", "optimizer", "bubble"} <= set(bars), name
        for way in ("forward layers.", "backward "):
            turns = Counter(bar for bar in bars if bar.startswith(way))
            assert set(turns.values()) == {4}, name


@pytest.mark.full
def test_a_full_trace_leaves_no_block_out(capsys: pytest.CaptureFixture[str]) -> None:
    words = (NAME, "task.layers=9", "--cluster", "1x2:a100-80g", "--layout", "fsdp", "--ranks", "0", "--json")
    (short, code), (full, full_code) = (
        (json.loads(out), code) for code, out, _ in (run(capsys, *words), run(capsys, *words, "--full-trace"))
    )
    assert code == full_code == 0
    said = "4 of 9 blocks were traced, because blocks of one kind do the same; --full-trace traces all"
    assert said in short["decisions"] and not any("were traced" in line for line in full["decisions"])
    assert short["peak_bytes"] == pytest.approx(full["peak_bytes"], rel=0.01)


def test_ranks_that_would_hang_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("tests.rehearsing.parting:Lopsided", "--cluster", "4:a100-80g", "--layout", "fsdp")
    code, out, err = run(capsys, *words)
    assert code == 1, err
    assert "would fail: see Found" in out.splitlines()[1]
    assert "ranks 0 and 3 part at collective" in out and "asked for by tasks.py:" in out.replace("\n", " ")


def test_what_cannot_be_rehearsed(capsys: pytest.CaptureFixture[str]) -> None:
    words = (f"{FINDINGS}:Branching", "--cluster", "2:a100-80g", "--layout", "ddp", "--json")
    code, out, err = run(capsys, *words)
    assert code == 3
    assert json.loads(out)["exit_code"] == 3
    assert "torch.where instead of a branch" in err


@pytest.mark.parametrize(
    ("words", "cluster", "said"),
    [
        (("Reads", "task.how=text"), "1x2:cpu", "writes a tensor into text"),
        (("Reads", "task.how=numbers"), "1x2:cpu", "join tensors by torch.stack"),
        (("Reads", "task.how=sparse"), "1x2:cpu", "rehearse it with a dense one"),
        (("Reads", "task.how=jagged"), "1x2:cpu", "rehearse it with a padded one"),
        (("Reads", "task.how=save"), "1x2:cpu", "torch.save, pickle"),
        (("Naming", "task.how=number"), "1x2:a100-80g", "take the device from one of them"),
        (("Naming", "task.how=draw"), "1x2:a100-80g", "take the device from one of them"),
    ],
)
def test_a_sound_program_that_reads_values_is_called_undetermined(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], cluster: str, said: str
) -> None:
    """Not faulty: `plan --check` takes a document of this kind for no word on the layout (cli/checking.py)."""
    words = (f"{REFUSALS}:{words[0]}", *words[1:], "--cluster", cluster, "--layout", "ddp", "--json")
    code, out, err = run(capsys, *words)
    assert code == 3, err
    document = json.loads(out)
    assert document["kind"] == "Unrehearsable" and document["kind"] not in OF_THE_LAYOUT
    brought = "task.how=number" in words and torch.version.cuda  # torch brings it there, and stops where it is used
    place = r"\(in 2\)" if brought else r"\(in 1, test_refusals\.py:\d+\)"
    assert said in document["error"] and re.search(place, document["error"])


@pytest.mark.parametrize("how", ["model", "dataset", "item", "optimizer"])
def test_what_raises_before_the_first_step_is_refused_in_one_line(capsys: pytest.CaptureFixture[str], how: str) -> None:
    words = (f"{REFUSALS}:Unready", f"task.how={how}", "--cluster", "1x2:cpu", "--layout", "ddp", "--json")
    code, out, err = run(capsys, *words)
    assert code == 2 and "Traceback" not in err
    document = json.loads(out)
    assert (document["kind"], document["exit_code"]) == ("TaskError", 2)
    assert re.search(r"Unready cannot start: .* \(test_refusals\.py:\d+\)", document["error"])
