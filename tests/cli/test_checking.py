"""`plan --check`: what a dry run is told, how it is read, and when it is given up."""

import importlib
import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from allranks.cli.checking import Rehearser
from allranks.cli.main import main
from allranks.cli.planned_model import find_subject
from allranks.layout import Layout
from allranks.plan import Choice
from allranks.plan_request import PlanRequest
from allranks.planning.dry_run import DryRun, ratios
from allranks.planning.estimate import estimate
from allranks.planning.scale import cluster_of
from allranks.rehearsing.dryrun import WORKSPACE_BYTES
from tests.commands import POINTS, allranks
from tests.planning.questions import ask
from tests.test_rehearsal import rank, rehearsal


@pytest.fixture(scope="module", autouse=True)
def dynamo() -> None:
    """A trace imports this, which sets an environment variable: before any test looks."""
    importlib.import_module("torch._inductor.runtime.cache_dir_utils")


NAME = PlanRequest(("llama3-8b",), ("2x8:a100-80g",), check=True)
CHOICE = Choice(Layout(dp_shard=8, tp=2, recompute="full"), 64, 2)


def rehearser(program: str = "", request: PlanRequest = NAME, limit: float = 60.0) -> Rehearser:
    """One that runs a text of Python in the place of allranks."""
    return Rehearser(request, find_subject(request), limit, (sys.executable, "-c", program))


def printing(document: Any, code: int) -> str:
    """A program that prints a document and exits."""
    return f"import json; print(json.dumps({document!r})); raise SystemExit({code})"


def refusal(kind: str, message: str, code: int = 2) -> str:
    return printing({"error": message, "kind": kind, "exit_code": code}, code)


def test_what_a_dry_run_is_told() -> None:
    words = rehearser().words(ask(seq=None), CHOICE)
    assert words[:5] == ["llama3-8b", "--cluster", "2x8:a100-80g", "--layout", "dp_shard=8,tp=2,recompute=full"]
    assert words[5:] == ["train.global_batch=64", "train.precision=bfloat16", "train.micro_batch=2"]
    assert "task.seq=2048" in rehearser().words(ask(seq=2048), CHOICE)
    assert not any(word.startswith("layout.gather") for word in words)
    exact = Choice(Layout(dp_shard=8, tp=2, gather="float32"), 64, 2)
    assert "layout.gather=float32" in rehearser().words(ask(), exact)
    ring = Choice(Layout(cp=4, dp_shard=4, context="ring"), 64, 1, "float32")
    assert {"layout.context=ring", "train.precision=float32"} <= set(rehearser().words(ask(), ring))


def test_the_cluster_is_the_users_with_the_devices_that_were_planned(tmp_path: Path) -> None:
    """A file by its path, whatever name stands in it; another number of its devices beside that."""
    (tmp_path / "ours.toml").write_text('nodes = 2\ndevices_per_node = 4\ndevice = "a100-80g"\n')
    path = str(tmp_path / "ours.toml")
    request = PlanRequest(("llama3-8b",), (path,), check=True)
    question = ask(where=path)
    words = rehearser(request=request).words(question, CHOICE)
    assert path in words and "--gpus" not in words
    smaller = question.on(cluster_of(question.cluster, 4))
    words = rehearser(request=request).words(smaller, CHOICE)
    assert words[words.index("--cluster") :][:4] == ["--cluster", path, "--gpus", "4"]
    several = replace(request, cluster=("1x4:a100-80g", path))
    words = rehearser(request=several).words(smaller, CHOICE, path)
    assert words[words.index("--cluster") :][:4] == ["--cluster", path, "--gpus", "4"], "not what has the same name"


