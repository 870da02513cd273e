"""`allranks plan` as users type it: the answer, its exit code, bad input in one line."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from allranks.cli.main import main
from tests.commands import PROGRAMS, allranks, environment

LLAMA = ("llama3-8b", "--seq", "4096", "--global-batch", "32")


def plan(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(["plan", *words]) == code
    return capsys.readouterr().out


def document(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(plan(capsys, *words, "--json", code=code))
    return found


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", *words]) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.count("\n") == 1
    return told.err


def test_the_answer_of_a_terminal_has_100_columns(capsys: pytest.CaptureFixture[str]) -> None:
    text = plan(capsys, *LLAMA, "--cluster", "2x8:a100-80g", "--explain", "--tokens", "1T", "--price", "2")
    assert max(map(len, text.splitlines())) <= 100
    assert text.startswith("llama3-8b (8.0B parameters, 4096 positions) on 2x8:a100-80g (16 devices)\nFITS: ")
    for title in ("Where the step goes", "What fills the memory", "For all of it", "Why not the others", "What if"):
        assert title in text
    assert "ddp alone" in text and "does not fit: " in text
    assert "Decided for you" in text and "because" in text


def test_what_does_not_fit_is_1_and_says_what_is_closest(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("llama3-70b", "--cluster", "4:a100-40g", "--layout", "auto,offload=none")
    text = plan(capsys, *words, code=1)
    assert "DOES NOT FIT: the closest is " in text
    found = document(capsys, *words, code=1)
    assert found["fits"] is False and found["best"]["fits"] is False and found["offloaded"] is None


def test_what_fits_with_offload_alone_says_so_and_how_to_ask(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("llama3-70b", "--cluster", "8:a100-80g", "--global-batch", "64", "--seq", "4096")
    text = plan(capsys, *words, code=1)
    assert "DOES NOT FIT without offload: the closest is " in text and "\nFITS WITH OFFLOAD: " in text
    flat = " ".join(text.split())
    option = re.search(r"ask for it: (--layout) (\S+)", flat)
    assert option is not None and max(map(len, text.splitlines())) <= 100
    promised = document(capsys, *words, code=1)["offloaded"]
    asked = document(capsys, *words, option[1], option[2])
    assert asked["fits"] and asked["best"]["layout"] == promised["layout"]
    assert asked["best"]["step_seconds"] == promised["step_seconds"] and asked["offloaded"] is None


def test_json_is_one_document_with_the_keys_that_stay(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, *LLAMA, "--cluster", "2x8:a100-80g")
    best = found["best"]
    assert {"layout", "fits", "peak_bytes", "step_seconds", "mfu", "because"} <= set(best)
    assert best["fits"] is True and 0.1 < best["mfu"] < 0.8
    assert found["others"] and found["refusals"]
    others = {other["family"]: other for other in found["others"]}
    assert others["ddp"]["fits"] is False


def test_clusters_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    two = ("--cluster", "8:a100-80g", "--cluster", "8:h100")
    text = plan(capsys, *LLAMA, *two)
    assert text.startswith("llama3-8b (8.0B parameters, 4096 positions) on 8:h100")
    rows = text[text.index("Compared") :].splitlines()
    assert rows[2].startswith("8:h100") and any(row.startswith("8:a100-80g") for row in rows[3:])
    found = document(capsys, *LLAMA, *two)
    assert [one["cluster"] for one in found["clusters"]] == ["8:a100-80g", "8:h100"]
    assert found["cluster"] == "8:h100"


def test_a_shape_and_a_config_file_are_models(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sizes = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "vocab_size": 32000}
    (tmp_path / "small").mkdir()
    config = tmp_path / "small" / "config.json"
    config.write_text(json.dumps({**sizes, "intermediate_size": 2048, "model_type": "llama"}))
    found = document(capsys, str(config), "--cluster", "4:h100", "--seq", "2048")
    assert found["model"] == "small" and found["seq"] == 2048
    wider = document(capsys, str(config), "--hidden", "1536", "--cluster", "4:h100", "--seq", "2048")
    assert wider["parameters"] > 2 * found["parameters"]
    shape = ("--layers", "12", "--hidden", "768", "--heads", "12", "--vocab", "50257")
    assert document(capsys, *shape, "--cluster", "4:h100")["parameters"] == pytest.approx(124.4e6, rel=0.02)


def test_the_fewest_devices_and_the_longest_samples(capsys: pytest.CaptureFixture[str]) -> None:
    fewest = document(capsys, *LLAMA, "--cluster", "4x8:a100-80g", "--gpus", "?")
    assert 1 < fewest["devices"] <= 8
    sixteen = document(capsys, *LLAMA, "--cluster", "4x8:a100-80g", "--gpus", "16")
    assert (sixteen["devices"], sixteen["cluster"]) == (16, "2x8:a100-80g")
    longest = document(capsys, "llama3-8b", "--global-batch", "8", "--cluster", "8:a100-80g", "--seq", "?")
    assert longest["seq"] > 8192 and any("positions are the most" in note for note in longest["notes"])


def test_a_layout_that_the_user_wrote(capsys: pytest.CaptureFixture[str]) -> None:
    words = (*LLAMA, "--cluster", "8:a100-80g")
    found = document(capsys, *words, "--layout", "dp_shard=8,recompute=full", "--micro-batch", "2")
    assert (found["best"]["layout"], found["best"]["micro_batch"]) == ("dp_shard=8,recompute=full", 2)
    fixed = document(capsys, *words, "--layout", "auto,recompute=full")
    assert "recompute=full" in fixed["best"]["layout"] and fixed["searched"] > found["searched"]
    assert document(capsys, *words, "--layout", "ddp", code=1)["best"]["layout"] == "dp_replicate=8"


def test_what_every_rule_refuses_is_2(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, *LLAMA, "--cluster", "16:a100-80g", "--layout", "tp=16", code=2)
    assert found["best"] is None
    assert found["refusals"][0]["because"] == "tp=16 does not divide 8 key-value heads; tp can be 1, 2, 4, 8"
    text = plan(capsys, *LLAMA, "--cluster", "16:a100-80g", "--layout", "tp=16", code=2)
    assert "REFUSED: no layout is left" in text and "does not divide 8 key-value heads" in text


def test_a_deadline_or_a_budget_that_is_not_kept_is_1(capsys: pytest.CaptureFixture[str]) -> None:
    words = (*LLAMA, "--cluster", "8:a100-80g", "--tokens", "1T", "--price", "2")
    found = document(capsys, *words, "--deadline", "1d", "--budget", "100", code=1)
    assert len(found["unmet"]) == 2 and found["fits"] is True
    assert found["bill"]["money"]["expected"] == pytest.approx(2 * found["bill"]["device_hours"])
    text = plan(capsys, *words, "--deadline", "1d", code=1)
    assert "NOT WITHIN THE LIMIT: " in text and "more than the deadline of 1 d 00 h" in text.replace("\n", " ")
    assert document(capsys, *words, "--deadline", "500w", "--budget", "1e9")["unmet"] == []


def test_checkpoints_take_their_share_of_a_step(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """96 GB (12 bytes a parameter) are written by two nodes of 2 GB/s in 24 s."""
    where = tmp_path / "two.toml"
    storage = "nodes = 2\ndevices_per_node = 8\ndevice = 'a100-80g'\nstorage_gb_per_s = 2\n"
    where.write_text(storage)
    words = ("llama3-8b", "--seq", "4096", "--global-batch", "32", "--cluster", str(where))
    plain, saving = document(capsys, *words), document(capsys, *words, "--checkpoint-every", "4")
    assert "checkpoint" not in plain["best"]["seconds_by_cause"]
    assert any("holds no checkpoint, because no number of steps" in note for note in plain["notes"])
    # Written beside the steps: the next one waits for it, so that four steps take as long as the writing.
    assert plain["best"]["step_seconds"]["expected"] < 3
    assert saving["best"]["step_seconds"]["expected"] == pytest.approx(12 * 8.03e9 / 2 / 2e9 / 4, rel=0.02)
    assert saving["best"]["seconds_by_cause"]["checkpoint"] > 1
    assert not any("checkpoint" in note for note in saving["notes"])
    text = plan(capsys, *words, "--checkpoint-every", "4")
    assert re.search(r"^  checkpoint +[\d.]+ m?s +\d+%", text, re.MULTILINE)


def test_the_guide_needs_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    text = plan(capsys, "--guide")
    assert text.startswith("Which layout?") and "tp inside the node" in text


def test_the_guide_and_the_explanation_are_documents_too(capsys: pytest.CaptureFixture[str]) -> None:
    guide = document(capsys, "--guide")
    assert list(guide) == ["guide"] and set(guide["guide"][0]) == {"where", "use", "costs", "family"}
    words = (*LLAMA, "--cluster", "2x8:a100-80g")
    plain, explained = document(capsys, *words), document(capsys, *words, "--explain")
    assert {key: explained[key] for key in plain} == plain and set(explained) - set(plain) == {"guide", "blocks"}
    assert [turn["use"] for turn in explained["guide"]] == [turn["use"] for turn in guide["guide"]]
    assert any("128.5 GB" in line for turn in explained["guide"] for line in turn["numbers"])
    (layers,) = [block for block in explained["blocks"] if block["unit"] == "layers.*"]
    assert (layers["count"], layers["gathered_bytes"]) == (32, 2 * layers["parameters"])
    assert layers["kept_bytes"] > layers["kept_bytes_recompute_full"] > 0 and layers["kept_most_by"]
    assert document(capsys, *words, "--guide") == explained


BAD = [
    (("--guide", "nonsense"), "--guide is the guide without a model, and takes no 'nonsense': leave it out, or add"),
    (("--guide", "--explain"), "takes no --explain"),
    (("--guide", "--kv-heads", "8"), "takes no --kv-heads"),
    (("llama3-8b",), "plan needs --cluster: 8x8:a100-80g, local or a TOML file"),
    (("lama3-8b", "--cluster", "local"), "nearest: llama3-8b"),
    (("--cluster", "local"), "plan needs a model"),
    (("llama3-8b", "--cluster", "8:a10000"), "unknown device 'a10000'"),
    (("llama3-8b", "--cluster", "0:a100"), "1 node of 0 devices: no devices"),
    (("llama3-8b", "--cluster", "nowhere.toml"), "nowhere.toml: no such file"),
    (("llama3-8b", "--cluster", "8:h100", "--gpus", "12"), "has nodes of 8 devices; use 8 or 16"),
    (("llama3-8b", "--cluster", "8:h100", "--gpus", "0"), "--gpus 0: no devices; give at least 1, or '?' to ask how"),
    (("llama3-8b", "--cluster", "8:h100", "--gpus", "-1"), "--gpus -1: no devices; give at least 1, or '?' to ask how"),
    (("llama3-8b", "--cluster", "8:h100", "--gpus", "many"), "--gpus many: not understood"),
    (("llama3-8b", "--cluster", "8:h100", "--seq", "32q"), "--seq 32q: not understood; write 30, 30k, 30m"),
    (("llama3-8b", "--cluster", "8:h100", "--tokens", "0"), "--tokens 0: not understood"),
    (("llama3-8b", "--cluster", "8:h100", "--deadline", "30d"), "--deadline needs --tokens"),
    (("llama3-8b", "--cluster", "8:h100", "--tokens", "1T", "--budget", "5"), "--budget needs a price"),
    (("llama3-8b", "--cluster", "8:h100", "--global-batch", "0"), "--global-batch 0: write a number above 0"),
    (("llama3-8b", "--cluster", "8:h100", "--global-batch", "9" * 21), "--global-batch 1e+21: more than 1e+12"),
    (("llama3-8b", "--cluster", "8:h100", "--tokens", "1T", "--price", "-2"), "--price -2: write a number above 0"),
    (("llama3-8b", "--cluster", "8:h100", "--tokens", "1T", "--price", "nan"), "--price nan: write a number above 0"),
    (("llama3-8b", "--cluster", "8:h100", "--tokens", "1T", "--watts", "1e9"), "--watts 1e+09: more than"),
    (("llama3-8b", "--cluster", "8:h100", "--price", "2"), "--price needs --tokens"),
    (("llama3-8b", "--cluster", "8:h100", "--watts", "700"), "--watts needs --tokens"),
    (("llama3-8b", "--cluster", "8:h100", "--top-k", "2"), "top_k=2, but it has no experts"),
    (("llama3-8b", "--cluster", "8:h100", "--tokens", "1T", "--budget", "-5"), "--budget -5: write a number above 0"),
    (("llama3-8b", "--cluster", "8:h100", "--tokens", "1e400"), "--tokens 1e400: more than 1e+18"),
    (("llama3-8b", "--cluster", "8:h100", "--gpus", "?", "--seq", "?"), "two questions: give one of them a number"),
    (("llama3-8b", "--cluster", "8:h100", "--what-if", "recompute=maybe"), "no recompute is called 'maybe'"),
    (("llama3-8b", "--cluster", "8:h100", "--precision", "float12"), "h100 multiplies "),
    (("llama3-8b", "--cluster", "8:h100", "--layout", "dp_shard=3"), "dp_shard(3)"),
    (("llama3-8b", "--cluster", "8:h100", "--layout", "fdsp"), "did you mean"),
    (("llama3-8b", "--cluster", "8:h100", "--what-if", "recomputes=full"), "did you mean recompute?"),
    (("llama3-8b", "train.steps=3", "--cluster", "8:h100"), "config files and keys belong to a Task"),
    (("nowhere.json", "--cluster", "8:h100"), "nowhere.json: no such file"),
    (("--layers", "12", "--cluster", "8:h100"), "a model shape needs hidden, heads too"),
    (("llama3-8b", "--cluster", "8:h100", "--measured"), "--measured runs real steps of a Task"),
    (("llama3-8b", "--cluster", "8:h100", "--checkpoint-every", "0"), "--checkpoint-every is a whole number of steps"),
    (("nowhere.py", "--cluster", "8:h100"), "no Task file"),
]


@pytest.mark.parametrize(("words", "message"), BAD)
def test_bad_input_is_one_line_that_names_it(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refusal(capsys, *words)


@pytest.mark.parametrize(
    ("cluster", "batch", "layout", "told"),
    [
        (
            "7:h100",
            "3",
            ("ddp",),
            "leaves 4 of dp_replicate * dp_shard = 7 ranks without a sample; global_batch can be 7",
        ),
        ("8:h100", "7", ("dp_replicate=4,pp=2",), "a global batch of 7 over dp=4 leaves 3; global_batch can be 8"),
        (
            "8:h100",
            "10",
            ("pp=2,dp_shard=4", "--micro-batch", "1"),
            "a global batch of 10 over dp=4 leaves 2; global_batch can be 8 or 12",
        ),
        (
            "8:h100",
            "10",
            ("pp=8", "--micro-batch", "3"),
            "samples of a data-parallel rank, and pp=8 wants one shape; micro_batch can be 1 (10 micro-steps)",
        ),
        ("8:h100", "6", ("pp=8",), "at least; a rank has 6: global_batch can be 8"),
    ],
)
def test_a_batch_that_cannot_be_split_is_refused_with_what_can(
    cluster: str, batch: str, layout: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("gpt2", "--cluster", cluster, "--layout", *layout)
    (refused,) = document(capsys, *words, "--global-batch", batch, code=2)["refusals"]
    assert told in refused["because"]
    named = re.search(r"(global|micro)_batch can be (\d+)", refused["because"])
    assert named is not None
    instead = ["--global-batch", named[2] if named[1] == "global" else batch]
    instead += ["--micro-batch", named[2]] if named[1] == "micro" else []
    found = document(capsys, *words, *instead)
    assert found["best"] is not None and not found["refusals"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "holds no table"),
        ("{", "cannot be read as JSON"),
        ('{"model_type": "gpt2", "hidden_size": 8}', "says none of num_hidden_layers"),
    ],
)
def test_a_file_that_is_no_config_is_refused(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(text)
    assert message in refusal(capsys, str(tmp_path / "config.json"), "--cluster", "8:h100")


def test_no_torch_for_a_model_by_name(tmp_path: Path) -> None:
    """In a process of its own: the whole command, then what it has imported."""
    code = """if True:
        import sys
        from allranks.cli.main import main
        code = main(sys.argv[1:])
        heavy = sorted({"torch", "numpy"} & sys.modules.keys())
        print(code, heavy, file=sys.stderr)
    """
    words = ["plan", *LLAMA, "--cluster", "2x8:a100-80g", "--explain", "--save", "out"]
    for given, imported in ((words, "0 []"), (["plan", "--help"], "0 []"), (["plan", "--guide"], "0 []")):
        command = [sys.executable, "-c", code, *given]
        ran = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True)
        assert ran.stderr.splitlines()[-1] == imported
    assert json.loads((tmp_path / "out" / "plan.json").read_text())["model"] == "llama3-8b"


def test_a_plan_of_a_task_is_trained_as_it_is(tmp_path: Path) -> None:
    """Plan on this machine, then `allranks train` with the file that it wrote, unchanged but for the steps."""
    source = (PROGRAMS / "points.py").read_text()
    (tmp_path / "points.py").write_text(source)
    keys = ("train.global_batch=8", "train.steps=3")
    planned = allranks("plan", "points.py", *keys, "--cluster", "1x2:cpu", "--save", "plans/a", folder=tmp_path)
    assert "allranks train plans/a/RUN.toml" in planned.stdout
    best = json.loads((tmp_path / "plans" / "a" / "plan.json").read_text())["best"]
    allranks("train", "plans/a/RUN.toml", "--run", "run", folder=tmp_path)
    journal = (tmp_path / "run" / "journal" / "rank-00000.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in journal]
    start = next(event for event in events if event["event"] == "start")
    assert (start["layout"], start["world_size"]) == (best["layout"], 2)
    assert [event["samples"] for event in events if event["event"] == "step"] == [8, 16, 24]
    report = json.loads(allranks("report", "run", "--json", folder=tmp_path).stdout)
    predicted, fullest = report["predicted"], max(report["memory_bytes"].values())
    assert predicted["differs"] == "" and predicted["layout"] == best["layout"]
    step, peak = predicted["step_seconds"], predicted["peak_bytes"]
    assert (step["expected"], step["measured"]) == (best["step_seconds"]["expected"], report["step_seconds"])
    assert (peak["expected"], peak["measured"]) == (best["peak_bytes"]["expected"], fullest)
    assert step["ratio"] == step["measured"] / step["expected"]
    assert "Predicted and measured" in allranks("report", "run", folder=tmp_path).stdout
