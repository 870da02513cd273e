"""The order of forwards and backwards."""

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from allranks.errors import LayoutError, ProcessError
from allranks.layout import Layout
from allranks.parallel import stage_schedule
from allranks.parallel.mesh import build_mesh
from allranks.parallel.pipeline import Pipeline
from allranks.parallel.stage_plan import plan_stages
from allranks.parallel.stage_run import Payload
from allranks.parallel.stage_schedule import CLASSES, Scheduler
from allranks.parallel.stage_transport import Transport, signature_of
from tests.distributed.pool import Pools

pytestmark = pytest.mark.distributed

NUMBER = 6


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(4)))


def inputs(index: int, rows: int = 2) -> torch.Tensor:
    return torch.randn(rows, 3, generator=torch.Generator().manual_seed(index))


def made(schedule: str, module: nn.Module | None = None) -> tuple[Scheduler, Pipeline]:
    mesh = build_mesh(Layout(pp=2, schedule=schedule), "cpu")
    module = model() if module is None else module
    pipeline = Pipeline(module, plan_stages(module, mesh.layout.stage_ranks), mesh)
    device = torch.device("cpu")
    return Scheduler(pipeline, Transport(pipeline, mesh, device), mesh, device), pipeline


def run(schedule: str, rows: list[int]) -> Any:
    """In a worker: the gradients after one step, the order of computing, and the losses."""
    scheduler, pipeline = made(schedule)
    order: list[tuple[str, int, int]] = []
    losses: list[float] = []

    def compute(index: int, stage: int, received: Payload) -> Payload:
        order.append(("F", index, stage))
        output: Any = pipeline.run(stage, (inputs(index, rows[index]),), received)
        if stage < pipeline.last:
            return tuple(output)
        loss = output.square().sum()
        losses.append(float(loss.detach()))
        return (loss,)

    signatures = [signature_of((inputs(index, number),), pipeline.module) for index, number in enumerate(rows)]
    assert not any(map(scheduler.is_known, signatures))
    scheduler.forward(list(dict.fromkeys(signatures)), compute)
    assert all(map(scheduler.is_known, signatures))
    order.clear()
    losses.clear()
    scheduler.run(signatures, compute, scheduled=scheduler.fits(signatures))
    own = [parameter for stage in pipeline.stages for parameter in pipeline.parameters(stage)]
    named = {id(p): name for name, p in pipeline.module.named_parameters()}
    return {named[id(p)]: p.grad for p in own}, order, losses, bool(scheduler._made)


@pytest.mark.parametrize("schedule", sorted(CLASSES))
@pytest.mark.parametrize("rows", [[2] * NUMBER, [2, 3, 1, 2]], ids=["alike", "unlike"])
def test_gradients_are_those_of_one_process(pool: Pools, schedule: str, rows: list[int]) -> None:
    """Micro-steps of unlike shape go through in turn, and those of one shape as torch's schedule says."""
    whole = model()
    losses = [whole(inputs(index, number)).square().sum() for index, number in enumerate(rows)]
    torch.stack(losses).sum().backward()
    ranks = pool(2).run(run, schedule, rows)
    found = {name: gradient for gradients, *_ in ranks for name, gradient in gradients.items()}
    for name, parameter in whole.named_parameters():
        assert parameter.grad is not None and torch.allclose(found[name], parameter.grad, atol=1e-6), name
    told = next(told for _, _, told, _ in ranks if told)
    assert told == pytest.approx([loss.item() for loss in losses])
    assert [scheduled for *_, scheduled in ranks] == [len(set(rows)) == 1] * 2


