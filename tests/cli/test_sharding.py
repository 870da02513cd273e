"""`allranks train --show-sharding`: the commands of docs/how-to/sharding.md print what the page shows."""

import json
import re
from pathlib import Path

import pytest

from allranks.cli.main import main
from allranks.cli.sharding import print_rows
from allranks.training.sharding import Row
from tests.commands import POINTS, allranks

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "sharding.md").read_text()


def shown() -> list[tuple[list[str], str]]:
    """(arguments, output) of each console block of the page."""
    found = re.findall(r"^```console\n\$ allranks (.*?)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return [(arguments.split(), output) for arguments, output in found]


def tidy(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


@pytest.mark.distributed
@pytest.mark.parametrize("index", [0, pytest.param(1, marks=pytest.mark.full)])
def test_the_page_shows_what_is_printed(tmp_path: Path, index: int) -> None:
    arguments, output = shown()[index]
    ran = allranks(*arguments, folder=tmp_path)
    printed = tidy(ran.stdout)
    assert printed[: len(tidy(output))] == tidy(output)
    assert list(tmp_path.iterdir()) == [], "no run was begun"


@pytest.mark.full
@pytest.mark.distributed
def test_json_is_the_same_as_one_document(tmp_path: Path) -> None:
    arguments = ("train", POINTS, "train.global_batch=8", "--nproc", "2", "--layout", "fsdp", "--show-sharding")
    document = json.loads(allranks(*arguments, "--json", folder=tmp_path).stdout)
    assert (document["layout"], document["processes"], document["micro_steps"]) == ("dp_shard=2", 2, 1)
    rows = document["rows"]
    assert {row["what"] for row in rows} >= {"gather", "compute", "drop", "reduce-scatter"}
    assert all(row["bytes_total"] == 2 * row["bytes_per_rank"] for row in rows)


@pytest.mark.full
@pytest.mark.distributed
def test_a_task_that_raises_has_no_rows(tmp_path: Path) -> None:
    raises = tmp_path / "raises.py"
    raises.write_text(Path(POINTS).read_text().replace("self._calls == 20", "self._calls == 1"))
    arguments = ("train", str(raises), "train.global_batch=8", "task.boom_rank=1", "--nproc", "2", "--layout", "ddp")
    failed = allranks(*arguments, "--show-sharding", "--json", folder=tmp_path, check=78)
    document = json.loads(failed.stdout)
    assert document.keys() == {"error", "exit_code"} and document["exit_code"] == 78
    assert document["error"].endswith("ValueError: the user's own mistake")
    assert "rank 1" in failed.stderr and str(raises) in failed.stderr


def test_under_another_launcher_it_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29511")
    assert main(["train", POINTS, "--show-sharding"]) == 2
    assert "--show-sharding starts its processes itself" in capsys.readouterr().err


def test_unlike_ranks_have_no_sum(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [Row("forward", "receive", "over pp", 1500, None), Row("forward", "compute", "the model", 0, None)]
    rows += [Row("backward", "send", "over pp", 700, None), Row("backward", "drop", "the rest", 300, None)]
    print_rows(rows, "pp=2", 2, 4)
    printed = capsys.readouterr().out
    assert "One step under pp=2 on 2 processes, the last of 4 micro-steps" in printed
    assert "A rank receives 1.5 kB.\n" in printed
