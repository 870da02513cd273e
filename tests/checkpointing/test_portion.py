"""One rank's portion of a checkpoint: what it writes, what it tells, and errors that become a Share."""

import errno
import os
from pathlib import Path
from unittest import mock

import torch

from allranks.checkpointing.checkpoint import step_name
from allranks.checkpointing.portion import digests_of, failed_share, file_name, place_of, portion_of, write_portion
from tests.checkpointing.worlds import header, parts, whole_tensors

ALIASES = {"model.head.weight": "model.embedding.weight"}


def test_a_place_has_both_names() -> None:
    place = place_of("runs/checkpoints", header(7), "run_1")
    assert place.target == Path("runs/checkpoints") / step_name(7)
    assert place.temporary == Path("runs/checkpoints/step-00000007.tmp-run_1")


def test_each_rank_writes_its_boxes_and_one_tells_of_all_that_it_holds() -> None:
    tensors = whole_tensors()
    portions = [portion_of(parts(tensors, rank, 2), rank, ALIASES, {}, tells=rank == 0) for rank in (0, 1)]
    elements = sum(entry.box.num_elements for portion in portions for entry, _ in portion.mine)
    assert elements == sum(tensor.numel() for tensor in tensors.values())
    assert {name for name, _, _ in portions[0].held} == tensors.keys() and portions[1].held == []
    assert sum(portion.num_bytes for portion in portions) == sum(t.numel() * t.element_size() for t in tensors.values())


def test_the_state_is_a_copy_that_nobody_changes_later() -> None:
    state = {"losses": [1.0]}
    portion = portion_of([], 0, {}, state, tells=True)
    state["losses"].append(2.0)
    assert portion.state == {"losses": [1.0]}


def test_a_share_says_what_was_written_or_why_nothing_was(tmp_path: Path) -> None:
    portion = portion_of(parts(whole_tensors(), 0, 1), 0, ALIASES, {}, tells=True)
    place = place_of(tmp_path, header(), "t1")
    share = write_portion(place, portion)
    assert (share.error, list(share.files), share.tensors) == ("", [file_name(0)], digests_of(portion.mine))
    again = write_portion(place, portion)
    assert again.error.startswith("rank 0: ") and "File exists" in again.error and not again.files
    full = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch("allranks.checkpointing.portion.write_file", side_effect=full):
        refused = write_portion(place_of(tmp_path, header(), "t2"), portion)
    assert "No space left on device (this rank needs 916 B, " in refused.error


def test_who_commits_refuses_what_may_not_be_replaced_and_the_others_do_not_look(tmp_path: Path) -> None:
    portion = portion_of(parts(whole_tensors(), 0, 1), 0, ALIASES, {}, tells=True)
    place = place_of(tmp_path, header(), "t1")
    place.target.touch()
    assert "is no directory" in write_portion(place, portion).error and not place.temporary.exists()
    assert write_portion(place, portion, looks=False).error == ""


def test_what_does_not_fit_is_not_begun(tmp_path: Path) -> None:
    portion = portion_of(parts(whole_tensors(), 0, 1), 0, ALIASES, {}, tells=True)
    disk = os.statvfs(tmp_path)
    small = mock.Mock(f_bfree=1, f_bavail=1, f_frsize=512)
    with mock.patch("allranks.checkpointing.portion.os.statvfs", return_value=small):
        refused = write_portion(place_of(tmp_path, header(), "t1"), portion)
    assert "No space left on device (this rank needs 916 B, 512 B are free)" in refused.error
    assert list(tmp_path.rglob("*.safetensors")) == []
    small.f_bfree = small.f_bavail = disk.f_bfree
    with mock.patch("allranks.checkpointing.portion.os.statvfs", return_value=small):
        assert write_portion(place_of(tmp_path, header(), "t1"), portion).error == ""


def test_digests_that_are_known_are_not_computed_again(tmp_path: Path) -> None:
    portion = portion_of(parts({"model.a": torch.ones(3)}, 0, 1), 0, {}, {}, tells=True)
    known = [("model.a", "float32", (3,), (0,), (3,), 5)]
    told = type(portion)(0, portion.mine, portion.held, digests=known)
    assert write_portion(place_of(tmp_path, header(), "t1"), told).tensors == known


def test_an_error_that_is_no_systems_is_named_by_its_class() -> None:
    place = place_of("runs", header(), "t1")
    assert failed_share(place, 3, ValueError("odd")).error == "rank 3: ValueError: odd"
