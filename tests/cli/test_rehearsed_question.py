"""What the words of `allranks dryrun` mean."""

import importlib

import pytest

from allranks.cli.rehearsed_question import NAMED, Asked, question_of, task_of
from allranks.errors import ConfigError


@pytest.fixture(scope="module", autouse=True)
def dynamo() -> None:
    """Fake tensors import this, which sets an environment variable: before any test looks."""
    importlib.import_module("torch._inductor.runtime.cache_dir_utils")


def test_names_and_tasks() -> None:
    assert task_of(("LLAMA3-8b", "task.seq=64")) == (NAMED, None, ("task.name=llama3-8b", "task.seq=64"))
    assert task_of(("task.py:Name", "train.steps=3")) == ("task.py:Name", None, ("train.steps=3",))
    with pytest.raises(ConfigError, match="nearest"):
        task_of(("llama9",))


def test_a_question() -> None:
    asked = Asked(("llama3-8b", "train.global_batch=64"), "8x8:a100-80g", "dp_shard=8,tp=8")
    question = question_of(asked)
    assert (question.model, question.layout.world_size, question.ranks) == ("llama3-8b", 64, (0, 63))
    assert question.config.train.precision == "bfloat16"
