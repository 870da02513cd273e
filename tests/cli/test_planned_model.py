"""What is planned: told apart by its form."""

import json
import os
from pathlib import Path

import pytest

from allranks.cli.planned_model import find_subject, is_task
from allranks.cli.rehearsed_question import NAMED, task_of
from allranks.errors import ConfigError
from allranks.named_models import find_model
from allranks.plan_request import PlanRequest
from allranks.shape_operations import OWN
from tests.commands import POINTS


def test_a_name() -> None:
    subject = find_subject(PlanRequest(("llama3-8b",)))
    assert subject.make(None, "bfloat16", "cuda") == find_model("llama3-8b").profile(None, "bfloat16", OWN)
    assert subject.make(1024, "float32", "cuda").seq == 1024
    assert (subject.seq, subject.task, subject.global_batch) == (8192, None, None)


def test_a_name_with_another_size() -> None:
    two = find_subject(PlanRequest(("llama3-8b",), sizes={"layers": 2})).make(None, "bfloat16", "cuda")
    assert two.num_repeated == 2


@pytest.mark.parametrize("folder", [".pyenv", "llama3:8b", "a=b"])
def test_a_config_file_is_none_of_a_task_whatever_its_folder_is_called(folder: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
    (tmp_path / folder).mkdir()
    path = tmp_path / folder / "config.json"
    path.write_text(json.dumps(sizes | {"model_type": "gpt2"}))
    assert find_subject(PlanRequest((str(path),))).make(None, "bfloat16", "cuda").num_repeated == 2
    assert task_of((str(path),))[0] == NAMED
    assert is_task(("data.text=words.json",)), "a key of the demo's"


def test_a_config_file_has_the_name_of_its_folder(tmp_path: Path) -> None:
    sizes = {
        "model_type": "gpt2",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 100,
    }
    (tmp_path / "tiny").mkdir()
    path = tmp_path / "tiny" / "config.json"
    path.write_text(json.dumps(sizes))
    assert find_subject(PlanRequest((str(path),))).make(None, "bfloat16", "cuda").name == "tiny"


def test_attention_in_windows_is_a_note(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4}
    sizes |= {"intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 256}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(sizes | {"model_type": "mistral", "sliding_window": 32}))
    windowed = find_subject(PlanRequest((str(path),)))
    assert [note.partition(", ")[0] for note in windowed.notes] == ["all 4 layers attend to windows of 32 positions"]
    path.write_text(json.dumps(sizes | {"model_type": "mistral", "sliding_window": None}))
    full = find_subject(PlanRequest((str(path),)))
    assert full.notes == ()
    some, every = (one.make(None, "bfloat16", "cuda").flops for one in (windowed, full))
    assert every - some == 4 * 4 * 256 * (256 - 32) * 64


def test_a_config_that_cannot_be_read_is_named_with_its_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "jamba"}))
    with pytest.raises(ConfigError, match=r"config\.json: model_type 'jamba' is none .*give a Task"):
        find_subject(PlanRequest((str(path),)))
    path.write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read as JSON: "):
        find_subject(PlanRequest((str(path),)))
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read as JSON: .*no ordinary file"):
        find_subject(PlanRequest((str(path),)))


@pytest.mark.parametrize(
    ("words", "sizes", "message"),
    [
        ((), {}, "plan needs a model"),
        (("gpt2", "more"), {}, "'more' behind the model gpt2"),
        (("task.py",), {"layers": 2}, "--layers: task.py is a Task"),
        (("gpt-2",), {}, "nearest: gpt2"),
    ],
)
def test_what_is_no_model(words: tuple[str, ...], sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_subject(PlanRequest(words, sizes=sizes))


@pytest.mark.parametrize(("words", "sizes"), [(("gpt2",), {}), ((), {"layers": 2, "hidden": 8, "heads": 2})])
def test_keys_of_a_layout_stand_behind_every_model(words: tuple[str, ...], sizes: dict[str, int]) -> None:
    """What a layout string has not is asked for in this way, as a refusal of ulysses advises."""
    found = find_subject(PlanRequest((*words, "layout.context=ring"), sizes=sizes))
    assert found.layout is not None and found.layout.context == "ring"
    assert found.task is None
    with pytest.raises(ConfigError, match=r"did you mean 'layout\.context=ring'"):
        find_subject(PlanRequest((*words, "layout.contxt=ring"), sizes=sizes))


@pytest.mark.parametrize(("gpu", "said"), [(True, "on this machine's"), (False, "no GPU is at hand")])
def test_where_real_steps_run_is_said(monkeypatch: pytest.MonkeyPatch, gpu: bool, said: str) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    (note,) = find_subject(PlanRequest((POINTS,), measured=True)).notes
    assert said in note