@pytest.mark.full
def test_a_files_own_device_is_rehearsed_whatever_their_number(tmp_path: Path) -> None:
    """Half of a node of A100s whose file says that they have 70 GB."""
    text = 'nodes = 1\ndevices_per_node = 8\ndevice = {like = "a100-80g", memory_gb = 70}\n'
    (tmp_path / "ours.toml").write_text(text)
    task, keys = "tests.rehearsing.tasks:Tokens", ("--layout", "fsdp", "--micro-batch", "2", "--check", "--json")
    where = ("--cluster", str(tmp_path / "ours.toml"), "--gpus", "4")
    planned = allranks("plan", task, "train.global_batch=16", *where, *keys, folder=Path(__file__).parents[2])
    (line,) = (line for line in planned.stderr.splitlines() if line.startswith("checking: allranks "))
    (checked,) = json.loads(planned.stdout)["checked"]
    assert checked["outcome"] == "stands"
    told = allranks(*shlex.split(line.partition("allranks ")[2]), "--json", folder=Path(__file__).parents[2])
    assert json.loads(told.stdout)["capacity_bytes"] == pytest.approx(0.985 * 70e9)


def test_a_task_keeps_its_words_and_its_micro_steps() -> None:
    request = PlanRequest((POINTS, "train.micro_steps=2"), ("1x4:a100-80g",), check=True)
    subject = find_subject(request)
    question = ask(where="1x4:a100-80g")
    words = Rehearser(request, subject).words(question, Choice(Layout(dp_replicate=4), 64, 8))
    assert words[:2] == [POINTS, "train.micro_steps=2"] and words[-1] == "train.micro_steps=2"
    assert not any(word.startswith(("train.micro_batch", "task.seq")) for word in words)


def test_sizes_go_along() -> None:
    sizes = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 4}
    alone = rehearser(request=PlanRequest((), ("2x8:a100-80g",), sizes)).words(ask(seq=2048), CHOICE)
    assert alone[:5] == ["--layers=2", "--hidden=64", "--heads=4", "--kv-heads=4", "--cluster"]
    assert "task.seq=2048" in alone
    changed = rehearser(request=PlanRequest(("llama3-8b",), ("2x8:a100-80g",), {"layers": 2})).words(ask(), CHOICE)
    assert changed[:3] == ["llama3-8b", "--layers=2", "--cluster"]


@pytest.mark.parametrize("code", [0, 1])
def test_what_was_counted_is_read(code: int, capfd: pytest.CaptureFixture[str]) -> None:
    counted = rehearsal(replace(rank(0, 700), host_peak_bytes=50))
    told = rehearser(printing(counted.to_json(), code))(ask(), CHOICE)
    assert isinstance(told, DryRun) and (told.peak_bytes, told.host_bytes) == (700, 8 * 50)
    assert "checking: allranks dryrun llama3-8b --cluster" in capfd.readouterr().err


def test_what_training_would_refuse_is_a_fault_and_what_a_rehearsal_alone_refuses_is_not() -> None:
    for kind in ("LayoutError", "TaskError"):
        assert rehearser(refusal(kind, "tp=3 does not divide"))(ask(), CHOICE) == DryRun(fault="tp=3 does not divide")
    for kind, code in (("NotRehearsed", 2), ("Unrehearsable", 3)):
        rehearse = rehearser(refusal(kind, "no rehearsal", code))
        assert rehearse(ask(), CHOICE) == rehearse(ask(), CHOICE) == "no rehearsal"


def test_what_is_wrong_whatever_the_layout_is_asked_once() -> None:
    rehearse = rehearser(refusal("ConfigError", "gpt2 can be planned and not rehearsed"))
    assert rehearse(ask(), CHOICE) == "gpt2 can be planned and not rehearsed"
    assert rehearse(ask(), CHOICE) is None


def test_a_program_that_breaks_is_no_answer() -> None:
    told = rehearser("raise RuntimeError('torn')")(ask(), CHOICE)
    assert told == "the dry run ended with exit code 1: RuntimeError: torn"
    assert rehearser("raise SystemExit(9)")(ask(), CHOICE) == "the dry run ended with exit code 9: it said nothing"


def test_time_that_is_up_ends_the_dry_run_and_all_others() -> None:
    rehearse = rehearser("import time; time.sleep(3600)", limit=0.5)
    assert str(rehearse(ask(), CHOICE)).startswith("not done within 500.0 ms")
    assert rehearse(ask(), CHOICE) is None