class Checkpointed(nn.Module):
    """A block that checkpoints a part of itself, whose three layers are as many groups of parameters to torch."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.reentrant, self.runs = nn.Linear(3, 3), reentrant, 0
        self.second, self.norm, self.third = nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 3)

    def part(self, value: torch.Tensor) -> Any:
        self.runs += 1
        return self.third(torch.tanh(self.norm(self.second(value))))

    def forward(self, value: torch.Tensor) -> Any:
        inner = torch.tanh(self.first(value))
        return inner + checkpoint(self.part, inner, use_reentrant=self.reentrant)


def checkpointed(reentrant: bool) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Checkpointed(reentrant) for _ in range(4)))


def run_checkpointed(schedule: str, reentrant: bool) -> Any:
    """In a worker: the gradients after one step, and how often each block of its stages has run its part."""
    scheduler, pipeline = made(schedule, checkpointed(reentrant))

    def compute(index: int, stage: int, received: Payload) -> Payload:
        output: Any = pipeline.run(stage, (inputs(index),), received)
        return tuple(output) if stage < pipeline.last else (output.square().sum(),)

    signature = signature_of((inputs(0),), pipeline.module)
    scheduler.forward([signature], compute)
    blocks: list[Any] = [pipeline.module.get_submodule(str(stage)) for stage in pipeline.stages]
    for block in blocks:
        block.runs = 0
    scheduler.run([signature] * NUMBER, compute, scheduled=True)
    own = {id(parameter) for stage in pipeline.stages for parameter in pipeline.parameters(stage)}
    gradients = {name: p.grad for name, p in pipeline.module.named_parameters() if id(p) in own}
    return gradients, [block.runs for block in blocks]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("schedule", ["interleaved_zb", "zbv", "dualpipev"])
def test_what_a_model_checkpoints_is_computed_once_again(pool: Pools, schedule: str, reentrant: bool) -> None:
    """In a backward of two halves torch would do so for each group of parameters, or raise (use_reentrant=True)."""
    whole = checkpointed(reentrant)
    torch.stack([whole(inputs(index)).square().sum() for index in range(NUMBER)]).sum().backward()
    ranks = pool(2).run(run_checkpointed, schedule, reentrant)
    found = {name: gradient for gradients, _ in ranks for name, gradient in gradients.items()}
    for name, parameter in whole.named_parameters():
        assert parameter.grad is not None and torch.allclose(found[name], parameter.grad, rtol=1e-4, atol=1e-5), name
    assert [runs for _, runs in ranks] == [[2 * NUMBER] * 2] * 2


def loss_checkpointed(schedule: str) -> None:
    """In a worker: a step whose loss is checkpointed, by torch's reentrant variant."""
    scheduler, pipeline = made(schedule)

    def compute(index: int, stage: int, received: Payload) -> Payload:
        output: Any = pipeline.run(stage, (inputs(index),), received)
        if stage < pipeline.last:
            return tuple(output)
        return (checkpoint(lambda given: given.square().sum(), output, use_reentrant=True),)

    signature = signature_of((inputs(0),), pipeline.module)
    scheduler.forward([signature], compute)
    scheduler.run([signature] * NUMBER, compute, scheduled=True)
    for stage in pipeline.stages:
        assert all(parameter.grad is not None for parameter in pipeline.parameters(stage))


@pytest.mark.parametrize("schedule", ["interleaved_zb", "zbv", "dualpipev"])
def test_a_loss_may_be_checkpointed(pool: Pools, schedule: str) -> None:
    pool(2).run(loss_checkpointed, schedule)


def test_1f1b_holds_fewer_forwards_than_gpipe(pool: Pools) -> None:
    """The first stage of 1f1b runs ahead by the number of stages, that of gpipe by all."""
    ranks = pool(2).run(run, "1f1b", [2] * NUMBER)
    assert [index for _, index, _ in ranks[0][1]] == list(range(NUMBER))
    kept = {name: max_kept(pool, name) for name in ("1f1b", "gpipe")}
    assert kept == {"1f1b": 2, "gpipe": NUMBER}


