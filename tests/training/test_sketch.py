"""A Task's model in outline, and what a trace adds to it."""

from pathlib import Path
from unittest.mock import patch

import pytest

from allranks.errors import TaskError
from allranks.model_profile import ModelProfile
from allranks.profiling.cache import with_digest
from allranks.profiling.known_tasks import find_known, keep_known
from allranks.request import TrainRequest
from allranks.stepping.profile import load_first
from allranks.training.prepare import prepare
from allranks.training.sketch import Sketch, replace_fault, sketch_of, trace_known
from tests.commands import POINTS


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def outline(*overrides: str, device: str = "cpu") -> Sketch:
    return sketch_of(prepare(TrainRequest(task_spec=POINTS, overrides=overrides)), device)


def test_the_key_is_that_of_the_model_its_settings_and_the_device() -> None:
    first = outline()
    assert first.parameters == 82 and len(first.key) == 64
    assert outline() == first == outline("train.global_batch=64", "optimizer.lr=1")
    others = [outline(device="cuda"), outline("task.width=17"), outline("task.num_points=7"), outline("data.workers=1")]
    assert len({first.key, *(other.key for other in others)}) == 5


def test_code_that_is_in_no_file_has_no_key() -> None:
    with patch("allranks.training.sketch.have_sources", return_value=False):
        assert outline() == Sketch(82, 82, "")


def test_a_trace_is_known_to_the_next_one() -> None:
    prepared, sketch = prepare(TrainRequest(task_spec=POINTS)), outline()
    known = trace_known(prepared, ("float32", "bfloat16"), "cpu", sketch, lambda decision: None)
    assert find_known(sketch.key) == known and set(known.profiles) == {"float32", "bfloat16"}
    assert known.order == "map" and known.sample_seconds > 0
    fails = patch("allranks.stepping.profile.trace_task", side_effect=TaskError("no value here"))
    with fails, pytest.raises(TaskError):
        trace_known(prepared, ("float32",), "cpu", sketch, lambda decision: None)
    failed = find_known(sketch.key)
    assert failed is not None and failed.fault == "no value here"


def test_a_later_trace_takes_the_place_of_a_fault_and_of_nothing_else() -> None:
    request, sketch = TrainRequest(task_spec=POINTS), outline()
    loaded = load_first(prepare(request).task)
    profile = with_digest(ModelProfile("Points", (), "float32"))
    replace_fault(request, "float32", "cpu", profile, loaded)
    assert find_known(sketch.key) is None
    keep_known(sketch.key, {}, fault="its trace took longer than 60 s")
    for precision in ("float32", "bfloat16"):
        replace_fault(request, precision, "cpu", profile, loaded)
    known = find_known(sketch.key)
    assert known is not None and (known.fault, known.order, set(known.profiles)) == ("", "map", {"float32", "bfloat16"})
    replace_fault(request, "float32", "cpu", with_digest(ModelProfile("Other", (), "float32")), loaded)
    assert find_known(sketch.key) == known
