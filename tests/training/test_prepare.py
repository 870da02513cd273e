"""From a request to what will run: nothing is started here, and whatever can be refused is refused here."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from allranks.errors import AllranksError, ConfigError, LayoutError, RunError
from allranks.observing.journal import Journal
from allranks.request import TrainRequest
from allranks.run import Run
from allranks.training.prepare import open_run, prepare, resolve_layout, show_cut
from tests.training.runs import TASKS

CURVE = f"{TASKS}:Curve"
FIRST = TrainRequest(task_spec=CURVE, overrides=("train.steps=9", "train.global_batch=10"))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that made a step and ended."""
    opened = open_run(prepare(replace(FIRST, run=tmp_path / "run")), replace(FIRST, run=tmp_path / "run"))
    opened.release()
    journal = Journal(opened.journal())
    journal.write("step", step=1)
    journal.close()
    return tmp_path / "run"


def test_the_first_start(tmp_path: Path) -> None:
    request = replace(FIRST, run=tmp_path / "run")
    prepared = prepare(request)
    assert (prepared.spec, prepared.kept, prepared.name) == (CURVE, None, "curve")
    assert not (tmp_path / "run").exists()
    opened = open_run(prepared, request)
    assert opened.task == CURVE and opened.holder() is not None
    assert opened.config() == prepared.config and opened.config().schedule.steps == 9
    assert {"allranks", "torch", "argv", "config_digest"} <= json.loads((opened.path / "run.json").read_text()).keys()
    opened.release()


def test_what_want_of_memory_has_made_smaller_holds_on_under_the_words_of_the_first_start(run: Path) -> None:
    kept = Run.open(run)
    config = kept.config()
    kept.write_config(config.model_copy(update={"train": config.train.model_copy(update={"micro_batch": 2})}))
    with pytest.raises(RunError, match=r"train\.micro_batch 2 -> not set; keep it"):
        prepare(replace(FIRST, run=run))
    journal = Journal(kept.journal())
    journal.write("verdict", kind="out_of_memory", what="", evidence=[], next="")
    journal.close()
    assert prepare(replace(FIRST, run=run)).config.train.micro_batch == 2
    words = (*FIRST.overrides, "train.micro_batch=5")
    assert prepare(replace(FIRST, run=run, overrides=words)).config.train.micro_batch == 2
    changed = replace(FIRST, run=run, overrides=words, change=("train.micro_batch",))
    assert prepare(changed).config.train.micro_batch == 5


@pytest.mark.parametrize("damage", ["edited", "cut", "empty"])
def test_a_config_that_was_changed_since_is_refused(run: Path, damage: str) -> None:
    path = run / "config.toml"
    text = path.read_text()
    assert "\nseed = 0\n" in text
    changed = {"edited": text.replace("seed = 0", "seed = 1"), "cut": text[: text.index("seed = 0")], "empty": ""}
    path.write_text(changed[damage])
    for request in (TrainRequest(resume=run), replace(FIRST, run=run)):
        with pytest.raises(RunError, match=r"config.toml is not as allranks wrote it.* key=value") as refused:
            prepare(request)
        assert "\n" not in str(refused.value)
    path.write_text(text)
    request = TrainRequest(resume=run, overrides=("train.seed=1",), change=("train.seed",))
    open_run(prepare(request), request).release()
    assert prepare(TrainRequest(resume=run)).config.train.seed == 1, "what allranks changes is as it wrote it"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if "SHA-256" not in line).replace("seed = 1", "seed = 2"))
    assert prepare(TrainRequest(resume=run)).config.train.seed == 2, "taken as it stands"


def test_a_rollback_between_the_request_and_the_lease_holds_on(run: Path) -> None:
    """The run that is continued may have lived until now: over etcd a command waits for its turn."""
    request = TrainRequest(resume=run)
    prepared, other = prepare(request), Run.open(run)
    other.begin_attempt()
    config = other.config()
    other.write_config(config.model_copy(update={"data": config.data.model_copy(update={"skip": "0:10"})}))
    opened = open_run(prepared, request)
    assert opened.config().data.skip == "0:10" and opened.attempts == other.attempts == 1
    opened.release()


