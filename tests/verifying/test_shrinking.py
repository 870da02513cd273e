"""What is too large is made smaller by what its Task says, or by leaving out repeats; nothing else ever is."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from allranks.errors import TaskError
from allranks.layout import Layout
from allranks.task import Hints, Task
from allranks.verifying.shrinking import Room, Row, Size, choose_size, drop_repeats, find_repeats, shrink
from tests.programs.points import Points


class Deep(Points):
    """12 equal blocks between two other layers."""

    layers: int = 12

    def model(self) -> Any:
        blocks = [nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Dropout(0.1)) for _ in range(self.layers)]
        return nn.Sequential(nn.Linear(2, 10), nn.Sequential(*blocks), nn.Linear(10, 3))


class Told(Deep):
    """Says how it is made small."""

    def hints(self) -> Hints:
        return Hints(small={"layers": 3})


PER_BLOCK, REST = 110, 30 + 33
WHOLE = 12 * PER_BLOCK + REST
DDP = Layout(dp_replicate=2)


def room(parameters: int, layout: Layout = DDP, beside: int = 0) -> Room:
    """In which just so many parameters fit."""
    return Room(layout, 2, 4, Room(layout, 2, 4, 0).needed(parameters) + beside)


def chosen(task: Task, room: Room) -> Size:
    def with_settings(words: Sequence[str]) -> Task:
        assert words == ("task.layers=3",)
        return type(task)(layers=3)

    return choose_size(task, room, with_settings)


def test_what_fits_has_its_full_size() -> None:
    assert chosen(Deep(), room(WHOLE)) == chosen(Told(), room(WHOLE)) == Size()


def test_the_task_says_how() -> None:
    size = chosen(Told(), room(WHOLE - 1))
    assert (size.settings, size.keep, size.hindrance) == (("task.layers=3",), None, "")
    assert size.note.startswith(
        "shrunk by hints().small: task.layers=3; because the whole model's 1.4k parameters take"
    )
    assert chosen(Told(), room(3 * PER_BLOCK + REST)).hindrance == ""
    refused = chosen(Told(), room(3 * PER_BLOCK + REST - 1))
    assert refused.settings == () and "with hints().small: task.layers=3 its 393 parameters take" in refused.hindrance


def test_repeats_are_left_out_where_it_does_not() -> None:
    left, made = 2 * PER_BLOCK + REST, 2 * 8 * WHOLE  # each of two processes makes the whole model first
    size = chosen(Deep(), room(left, beside=made))
    assert (size.keep, size.hindrance) == (2, "")
    assert "shrunk: 1.2 to 1.11, which repeat the blocks before them, are left out; because" in size.note
    assert "283 parameters take" in chosen(Deep(), room(left, beside=made - 1)).hindrance
    stages = Layout(pp=4)
    assert chosen(Deep(), room(4 * PER_BLOCK + REST, stages, 2 * 8 * WHOLE)).keep == 4


def test_nothing_repeats_or_nobody_knows() -> None:
    class Plain(Points):
        def model(self) -> nn.Module:
            return nn.Sequential(nn.Linear(2, 10), nn.Linear(10, 3))

    assert chosen(Plain(), room(1)).hindrance.endswith("no blocks repeat")

    class Strange(Points):
        def model(self) -> nn.Module:
            raise TaskError("not today")

    assert chosen(Strange(), room(1)) == Size()


@pytest.mark.parametrize(
    ("layout", "copies"),
    [
        (DDP, 36 + 2 * (4 + 4 * 26)),
        (Layout(dp_shard=2), 4 + 4 * 36),
        (Layout(dp_shard=2, dp_replicate=2), 4 + 4 * 36),
        (Layout(tp=2, dp_replicate=4), 4 + 4 * 36),
    ],
)
def test_needed(layout: Layout, copies: int) -> None:
    """Over 4 steps: 4 runs of 9 copies alone; a rank has 17 of its steps and 9 of those after the resume."""
    assert Room(layout, 2, 4, 0).needed(1000) == copies * 8000


def test_a_task_that_is_shrunk_computes_with_what_is_left() -> None:
    task = Deep()
    torch.manual_seed(3)
    whole = task.model()
    shrink(task, 2)
    torch.manual_seed(3)
    made = task.model()
    assert [name for name, _ in made.named_children()] == ["0", "1", "2"] and len(made[1]) == 2
    assert torch.equal(made[1][1][0].weight, whole[1][1][0].weight), "those that stay have the values that they had"
    assert torch.equal(made[2].weight, whole[2].weight)
    x = torch.ones(4, 2)
    assert torch.equal(made.eval()(x), whole[2](whole[1].eval()[:2](whole[0](x))))
    task = Deep()
    shrink(task, None)
    assert len(task.model()[1]) == 12


def test_several_models_and_lists() -> None:
    class Two(Points):
        def model(self) -> Any:
            return {name: nn.ModuleList(nn.Linear(2, 2) for _ in range(5)) for name in "ab"}

    task = Two()
    shrink(task, 3)
    made: Mapping[str, Any] = task.model()
    assert [len(made["a"]), len(made["b"])] == [3, 3]


def test_blocks_that_look_alike_are_not_equal() -> None:
    frozen = nn.Linear(4, 4)
    frozen.requires_grad_(False)
    rows: list[list[nn.Module]] = [
        [nn.Conv1d(4, 4, 3, padding=1), nn.Conv1d(4, 4, 3, padding=1, stride=2), nn.Conv1d(4, 4, 3)],
        [nn.Linear(4, 4), frozen, nn.Linear(4, 4, bias=False)],
        [nn.Linear(4, 4), nn.Linear(4, 4).double(), nn.Linear(4, 5)],
    ]
    for blocks in rows:
        assert drop_repeats([nn.Sequential(*blocks)], 2) == []


class Block(nn.Module):
    """A layer that knows some plain things."""

    def __init__(self, **known: Any) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        for name, value in known.items():
            setattr(self.inner, name, value)


def near(x: Any) -> None: ...


def far(x: Any) -> None: ...


@pytest.mark.parametrize(
    "known",
    [
        [{"window": 8}, {"window": 8}, {"window": 64}],
        [{"is_global": False}, {"is_global": False}, {"is_global": True}],
        [{"kind": "local"}, {"kind": "local"}, {"kind": "global"}],
        [{"dilation": (1, 1)}, {"dilation": (1, 1)}, {"dilation": (2, 2)}],
        [{"drop_path": rate / 10} for rate in range(5)],
        [{"scale": 1}, {"scale": 1}, {"scale": 1.0}],
        [{"window": rate} for rate in range(5)],  # it counts, and is not called a counter
        [{"group_idx": number // 2} for number in range(3)],  # it is called one, and does not count the blocks
        [{"attend": near}, {"attend": near}, {"attend": far}],
        [{}, {}, {"window": 8}],
    ],
)
def test_blocks_that_differ_in_a_plain_attribute_are_not_equal(known: list[dict[str, Any]]) -> None:
    assert drop_repeats([nn.ModuleList(Block(**some) for some in known)], 2) == []


@pytest.mark.parametrize("name", ["layer_idx", "layer_index", "layer_number", "_layer_idx"])
def test_a_number_that_only_counts_the_blocks_is_no_difference(name: str) -> None:
    rows: Any = nn.ModuleList(Block(**{name: number, "window": 8}) for number in range(5))
    assert len(drop_repeats([rows], 2)) == 1
    assert [getattr(block.inner, name) for block in rows] == [0, 1]
    windows = nn.ModuleList(Block(**{name: number, "window": (8, 64)[number % 2]}) for number in range(8))
    assert len(drop_repeats([windows], 2)) == 1 and len(windows) == 4
    same = nn.ModuleList(Block(**{name: 3}) for _ in range(5))
    assert len(drop_repeats([same], 2)) == 1


class Masked(nn.Module):
    """A layer that sees the last `window` of `length` positions."""

    def __init__(self, length: int, window: int, *, kept: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("mask", torch.ones(length, length).tril().triu(1 - window), persistent=kept)


@pytest.mark.parametrize("kept", [True, False])
def test_blocks_of_other_masks_are_not_equal(kept: bool) -> None:
    """A global one behind three local ones is verified, too."""
    rows: Any = nn.ModuleList(Masked(8, 8 if n % 4 == 3 else 2, kept=kept) for n in range(12))
    assert drop_repeats([rows], 2) == ["8 to 11, which repeat the blocks before them, are left out"]
    assert [int(block.mask.sum()) for block in rows] == [15, 15, 15, 36] * 2
    assert drop_repeats([nn.ModuleList(Masked(8, n + 1, kept=kept) for n in range(6))], 2) == []


@pytest.mark.parametrize(("windows", "left"), [([2] * 6, 2), ([2, 2, 2, 2, 2, 256], 3)])
def test_masks_too_large_to_be_filled_where_parameters_are_counted(windows: list[int], left: int) -> None:
    class Windowed(Points):
        def model(self) -> nn.Module:
            return nn.ModuleList(Masked(256, window, kept=False) for window in windows)

    size = chosen(Windowed(), room(6 * left, beside=2 * 8 * 36))
    assert (size.keep, size.hindrance) == (2, ""), "the note is of what each process leaves out"
    assert f"shrunk: 2 to {7 - left}, which" in size.note
    task = Windowed()
    shrink(task, size.keep)
    assert len(task.model()) == left  # type: ignore[arg-type]


def test_patterns_repeat_too_and_what_lies_inside_of_a_row_is_left_alone() -> None:
    layers = [layer for _ in range(4) for layer in (nn.Linear(4, 4), nn.ReLU())]
    model = nn.Sequential(nn.Flatten(), *layers, nn.Linear(4, 1))
    assert drop_repeats([model], 3) == ["7 to 8, which repeat the blocks before them, are left out"]
    assert [type(layer) for layer in model] == [nn.Flatten, *[nn.Linear, nn.ReLU] * 3, nn.Linear]
    inner: Any = nn.Sequential(*(nn.Sequential(*(nn.Linear(2, 2) for _ in range(5))) for _ in range(3)))
    drop_repeats([inner], 2)
    assert [len(block) for block in inner] == [5, 5]


def test_the_row_that_repeats_most() -> None:
    assert find_repeats("xaaaay") == Row(1, 1, 4)
    assert find_repeats("xabababy") == Row(1, 2, 3)
    assert find_repeats("aabbbb") == Row(2, 1, 4)
    assert find_repeats("abcd") == find_repeats("") == Row(0, 1, 1)
