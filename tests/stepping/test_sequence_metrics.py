"""A metric that is no sum over positions is refused by name where sequences are cut; others pass."""

from typing import Any

import pytest
import torch
from torch.nn import functional

from allranks.errors import LayoutError, TaskError
from allranks.layout import Layout
from allranks.stepping.sequence_metrics import UNMEASURED, Joined, compare_metrics, judge_metrics, relative_of
from tests.distributed.pool import Pools
from tests.distributed.tasks import IGNORED
from tests.distributed.test_context_laws import RING, Sentence
from tests.distributed.test_context_refusals import Shifting, start

SUM = "the loss of a sequence is the sum over its 2 parts, because both are "


class Measuring(Sentence):
    """Measures what it is told to."""

    what: str = "positions"

    def metrics(self, output: Any, batch: Any) -> dict[str, tuple[Any, Any]]:
        counted = batch["y"] != IGNORED
        right = (output.argmax(-1) == batch["y"])[counted]
        right_sum, number = right.sum(), counted.sum()
        loss = functional.cross_entropy(output.flatten(0, -2), batch["y"].flatten(), reduction="sum")
        all_right = ((output.argmax(-1) == batch["y"]) | ~counted).all(1)
        signed = output - output.mean(-1, keepdim=True)
        found: dict[str, dict[str, tuple[Any, Any]]] = {
            "positions": {
                "accuracy": (right_sum, number),
                "floats": (float(loss), int(number)),
                "signed": (signed.sum(), signed.numel()),
                "half": (right_sum.bfloat16(), number),
            },
            "samples": {"accuracy": (right_sum, number), "exact": (all_right.sum(), len(batch["y"]))},
            "one float": {"exact": (0.0, float(len(batch["y"])))},
            "sum alone": {"by length": (loss / len(batch["y"][0]), number)},
            "names": {f"of {len(batch['y'][0])} positions": (right_sum, number)},
            "drawn": {"drawn": (torch.rand(()), number)},
            "fails": {"fails": (right_sum, number)} if len(batch["y"][0]) < 12 else {"fails": (torch.ones(2), 1)},
            "nan": {"nan": (right_sum / 0, number)},
        }
        return found[self.what]


def started(what: str, layout: str, *overrides: str, precision: str = "float32") -> Any:
    return start(Measuring(what=what), layout, "train.global_batch=8", *overrides, precision=precision)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("layout", "overrides"),
    [
        ("cp=2", ()),
        ("cp=2", (RING,)),
        pytest.param("tp=2,cp=2", (), marks=pytest.mark.full),
        pytest.param("cp=2,pp=2", (), marks=pytest.mark.full),
    ],
)
def test_a_count_of_samples_is_refused_by_name(pool: Pools, layout: str, overrides: tuple[str, ...]) -> None:
    size = 4 if "," in layout else 2
    refused = pool(size).run(started, "samples", layout, *overrides)
    assert len(set(refused)) == 1 and "\n" not in refused[0]
    assert refused[0].startswith(f"LayoutError: layout {layout}")
    assert " does not measure what one process measures: metrics() gives exact as " in refused[0]
    assert " of 10, summed over the 2 parts of each sequence, and 0 of 5 for whole ones" in refused[0]
    assert "a sum over positions and their number (count positions, not samples)" in refused[0]
    for said in pool(size).run(started, "positions", layout, *overrides):
        assert sum(line.startswith(SUM) and line.endswith("for 5 samples") for line in said) == 1, said


@pytest.mark.distributed
def test_each_kind_of_number_is_compared(pool: Pools) -> None:
    def run() -> list[Any]:
        kinds = ("one float", "sum alone", "names", "drawn", "nan", "fails")
        return [started(what, "cp=2") for what in kinds] + [started("positions", "cp=2", precision="float64")]

    one_float, sum_alone, names, drawn, nan, fails, precise = pool(2).run(run)[0]
    assert "metrics() gives exact as 0 of 10, summed over the 2 parts of each sequence, and 0 of 5 for" in one_float
    assert "metrics() gives by length as" in sum_alone
    assert "metrics() gives of 12 positions as 0 of 0, summed" in names
    for said in (drawn, nan, precise):
        assert any(line.startswith(SUM) and line.endswith("for 5 samples") for line in said), said
    assert any(line.startswith(SUM) and line.endswith(f"; {UNMEASURED}") for line in fails), fails


class Unjudged(Measuring):
    """Its loss is 0, so that it says nothing."""

    what: str = "samples"

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        found: torch.Tensor = (output * 0).sum()
        return found


class Both(Shifting):
    """Neither its loss nor its metric is a sum over positions."""

    def metrics(self, output: Any, batch: Any) -> dict[str, tuple[Any, Any]]:
        return {"exact": (0, len(output))}


@pytest.mark.distributed
def test_the_loss_comes_first(pool: Pools) -> None:
    def run() -> list[Any]:
        return [start(task, "cp=2", "train.global_batch=8") for task in (Unjudged(), Both())]

    unjudged, both = pool(2).run(run)[0]
    assert any("whether the loss of a sequence is the sum over its parts is not known" in line for line in unjudged)
    assert "shift labels" in both and "metrics" not in both


def test_alone_nothing_differs_and_what_is_changed_in_place_is_a_copy() -> None:
    output, batch = torch.ones(2, 3), {"y": torch.ones(2, 3)}

    def metrics(output: Any, batch: Any) -> dict[str, tuple[Any, Any]]:
        output *= 2
        return {"sum": (output.sum(), batch["y"].numel())}

    joined = Joined(output, batch, output, batch)
    assert compare_metrics(metrics, joined, None, torch.device("cpu")) is None
    assert torch.equal(output, torch.ones(2, 3))

    def refuses(output: Any, batch: Any) -> Any:
        raise TaskError("no")

    with pytest.raises(TaskError, match="no"):
        compare_metrics(refuses, joined, None, torch.device("cpu"))


def test_what_the_ranks_tell() -> None:
    layout = Layout(cp=2)
    assert judge_metrics([None, None], layout) == ""
    assert judge_metrics([None, "fails"], layout) == UNMEASURED
    with pytest.raises(LayoutError, match=r"metrics\(\) gives exact as 1 of 10, .* 0 of 5 for whole ones"):
        judge_metrics([None, "fails", ["exact", 1.0, 10.0, 0.0, 5.0]], layout)


def test_whole_numbers_are_exact() -> None:
    assert [relative_of(kind) for kind in (torch.int64, torch.bool, torch.float32)] == [0.0, 0.0, 5e-5]
    assert relative_of(torch.bfloat16) == relative_of(torch.float16) == 2e-2