def test_what_a_rollback_left_out_holds_on_under_the_words_of_the_first_start(run: Path) -> None:
    kept = Run.open(run)
    config = kept.config()
    kept.write_config(config.model_copy(update={"data": config.data.model_copy(update={"skip": "0:10,40:60"})}))

    def skipped(*words: str, change: tuple[str, ...] = ()) -> str:
        given = prepare(replace(FIRST, overrides=(*FIRST.overrides, *words), run=run, change=change)).config.data.skip
        assert prepare(TrainRequest(resume=run, overrides=words, change=change)).config.data.skip == given or not words
        return given

    assert skipped() == skipped("data.skip=0:10") == skipped("data.skip=0:10,40:60") == "0:10,40:60"
    with pytest.raises(RunError, match=r"data.skip '?0:10,40:60'? -> '?0:20'?; keep it"):
        skipped("data.skip=0:20")
    assert skipped("data.skip=0:10", change=("data.skip",)) == "0:10"


COUNTING = """import allranks
class Counting(allranks.Task):
    text: str = ""
    defaults = {"train.steps": 3}
    model = dataset = loss = lambda *given: None
    def __init__(self, **settings):
        super().__init__(**settings)
        print("made")
"""


def test_a_task_is_made_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It may parse or load a lot to be made."""
    (tmp_path / "counting_task.py").write_text(COUNTING)
    prepared = prepare(TrainRequest(task_spec=str(tmp_path / "counting_task.py"), overrides=("data.text=*.md",)))
    assert capsys.readouterr().out == "made\n"
    assert prepared.config.train.steps == 3 and vars(prepared.task)["text"].endswith("*.md")


def test_no_task_is_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    request = TrainRequest()
    prepared = prepare(request)
    opened = open_run(prepared, request)
    opened.release()
    assert (prepared.name, prepared.spec, opened.task) == ("demo", None, "allranks.training.demo:Text")
    assert opened.path.parent.resolve() == tmp_path / "runs"
    assert prepare(TrainRequest(resume=opened.path)).config == prepared.config
    assert prepare(TrainRequest(run=opened.path)).kept is not None


def test_a_file_is_named_by_its_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(
        "from tests.training.tasks import Curve\nclass Mine(Curve):\n    defaults = {'train.steps': 3}\n"
    )
    (tmp_path / "run.toml").write_text('[optimizer]\nlr = 0.5\n[task]\nspec = "mine.py:Mine"\nwidth = 9\n')
    monkeypatch.chdir(tmp_path)
    from_command = prepare(TrainRequest(task_spec="mine.py"))
    assert from_command.spec == str(tmp_path / "mine.py") and from_command.config.train.steps == 3
    monkeypatch.chdir("/")
    from_toml = prepare(TrainRequest(toml=tmp_path / "run.toml", overrides=("train.steps=5",)))
    assert from_toml.spec == f"{tmp_path / 'mine.py'}:Mine"
    assert (from_toml.config.optimizer.lr, from_toml.config.train.steps) == (0.5, 5)
    assert from_toml.task.settings["width"] == 9


@pytest.mark.parametrize(
    ("change", "allowed"),
    [
        ({"overrides": ("train.steps=12",)}, True),
        ({"overrides": ("train.epochs=2",)}, True),
        ({"layout": "fsdp"}, True),
        ({"overrides": ("checkpoint.every=2", "checkpoint.keep=1", "evaluate.every=5", "data.workers=1")}, True),
        ({"overrides": ("track.tensorboard=false",)}, True),
        ({"overrides": ("optimizer.lr=1", "train.global_batch=5", "task.width=3")}, False),
        ({"overrides": ("schedule.steps=12",)}, False),
        ({"overrides": ("train.seed=1",)}, False),
    ],
)
def test_what_a_resume_may_change(run: Path, change: dict[str, Any], allowed: bool) -> None:
    named = [text.partition("=")[0] for text in change.get("overrides", ())]
    request = replace(TrainRequest(resume=run), **change)
    before = Run.open(run).config()
    if not allowed:
        with pytest.raises(RunError) as refused:
            prepare(request)
        assert all(f"--change {name}" in str(refused.value) for name in named) and "\n" not in str(refused.value)
        with pytest.raises(RunError) as partly:
            prepare(replace(request, change=tuple(named[1:])))
        assert named[0] in str(partly.value) and not any(f"{name} " in str(partly.value) for name in named[1:])
        request = replace(request, change=tuple(named))
    prepared = prepare(request)
    assert prepared.config != before and Run.open(run).config() == before, "nothing is written before it starts"
    opened = open_run(prepared, request)
    opened.release()
    assert Run.open(run).config() == prepared.config
    assert prepared.config.schedule.steps == (12 if "schedule.steps" in named else 9)


def test_a_resume_takes_the_runs_own_task_and_settings(tmp_path: Path) -> None:
    request = replace(FIRST, overrides=("task.width=3",), run=tmp_path / "run")
    open_run(prepare(request), request).release()
    resumed = prepare(TrainRequest(resume=tmp_path / "run"))
    assert (resumed.spec, resumed.task.settings["width"]) == (CURVE, 3)
    assert prepare(TrainRequest(resume=tmp_path / "run", task_spec=CURVE)).task.settings["width"] == 3


def test_the_same_task_and_config_continue_a_run_by_its_directory(run: Path) -> None:
    assert prepare(replace(FIRST, run=run)).kept is not None
    with pytest.raises(RunError, match=r"train\.global_batch 10 -> 32"):
        prepare(TrainRequest(task_spec=CURVE, run=run))
    longer = prepare(replace(FIRST, run=run, overrides=("train.steps=20", "train.global_batch=10")))
    assert (longer.config.train.steps, longer.config.schedule.steps) == (20, 9)


@pytest.mark.parametrize(
    ("request_", "error", "words"),
    [
        (TrainRequest(task_spec=f"{TASKS}:Gan"), RunError, (CURVE, "Gan")),
        (TrainRequest(), RunError, (CURVE, "allranks.training.demo:Text")),
    ],
)
def test_another_task_is_refused(run: Path, request_: TrainRequest, error: type[AllranksError], words: Any) -> None:
    with pytest.raises(error) as refused:
        prepare(replace(request_, run=run))
    assert all(word in str(refused.value) for word in words)
    if request_.task_spec is not None:
        with pytest.raises(error):
            prepare(replace(request_, resume=run))


def test_a_run_in_which_nothing_was_done_binds_nobody(run: Path) -> None:
    Run.open(run).journal().unlink()
    before = Run.open(run).identity
    same = prepare(replace(FIRST, run=run))
    assert same.kept is not None and same.decisions == ()
    request = TrainRequest(task_spec=f"{TASKS}:Gan", overrides=("train.steps=20", "train.global_batch=8"), run=run)
    prepared = prepare(request)
    (decision,) = prepared.decisions
    assert prepared.kept is None and "begins anew" in decision.what
    assert all(word in decision.because for word in ("Curve", "Gan", "train.global_batch 10 -> 8"))
    assert Run.open(run).identity == before, "nothing is written before it starts"
    opened = open_run(prepared, request)
    assert opened.holder() is not None
    opened.release()
    now = Run.open(run)
    assert now.id != before["id"] and (now.task, now.name) == (f"{TASKS}:Gan", "gan")
    assert (now.config().train.steps, now.config().schedule.steps) == (20, 20), "nothing of the first attempt stays"


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "empty").mkdir()
    assert prepare(replace(FIRST, run=tmp_path / "empty")).kept is None
    for request in (
        replace(FIRST, run=tmp_path),
        replace(FIRST, run=tmp_path / "notes.txt"),
        TrainRequest(resume=tmp_path),
        TrainRequest(resume=tmp_path / "empty"),
        TrainRequest(resume=tmp_path / "nowhere"),
    ):
        with pytest.raises(RunError) as refused:
            prepare(request)
        assert refused.value.exit_code == 78 and "\n" not in str(refused.value)


def test_contradictions_are_refused(run: Path, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[train]\nsteps = 3\n")
    for request, words in (
        (TrainRequest(run=run, resume=run), "both name a directory"),
        (TrainRequest(resume=run, toml=tmp_path / "run.toml"), "run.toml"),
        (TrainRequest(resume=run, change=("train.stepz",)), "train.steps"),
        (replace(FIRST, overrides=("data.text=*.py",)), "Curve has no setting `text"),
    ):
        with pytest.raises(ConfigError, match=words):
            prepare(request)


def test_texts_are_found_again_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "a[b]"
    home.mkdir()
    (home / "some.txt").write_text("words")
    monkeypatch.chdir(home)
    request = TrainRequest(task_spec=f"{TASKS}:WithText", overrides=("data.text=*.txt",), run=tmp_path / "run")
    prepared = prepare(request)
    open_run(prepared, request).release()
    assert prepare(request).kept is not None, "the same words in the same folder are the same config"
    monkeypatch.chdir("/")
    resumed = prepare(TrainRequest(resume=tmp_path / "run"))
    text = resumed.task.settings["text"]
    assert text == prepared.task.settings["text"]
    from allranks.data.sources import text_files

    assert text_files(text) == (home / "some.txt",)
    assert prepare(TrainRequest(task_spec=f"{TASKS}:WithText")).task.settings["text"] is None


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        ("backup", "{here}/backup"),
        ("file://backup", "{here}/backup"),
        ("local://../backup", "{here}/../backup"),
        ("~/backup", "/home/me/backup"),
        ("/mnt/share", "/mnt/share"),
        ("file:///mnt/share", "/mnt/share"),
        ("s3://bucket/folder", "s3://bucket/folder"),
        ("memory://backup", "memory://backup"),
        ("none", None),
    ],
)
def test_a_mirror_in_a_folder_is_found_again_from_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, seen: str | None
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.chdir(tmp_path)
    seen = None if seen is None else seen.format(here=tmp_path)
    request = replace(FIRST, overrides=(f"checkpoint.mirror={given}",), run=tmp_path / "run")
    prepared = prepare(request)
    assert prepared.config.checkpoint.mirror == seen
    open_run(prepared, request).release()
    assert prepare(request).config == prepared.config
    monkeypatch.chdir("/")
    assert prepare(TrainRequest(resume=tmp_path / "run")).config.checkpoint.mirror == seen


def test_a_second_writer_is_refused(run: Path) -> None:
    request = TrainRequest(resume=run, overrides=("train.steps=12",))
    holder = Run.open(run)
    holder.acquire()
    try:
        with pytest.raises(RunError, match="in use by pid"):
            open_run(prepare(request), request)
        assert Run.open(run).config().train.steps == 9, "nothing is written into a leased run"
    finally:
        holder.release()


def test_a_layout_that_does_not_fit_is_refused() -> None:
    config = prepare(FIRST).config
    assert str(resolve_layout(config, 4)) == "dp_replicate=4"
    with pytest.raises(LayoutError, match=r"global_batch\(10\) < .*\(11\)"):
        resolve_layout(config, 11)
    with pytest.raises(LayoutError, match="tp=2 with placement"):
        resolve_layout(prepare(replace(FIRST, layout="placement,tp=2")).config, 2)


def test_the_cut_as_it_is_shown() -> None:
    config = prepare(replace(FIRST, overrides=("train.global_batch=11", "train.micro_batch=2"))).config
    shown = show_cut(config, resolve_layout(config, 2))
    assert (shown["data-parallel ranks"], shown["micro-steps"], shown["samples per rank"]) == (2, 3, [6, 5])
    wide = show_cut(config, resolve_layout(config, 10))
    assert wide["samples per rank"] == "1 to 2"


@pytest.mark.parametrize(("folder", "text"), [("plain", "caf\udce9*"), ("caf\udce9", "*.txt")])
def test_texts_whose_path_is_no_utf8_are_refused_before_there_is_a_run(
    folder: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / folder)
    with pytest.raises(ConfigError, match=r"^data.text='.*udce9.*' has bytes that are no UTF-8"):
        prepare(TrainRequest(task_spec=f"{TASKS}:WithText", overrides=(f"data.text={text}",)))
