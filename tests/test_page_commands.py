"""Which pages' commands are run, and by which test; and those that only need a run to look at."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from allranks.cli.main import main
from tests.commands import POINTS, allranks
from tests.test_documentation import ROOT, blocks

ROOMS = ("how-to", "tutorial")
RUN = {
    "how-to/own-loop.md": "examples/test_pages.py",
    "how-to/placement.md": "distributed/test_placement_runs.py",
    "how-to/plan.md": "test_plan_pages.py",
    "how-to/plan-100b.md": "test_plan_pages.py",
    "how-to/precision-and-ema.md": "examples/test_pages.py",
    "how-to/rehearse.md": "test_rehearse_page.py",
    "how-to/sharding.md": "cli/test_sharding.py",
    "how-to/simulate.md": "test_simulate_page.py",
    "how-to/slow-links.md": "examples/test_pages.py",
    "tutorial/find-a-bug.md": "cli/test_verify.py",
    "tutorial/first-run.md": "examples/test_pages.py",
    "tutorial/hundred-billion.md": "test_hundred_billion_page.py",
    "tutorial/your-own-model.md": "examples/test_pages.py",
}
"""Page -> the test that runs its commands, as far as they can be run here."""
NOT_RUN = {
    "how-to/break-it-on-purpose.md": "chaos of 20 kills takes minutes; tests/surviving run it with few",
    "how-to/copies-in-memory.md": "two hosts, or a run of hundreds of steps",
    "how-to/describe-your-cluster.md": "calibrates the machine for minutes; tests/cli measure it for seconds",
    "how-to/experts.md": "needs a mixture of experts as task.py, on up to four processes",
    "how-to/guards.md": "a run of 10,000 steps",
    "how-to/import-a-model.md": "needs somebody's weights.pt",
    "how-to/long-sequences.md": "needs a model with attention as task.py, on four processes",
    "how-to/measure-scaling.md": "a benchmark of minutes",
    "how-to/migrate-from-data-parallel.md": "needs the script that the page ends with as train.py",
    "how-to/migrate-from-hf-trainer.md": "needs a model of Hugging Face's as train.py",
    "how-to/migrate-from-lightning.md": "needs the script that the page ends with as train.py",
    "how-to/mirror-checkpoints.md": "needs an object store",
    "how-to/other-models.md": "trains four examples to their end; tests/examples trains each",
    "how-to/pipeline.md": "needs a model of blocks as task.py, on four processes",
    "how-to/save-memory.md": "offloading needs a GPU",
    "how-to/save-without-waiting.md": "a run of hundreds of steps",
    "how-to/sentinels.md": "a run of hundreds of steps, and the corpus",
    "how-to/several-hosts.md": "needs several hosts",
    "how-to/several-machines.md": "needs several machines",
    "how-to/split-layers.md": "needs a model of layers that can be split as task.py, on four processes",
    "how-to/verify.md": "verifies for minutes; tests/cli/test_verify.py verifies small Tasks",
}
"""Page -> why no test runs the commands as they stand. Their options and keys are looked at all the same."""
OF_A_RUN = ("compare-runs", "hangs-and-crashes", "read-a-run", "resume", "use-the-model")
"""Pages whose commands look at a run that is there."""
TRAINED = ("train.steps=4", "train.global_batch=8", "checkpoint.every=2", "evaluate.every=0", "train.ema=0.9")


def commands(page: str) -> list[list[str]]:
    """The words of every command of a page."""
    lines = [line for block in blocks(f"docs/how-to/{page}.md", "bash") for line in block.splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def test_every_page_with_commands_is_run_or_says_why_not() -> None:
    fence = re.compile(r"^```(bash|sh|console)$", re.MULTILINE)
    pages = [path for room in ROOMS for path in sorted((ROOT / "docs" / room).glob("*.md"))]
    shown = {f"{path.parent.name}/{path.name}" for path in pages if fence.search(path.read_text())}
    here = {f"how-to/{page}.md" for page in OF_A_RUN}
    assert shown - set(RUN) - set(NOT_RUN) - here == set(), "run its commands in a test, or say here why not"
    assert set(RUN).isdisjoint(NOT_RUN) and here.isdisjoint({*RUN, *NOT_RUN})
    assert set(NOT_RUN) <= shown


@pytest.mark.parametrize(("page", "test"), RUN.items())
def test_the_test_of_a_page_names_it(page: str, test: str) -> None:
    assert Path(page).name in (ROOT / "tests" / test).read_text()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run under each name that the pages look at, and its log."""
    folder = tmp_path_factory.mktemp("pages")
    named = {word for page in OF_A_RUN for words in commands(page) for word in words if word.startswith("runs/")}
    first, *others = sorted({"/".join(name.split("/")[:2]) for name in named})
    done = allranks("train", POINTS, *TRAINED, "--nproc", "1", "--run", first, folder=folder)
    (folder / "train.log").write_text(done.stdout + done.stderr)
    for name in others:
        shutil.copytree(folder / first, folder / name)
    return folder


@pytest.mark.full
@pytest.mark.parametrize("page", OF_A_RUN)
def test_commands_that_look_at_a_run(
    page: str, runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that train on are run by the tests of resuming."""
    monkeypatch.chdir(runs)
    asked = [words for words in commands(page) if words[1] != "train"]
    assert asked
    for words in asked:
        arguments = [re.sub(r"step-0*([24])00$", r"step-0000000\1", word) for word in words[1:]]
        arguments = [re.sub(r"^\*\.(down|up)\.weight$", "3.weight", word) for word in arguments]
        # Of a run that nothing befell `explain` knows nothing: 3.
        assert main(arguments) in ((0, 1, 3) if words[1] == "explain" else (0, 1)), words
        said = capsys.readouterr()
        assert said.out and not said.err, (words, said.err)