@pytest.mark.parametrize(
    "words",
    [("config.json",), ("llama3-9b", "--layers", "2")],
)
def test_bad_input_is_one_line(words: tuple[str, ...], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 64}))
    words = tuple(str(tmp_path / word) if word.endswith(".json") else word for word in words)
    assert main(["plan", *words, "--cluster", "2:h100", "--check"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.full
def test_the_real_command_rehearses_what_it_planned(tmp_path: Path) -> None:
    """One layout and one micro-batch, so that one dry run is made; its document is that of `allranks dryrun`."""
    task, where = ("tests.rehearsing.tasks:Tokens", "train.global_batch=16"), ("--cluster", "1x4:a100-80g")
    folder = Path(__file__).parents[2]
    words = ("plan", *task, *where, "--layout", "fsdp", "--micro-batch", "2", "--check", "--json")
    document = json.loads(allranks(*words, folder=folder).stdout)
    (checked,) = document["checked"]
    assert (checked["layout"], checked["outcome"]) == ("dp_shard=4", "stands")
    keys = ("train.micro_batch=2", f"train.precision={checked['precision']}")
    told = json.loads(allranks("dryrun", *task, *keys, *where, "--layout", "fsdp", "--json", folder=folder).stdout)
    best = document["best"]
    assert best["peak_bytes"]["expected"] == pytest.approx(told["peak_bytes"] + told["margin_bytes"])
    assert best["bytes_by_category"]["gathered"] == told["ranks"]["0"]["by_category"]["gathered"]


@pytest.mark.full
def test_a_model_by_its_sizes_is_rehearsed(tmp_path: Path) -> None:
    """Of a config.json and of sizes alone; what has no module here is planned and says why it was not rehearsed."""
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config |= {"intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 64, "head_dim": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    where = ("--cluster", "1x4:a100-80g", "--layout", "fsdp", "--global-batch", "8", "--micro-batch", "2", "--json")
    sizes = ("--layers", "2", "--hidden", "64", "--heads", "4")
    for model, outcome in (
        ((str(tmp_path / "config.json"),), "stands"),
        ((*sizes, "--seq", "64"), "stands"),
        ((*sizes, "--kv-heads", "2"), "not checked"),
    ):
        document = json.loads(allranks("plan", *model, *where, "--check", folder=tmp_path).stdout)
        assert [checked["outcome"] for checked in document["checked"]] == [outcome], document["checked"]


@pytest.mark.full
def test_a_layout_of_a_task_with_its_own_step_is_kept() -> None:
    folder = Path(__file__).parents[2]
    words = (
        "plan",
        "examples/gan/task.py",
        "--cluster",
        "1x2:cpu",
        "--layout",
        "ddp",
        "--micro-batch",
        "32",
        "--check",
        "--json",
    )
    (checked,) = json.loads(allranks(*words, folder=folder).stdout)["checked"]
    assert (checked["layout"], checked["outcome"]) == ("dp_replicate=2", "stands")


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_best_few_of_a_search_are_rehearsed(tmp_path: Path) -> None:
    """The best recomputes selectively, on shards."""
    words = ("plan", "llama2-7b", "--seq", "4096", "--global-batch", "32", "--cluster", "1x8:a100-40g", "--check")
    ran = allranks(*words, folder=tmp_path, limit=900)
    assert "Checked by dry runs" in ran.stdout and ran.stdout.count("GB counted") >= 3, ran.stdout
    assert "is not rehearsed" not in ran.stdout


DENSE, SPARSE, TASK = "llama3-8b", "mixtral-8x7b", "examples/text/task.py"
PLANNED: list[tuple[str, Layout, str, int]] = [  # of a data-parallel rank's samples the last
    (DENSE, Layout(cp=8), "bfloat16", 8),
    (TASK, Layout(dp_shard=8), "bfloat16", 8),
]
PLANNED_TOO: list[tuple[str, Layout, str, int]] = [
    (DENSE, Layout(dp_replicate=2, tp=2, pp=2, recompute="full"), "bfloat16", 8),
    (DENSE, Layout(dp_shard=4, tp=2), "bfloat16", 8),
    (DENSE, Layout(dp_shard=4, tp=2, gather="float32"), "bfloat16", 8),
    (DENSE, Layout(dp_shard=8), "float16", 8),
    (DENSE, Layout(dp_shard=4, tp=2, recompute="selective"), "float32", 8),
    (DENSE, Layout(dp_replicate=2, tp=4), "bfloat16", 8),
    (DENSE, Layout(dp_replicate=2, pp=4, recompute="full"), "bfloat16", 64),
    (DENSE, Layout(dp_shard=4, pp=2), "bfloat16", 64),
    (DENSE, Layout(dp_replicate=4, pp=2, schedule="gpipe"), "bfloat16", 16),
    (DENSE, Layout(pp=8), "bfloat16", 64),
    (DENSE, Layout(cp=8, context="ring"), "float32", 8),
    (DENSE, Layout(cp=8, context="ring", recompute="selective"), "bfloat16", 8),
    (DENSE, Layout(dp_shard=2, cp=4, context="ring", recompute="full"), "bfloat16", 8),
    (SPARSE, Layout(dp_shard=4, tp=2, ep=4, recompute="full"), "bfloat16", 8),
    (SPARSE, Layout(dp_shard=8, ep=8), "float32", 8),
    (SPARSE, Layout(dp_shard=8, ep=2, recompute="selective"), "bfloat16", 8),
    (SPARSE, Layout(dp_shard=8, ep=2, recompute="full"), "bfloat16", 8),
    (SPARSE, Layout(dp_replicate=2, dp_shard=4, ep=2, recompute="selective"), "bfloat16", 8),
    (SPARSE, Layout(dp_replicate=8, ep=4), "bfloat16", 8),
    (SPARSE, Layout(dp_shard=2, tp=4), "bfloat16", 8),
    (SPARSE, Layout(dp_shard=4, pp=2), "bfloat16", 32),
    (TASK, Layout(dp_shard=8, sharding="grad_op"), "bfloat16", 8),
    (TASK, Layout(dp_replicate=2, dp_shard=4, recompute="full"), "bfloat16", 8),
    (TASK, Layout(dp_replicate=4, pp=2), "bfloat16", 16),
    (TASK, Layout(dp_shard=4, pp=2), "bfloat16", 16),
    (TASK, Layout(dp_shard=4, pp=2), "float16", 16),
    (TASK, Layout(dp_shard=4, tp=2), "bfloat16", 8),
]


@pytest.mark.parametrize(
    ("model", "layout", "precision", "share"),
    [*PLANNED, *(pytest.param(*case, marks=pytest.mark.full) for case in PLANNED_TOO)],
)
def test_what_is_planned_is_what_the_engine_sends_and_holds(
    model: str, layout: Layout, precision: str, share: int
) -> None:
    """Bytes to a percent, on each axis that has any; memory to five, or eight above."""
    sizes = {} if model == TASK else {"layers": 8}
    request = PlanRequest((model,), ("1x8:h100",), sizes, check=True)
    subject = find_subject(request)
    question = ask(where="1x8:h100", seq=None if model == TASK else 2048)
    question = replace(question, make_profile=subject.profiles_on(question.cluster))
    micro_batch = 4 if layout.pp == 1 else 2
    choice = Choice(layout, share * layout.dp, micro_batch, precision, layout.num_stages // layout.pp)
    told = Rehearser(request, subject)(question, choice)
    assert isinstance(told, DryRun) and not told.fault
    profile = question.make_profile(question.seq, precision)
    planned = estimate(profile, question.cluster, choice)
    axes = {axis for axis in ("tp", "cp", "ep", "pp") if getattr(layout, axis) > 1}
    assert axes <= set(told.sent_bytes) & {row.axis for row in planned.traffic if row.sent_bytes}
    assert ratios(planned, told) == {}
    # More than there is makes a plan careful, and less makes it wrong.
    assert 0.95 < (planned.memory.total - planned.memory.framework + WORKSPACE_BYTES) / told.peak_bytes < 1.08