def count_kept(schedule: str) -> int:
    """In a worker: the most outputs of its stage that wait for their backward at one time."""
    scheduler, pipeline = made(schedule)
    waiting = most = 0

    def done(_: torch.Tensor) -> None:
        nonlocal waiting
        waiting -= 1

    def compute(index: int, stage: int, received: Payload) -> Payload:
        nonlocal waiting, most
        output: Any = pipeline.run(stage, (inputs(index),), received)
        found = tuple(output) if stage < pipeline.last else (output.square().sum(),)
        if counting:
            waiting += 1
            most = max(most, waiting)
            found[0].register_hook(done)
        return found

    counting, signature = False, signature_of((inputs(0),), pipeline.module)
    scheduler.forward([signature], compute)
    counting = True
    scheduler.run([signature] * NUMBER, compute, scheduled=True)
    assert waiting == 0
    return most


def max_kept(pool: Pools, schedule: str) -> int:
    return int(pool(2).run(count_kept, schedule)[0])


def make_step(scheduler: Scheduler, pipeline: Pipeline, rows: int = 2) -> None:
    """In a worker: a step of equal micro-steps, by the schedule."""

    def compute(index: int, stage: int, received: Payload) -> Payload:
        output: Any = pipeline.run(stage, (inputs(index, rows),), received)
        return tuple(output) if stage < pipeline.last else (output.square().sum(),)

    signature = signature_of((inputs(0, rows),), pipeline.module)
    if not scheduler.is_known(signature):
        scheduler.forward([signature], compute)
    scheduler.run([signature] * NUMBER, compute, scheduled=True)


def test_what_is_received_into_stays_from_step_to_step(pool: Pools) -> None:
    def case() -> list[tuple[int, ...]]:
        scheduler, pipeline = made("gpipe")
        assert scheduler.received_into == []
        make_step(scheduler, pipeline)
        return [tuple(buffer.shape) for buffer in scheduler.received_into]

    assert pool(2).run(case) == [[(2, 3)] * NUMBER] * 2


@pytest.mark.parametrize("past", [False, True], ids=["torch's stage", "beside it"])
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_lengths_that_change_for_ever_take_no_more_memory(pool: Pools, schedule: str, past: bool) -> None:
    """What is received into stays for the kinds of micro-steps that came last, and one that comes again is right."""

    def case() -> tuple[list[int], int, dict[str, torch.Tensor]]:
        scheduler, pipeline = made(schedule)
        received: list[weakref.ref[torch.Tensor]] = []
        sizes = []
        gc.disable()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stage_schedule, "KNOWS_GRADIENTS", not past and stage_schedule.KNOWS_GRADIENTS)
            for rows in (*range(2, 9), 2):
                pipeline.module.zero_grad()
                make_step(scheduler, pipeline, rows)
                received += [weakref.ref(buffer) for buffer in scheduler.received_into]
                sizes.append(sum(len(buffer) for buffer in scheduler.received_into))
        alive = {id(buffer) for buffer in (ref() for ref in received) if buffer is not None}
        gc.enable()
        kept = {id(buffer) for buffer in scheduler.received_into}
        named = {name: parameter.grad for name, parameter in pipeline.module.named_parameters()}
        return sizes, len(alive - kept), {name: gradient for name, gradient in named.items() if gradient is not None}

    whole = model()
    torch.stack([whole(inputs(index)).square().sum() for index in range(NUMBER)]).sum().backward()
    for sizes, forgotten, gradients in pool(2).run(case):
        each = sizes[0] // 2
        assert sizes[:6] == [each * rows for rows in (2, 5, 9, 14, 18, 22)] and sizes[7] == each * (2 + 6 + 7 + 8)
        assert forgotten == 0, "nobody else holds them, in no cycle of references either"
        for name, gradient in gradients.items():
            expected = whole.get_parameter(name).grad
            assert expected is not None and torch.allclose(gradient, expected, atol=1e-6), name


