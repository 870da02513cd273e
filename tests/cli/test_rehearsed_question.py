"""What the words of `allranks dryrun` mean."""

import importlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from allranks.cli.rehearsed_question import NAMED, Asked, profile_of, question_of, task_of
from allranks.errors import ConfigError, LayoutError
from allranks.rehearsing.refusals import NotRehearsed


@pytest.fixture(scope="module", autouse=True)
def dynamo() -> None:
    """Fake tensors import this, which sets an environment variable: before any test looks."""
    importlib.import_module("torch._inductor.runtime.cache_dir_utils")


def test_names_and_tasks() -> None:
    assert task_of(("LLAMA3-8b", "task.seq=64")) == (NAMED, None, ("task.name=llama3-8b", "task.seq=64"))
    assert task_of(("task.py:Name", "train.steps=3")) == ("task.py:Name", None, ("train.steps=3",))
    with pytest.raises(ConfigError, match="nearest"):
        task_of(("llama9",))


def test_sizes_and_files(tmp_path: Path) -> None:
    sizes = {"layers": 2, "hidden": 64, "heads": 4}
    found = ("task.layers=2", "task.hidden=64", "task.heads=4")
    assert task_of((), sizes) == (NAMED, None, ("task.name=", *found))
    assert task_of(("train.steps=3",), sizes) == (NAMED, None, ("task.name=", *found, "train.steps=3"))
    assert task_of(("llama3-8b",), {"layers": 2}) == (NAMED, None, ("task.name=llama3-8b", "task.layers=2"))
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    path = tmp_path / "Tiny.json"
    path.write_text(json.dumps({**config, "intermediate_size": 96, "vocab_size": 100}))
    assert task_of((str(path), "task.seq=8")) == (NAMED, None, (f"task.name={path}", "task.seq=8"))
    for words, changes, message in (
        (("task.py",), sizes, "--layers, --hidden, --heads: task.py is a Task"),
        (("none.json",), {}, "none.json: no such file"),
        ((str(path), "more"), {}, "'more' behind the model Tiny"),
        ((), {"layers": 2}, "needs hidden, heads too"),
    ):
        with pytest.raises(ConfigError, match=message):
            task_of(words, changes)


def test_a_config_file_is_named_after_itself(tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps({**config, "intermediate_size": 96, "vocab_size": 100}))
    asked = Asked((str(path), "train.global_batch=8"), "1x4:a100-80g", "fsdp", sizes={"layers": 4})
    question = question_of(asked)
    assert question.model == "tiny"
    assert profile_of(question).num_repeated == 4


def test_a_question() -> None:
    asked = Asked(("llama3-8b", "train.global_batch=64"), "8x8:a100-80g", "dp_shard=8,tp=8")
    question = question_of(asked)
    assert (question.model, question.layout.world_size, question.ranks) == ("llama3-8b", 64, (0, 63))
    assert question.config.train.precision == "bfloat16"


def test_another_number_of_devices_is_of_the_clusters_own_kind(tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    path.write_text('nodes = 2\ndevices_per_node = 8\ndevice = {like = "a100-80g", memory_gb = 70}\n')
    asked = Asked(("llama3-8b", "train.global_batch=64"), str(path), "dp_shard=4", gpus=4)
    cluster = question_of(asked).cluster
    assert (cluster.num_devices, cluster.device.memory_bytes) == (4, 70e9)
    with pytest.raises(ConfigError, match="nodes of 8 devices; use 8 or 16"):
        question_of(replace(asked, gpus=12))


def test_a_task_is_rehearsed_on_two_ranks_of_each_stage_and_a_model_by_name_of_the_first() -> None:
    words = ("train.global_batch=64", "train.micro_batch=1")
    staged = "1x8:a100-80g", "pp=4,dp_shard=2"
    assert question_of(Asked(("llama3-8b", *words), *staged)).ranks == (0, 1, 4, 6)
    assert question_of(Asked(("tests.distributed.tasks:Tiny", *words), *staged)).ranks == (0, 1, 4, 5, 6, 7)


@pytest.mark.parametrize(
    ("layout", "words", "what"),
    [
        ("fsdp,recompute=budget", (), "recompute=budget"),
        ("placement", (), "placement"),
        ("dp_replicate=3", ("layout.placement={'*' = 'cpu'}",), "placement"),
        ("data_parallel", (), "data_parallel"),
        ("dp_replicate=3", ("layout.local_sgd=2",), "local_sgd=2"),
    ],
)
def test_what_is_not_rehearsed_is_said_before_how_training_would_take_it(
    layout: str, words: tuple[str, ...], what: str
) -> None:
    """Training has another word for each: compile=block, a layout that fits four processes."""
    with pytest.raises(NotRehearsed, match=rf"^{what} is not rehearsed: "):
        question_of(Asked(("llama3-8b", *words), "1x4:a100-80g", layout))


def test_too_few_blocks_are_named_before_too_few_samples() -> None:
    with pytest.raises(LayoutError, match="llama3-8b has 32: pp can be 32 at most"):
        question_of(Asked(("llama3-8b",), "8x8:h100", "pp=64"))
    with pytest.raises(LayoutError, match=r"set train\.global_batch=64"):
        question_of(Asked(("llama3-8b", "task.layers=64"), "8x8:h100", "pp=64"))
