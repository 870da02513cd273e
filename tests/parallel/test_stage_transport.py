"""What travels between stages, and what is known of it."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from allranks.errors import LayoutError
from allranks.layout import Layout
from allranks.parallel import stage_transport
from allranks.parallel.mesh import build_mesh
from allranks.parallel.pipeline import Pipeline
from allranks.parallel.stage_plan import plan_stages
from allranks.parallel.stage_transport import Sent, Transport, signature_of
from tests.distributed.pool import Pools

KINDS = (
    Sent(0, (2, 3), torch.float64, True),
    Sent(4, (), torch.bfloat16, False),
    Sent(5, (7,), torch.bool, False),
)


def test_a_header_says_what_follows() -> None:
    words = stage_transport._encode(KINDS)
    assert words.shape == (256,) and stage_transport._decode(words.tolist()) == KINDS


def test_more_than_a_header_holds_is_refused() -> None:
    with pytest.raises(LayoutError, match="60 tensors pass between two stages"):
        stage_transport._encode(KINDS[:1] * 60)


def test_a_signature_is_of_shapes_types_and_gradients() -> None:
    one, model = {"x": torch.zeros(2, 3), "n": 4}, nn.Sequential(nn.Linear(3, 3))
    assert signature_of(one, model) == signature_of({"x": torch.ones(2, 3), "n": 5}, model)
    assert signature_of(one, model) != signature_of({"x": torch.zeros(3, 2), "n": 4}, model)
    assert signature_of(one, model) != signature_of({"x": torch.zeros(2, 3).double(), "n": 4}, model)
    with torch.no_grad():
        apart = signature_of(one, model)
    assert apart != signature_of(one, model)


def test_a_signature_is_of_the_models_mode() -> None:
    one, model = (torch.zeros(2, 3),), nn.Sequential(nn.Linear(3, 3))
    trains = signature_of(one, model)
    model.training = False  # a frozen root, whose parts train
    assert signature_of(one, model) == trains != signature_of(one, model.eval())


def transport(schedule: str) -> Transport:
    mesh = build_mesh(Layout(pp=2, schedule=schedule), "cpu")
    module = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    pipeline = Pipeline(module, plan_stages(module, mesh.layout.stage_ranks), mesh)
    return Transport(pipeline, mesh, torch.device("cpu"))


def there_and_back(schedule: str, stage: int) -> Any:
    """In a worker: activations to `stage`, twice, and a gradient of them back."""
    carrier = transport(schedule)
    layout = carrier._pipeline
    signature = signature_of((torch.zeros(2),), nn.Module())
    sends, receives = stage - 1 in layout.stages, stage in layout.stages
    if sends:
        layout.crossings[stage] = (0, 2)
    found: list[Any] = []
    for turn in range(2):
        if sends:
            payload = torch.full((2, 3), turn + 1.0, requires_grad=True), torch.tensor([turn, 7])
            carrier.send_on(stage, payload, signature)
        if receives:
            received = carrier.receive_on(stage, signature)
            found.append(([t.detach().clone() for t in received], [t.requires_grad for t in received]))
            (received[0].sum() * 3).backward()
            carrier.send_back(stage, received)
        if sends:
            found.append(carrier.receive_back(stage, signature))
        carrier.drain()
    told = sends or receives
    return found, layout.crossings[stage] if told else None, carrier.sent[stage, signature] if told else None


@pytest.mark.distributed
@pytest.mark.parametrize(("schedule", "stage"), [("1f1b", 1), ("interleaved", 2), ("zbv", 2)])
def test_activations_go_and_their_gradients_come_back(pool: Pools, schedule: str, stage: int) -> None:
    """Stage 2 of zbv runs beside stage 1, on one rank."""
    ranks = pool(2).run(there_and_back, schedule, stage)
    told = [entry for found, _, _ in ranks for entry in found]
    sent = [entry for entry in told if isinstance(entry, tuple)]
    back = [entry for entry in told if isinstance(entry, list)]
    for turn, (values, gradients) in enumerate(sent):
        assert values[0].tolist() == [[turn + 1.0] * 3] * 2 and values[1].tolist() == [turn, 7]
        assert gradients == [True, False]
    assert len(sent) == len(back) == 2
    assert all(one.tolist() == [[3.0] * 3] * 2 and other is None for one, other in back)
    assert {crossing for _, crossing, _ in ranks} - {None} == {(0, 2)}
    assert len({metas for _, _, metas in ranks} - {None}) == 1


def other_shape() -> str:
    """In a worker: the first rank sends another shape under the same signature."""
    carrier, signature = transport("1f1b"), signature_of((), nn.Module())
    if dist.get_rank() == 1:
        carrier.receive_on(1, signature)
        return ""
    carrier._pipeline.crossings[1] = (0,)
    carrier.send_on(1, (torch.zeros(2, 3),), signature)
    carrier.drain()
    try:
        carrier.send_on(1, (torch.zeros(3, 3),), signature)
    except LayoutError as error:
        return str(error)
    return "nothing"


@pytest.mark.distributed
def test_a_shape_that_is_no_function_of_the_inputs_is_refused(pool: Pools) -> None:
    told, _ = pool(2).run(other_shape)
    assert "the activations that begin stage 1 of the pipeline have another shape than before" in told


def other_kinds() -> list[str]:
    """In a worker: what is said of tensors that cannot be sent; nothing has left by then."""
    carrier, told = transport("1f1b"), []
    for tensor in (torch.zeros(2, dtype=torch.complex64), torch.eye(2).to_sparse()):
        carrier._pipeline.crossings[1] = (0,)
        try:
            carrier.send_on(1, (tensor,), signature_of((), nn.Module()))
        except LayoutError as error:
            told.append(str(error))
    return told


@pytest.mark.distributed
@pytest.mark.full
def test_a_kind_of_tensor_that_is_not_sent_is_refused_by_name(pool: Pools) -> None:
    for told in pool(2).run(other_kinds):
        assert "2, where a stage of the pipeline begins, is called with a strided complex64 tensor" in told[0]
        assert "a sparse_coo float32 tensor" in told[1] and "torch.view_as_real" in told[1]


@pytest.mark.distributed
def test_what_lies_on_another_kind_of_device_is_refused(pool: Pools) -> None:
    """Its receiver would wait on the GPU for what goes through the host."""

    def case() -> list[str]:
        carrier, told = transport("1f1b"), []
        for device in ("cpu", "cuda"):
            carrier._device = torch.device(device)
            try:
                carrier._check_kind(1, torch.zeros(2))
            except LayoutError as error:
                told.append(str(error))
        return told

    for (told,) in pool(2).run(case):
        assert "is called with a tensor on cpu that modules before it have made" in told
        assert "stages send what lies on cuda: move it there and back inside the modules" in told