def test_kinds_that_were_not_seen_for_long_are_made_known_anew(pool: Pools) -> None:
    def case() -> tuple[list[bool], int]:
        scheduler, pipeline = made("1f1b")
        kinds = [signature_of((inputs(0, rows),), pipeline.module) for rows in (2, 3, 4)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stage_schedule, "KINDS", 2)
            for rows in (2, 3, 2, 4, 2, 3):  # 3 is forgotten when 4 comes, 4 when 3 comes again
                make_step(scheduler, pipeline, rows)
        carrier = scheduler.transport
        return [scheduler.is_known(kind) for kind in kinds], len(carrier.sent) + len(carrier._told | carrier._heard)

    assert pool(2).run(case) == [([True, True, False], 4)] * 2


class Turned(nn.Module):
    """Its input's gradient, which goes to the stage before, comes in other strides."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.linear(x.mT)
        return found.tanh()


@pytest.mark.parametrize("schedule", ["interleaved_zb", "zbv", "dualpipev", "1f1b"])
def test_gradients_in_other_strides_come_as_they_are_meant(pool: Pools, schedule: str) -> None:
    """gloo refuses to send such ones, and NCCL would send what lies in memory."""

    def turned() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(Turned()) for _ in range(4)))

    def case() -> dict[str, Any]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(globals(), "model", turned)
            patch.setitem(globals(), "inputs", square)
            found: dict[str, Any] = run(schedule, [2] * NUMBER)[0]
            return found

    def square(index: int, _: int = 2) -> torch.Tensor:
        return torch.randn(3, 2, 2, generator=torch.Generator().manual_seed(index))

    whole = turned()
    torch.stack([whole(square(index)).square().sum() for index in range(NUMBER)]).sum().backward()
    ranks = pool(2).run(case)
    found = {name: gradient for gradients in ranks for name, gradient in gradients.items()}
    for name, parameter in whole.named_parameters():
        assert parameter.grad is not None and torch.allclose(found[name], parameter.grad, atol=1e-6), name


@pytest.mark.parametrize("past", [False, True], ids=["torch's stage", "beside it"])
def test_another_shape_is_refused_before_it_is_sent(pool: Pools, past: bool) -> None:
    """Who receives less than it expects over gloo keeps the rest of what came before, without a word."""

    def case() -> str:
        scheduler, pipeline = made("1f1b")
        rows = 2

        def compute(index: int, stage: int, received: Payload) -> Payload:
            output: Any = pipeline.run(stage, (inputs(index),), received)
            if stage == pipeline.last:
                return (output.square().sum(),)
            return tuple(one[:rows] for one in output)

        signatures = [signature_of((inputs(0),), pipeline.module)] * NUMBER
        scheduler.forward(signatures[:1], compute)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stage_schedule, "KNOWS_GRADIENTS", not past and stage_schedule.KNOWS_GRADIENTS)
            scheduler.run(signatures, compute, scheduled=True)
        rows = 1
        try:
            if dist.get_rank() == 0:
                scheduler.run(signatures, compute, scheduled=True)
        except LayoutError as error:
            return str(error)
        return "nothing"

    told, _ = pool(2).run(case)
    assert "the activations that begin stage 1 of the pipeline have another shape than before" in told


def test_no_neighbour_can_have_shapes_sent_as_pickles(pool: Pools) -> None:
    """Since 2.13 torch's stages vote whether to try shapes out, and a vote is whatever has come from a neighbour."""

    def case() -> list[str]:
        scheduler, pipeline = made("1f1b")
        make_step(scheduler, pipeline)
        said: list[str] = []
        for stage in (stage for made in scheduler._made.values() for stage in made.stages):
            for ask in (stage._recv_meta, stage._send_meta):
                try:
                    ask(0)
                except ProcessError as error:
                    said.append(str(error))
        return said

    for said in pool(2).run(case):
        assert len(said) == 2 and all("answers in the place of a stage" in one for one in said)
