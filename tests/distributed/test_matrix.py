"""Law 4 as one matrix: every layout with every model computes what one device computes, or is refused by name."""

import re
from collections.abc import Hashable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

from allranks.errors import LayoutError
from allranks.parallel.batchnorm import has_batch_statistics
from allranks.verifying.parity import RecordedStep, compare, fed, record_run
from allranks.verifying.reference import ReferenceStep, plain_loop
from tests.distributed.covering import covering_sample, pairs
from tests.distributed.matrix import EVERYTHING, LARGE, ROWS, STATIC, Row, refusal
from tests.distributed.matrix_models import MODELS, Sentence, task_of, update_balance
from tests.distributed.pool import Pools
from tests.distributed.sessions import config_of, initial_model, processes_of, session_of
from tests.distributed.tasks import IGNORED
from tests.smoke import CASES as NAMED
from tests.smoke import LAWS, is_case

pytestmark = pytest.mark.distributed

STEPS = 3
CLIPPED = 0.01  # below every norm that these models have
MAX_NORMS = (CLIPPED, None)
OPTIMIZERS: dict[str, tuple[str, ...]] = {
    "sgd": ("optimizer.name=sgd", "optimizer.lr=0.1", "optimizer.momentum=0.9", "optimizer.weight_decay=0.01"),
    "adamw": ("optimizer.name=adamw", "optimizer.lr=0.001", "optimizer.weight_decay=0.01"),
}
# (global batch, micro-steps): 12 divides by every world size up to 4, 13 by none; of 5 in 3 some rank has no sample.
CUTS = ((13, 3), (5, 3), (13, 1), (12, 3), (12, 1))
PIPELINED_CUTS = ((24, 12), (24, 6), (24, 4))  # the micro-batches of a pipeline have one shape


class Case(NamedTuple):
    """A cell of the matrix, and how a step of it is cut, clipped and applied."""

    row: str
    model: str
    global_batch: int
    micro_steps: int
    max_norm: float | None
    optimizer: str

    def __str__(self) -> str:
        clip = "unclipped" if self.max_norm is None else "clipped"
        return f"{self.row}-{self.model}-{self.global_batch}in{self.micro_steps}-{clip}-{self.optimizer}"


def runs(row: Row) -> list[tuple[int, int, float | None, str]]:
    """Every way to run a step under a layout."""
    dp, pp = row.resolved.dp, row.resolved.pp
    cuts = [(size, steps) for size, steps in CUTS if size >= dp]  # a step has a sample for every rank
    if pp > 1:
        cuts = [(size, steps) for size, steps in PIPELINED_CUTS if size // dp % steps == 0]
    return [(*cut, max_norm, optimizer) for cut, max_norm, optimizer in product(cuts, MAX_NORMS, OPTIMIZERS)]


def cases(rows: Mapping[str, Row]) -> list[Case]:
    """All that the cells of these rows may be, where they are not refused."""
    cells = [(name, model) for name, row in rows.items() for model in MODELS if refusal(row, model) is None]
    return [Case(name, model, *run) for name, model in cells for run in runs(rows[name])]


def factors(case: Case) -> tuple[Hashable, ...]:
    """What a case is a product of: pairs of these are what the sample covers; how wide an axis is counts once."""
    layout = ROWS[case.row].resolved
    sharding = layout.sharding if layout.dp_shard > 1 or layout.sharding == "none" else ""
    data = layout.kind, layout.dp_replicate > 1, sharding
    context, schedule = layout.context if layout.cp > 1 else "", layout.schedule if layout.pp > 1 else ""
    return (*data, layout.tp > 1, context, schedule, layout.ep > 1, layout.recompute, layout.world_size, *case[1:])


SMALL = {name: row for name, row in ROWS.items() if row not in (*STATIC, *LARGE, *EVERYTHING)}
BY_FACTORS = {factors(case): case for case in cases(SMALL)}
COVERING = [BY_FACTORS[chosen] for chosen in covering_sample(list(BY_FACTORS))]
# Of every layout that the pairs left out, and of one that needs eight processes, one case: each another.
LEFT_OUT = [*(name for name in SMALL if all(case.row != name for case in COVERING)), "hsdp-tpx8", "static_graphx2"]
CASES_OF = [cases({name: ROWS[name]}) for name in LEFT_OUT]
SAMPLE = [*COVERING, *(ways[71 * turn % len(ways)] for turn, ways in enumerate(CASES_OF))]
REFUSED = [(name, model) for name, row in ROWS.items() for model in MODELS if refusal(row, model) is not None]
# Rows whose cells have every way to run a step between them; of the others those that the sample has are left out.
EVERY_WAY = (("ddpx2", "ddpx3", "ddpx4"), ("fsdpx2", "fsdpx3", "fsdpx4"), ("pp-fsdpx4",))
HELD = {(case.row, case.model) for case in SAMPLE if case.row not in sum(EVERY_WAY, ())}
CELLS = [(name, model) for name in ROWS for model in MODELS if (name, model) not in {*REFUSED, *HELD}]


def broad(case: Case) -> tuple[Hashable, ...]:
    """Of what a case is a product of, what `make test` tells apart.

    Of schedules 1f1b and others, of sizes 1, 2 and more; with a context or without, recomputing or not. How a world
    without axes is asked for (nothing, one device, all that there are) is not told apart.
    """
    size = min(ROWS[case.row].world_size, 3)
    _, *data, context, schedule, experts, recompute, _, model, batch, micro_steps, norm, optimizer = factors(case)
    kind = schedule if schedule in ("", "1f1b") else "another"
    return (*data, context != "", kind, experts, recompute != "none", size, model, batch, micro_steps, norm, optimizer)


def few() -> list[Case]:
    """Of the sample what `make test` takes: every pair of what it tells apart, and what the smoke subset names."""
    by_factors = {broad(case): case for case in reversed(COVERING)}
    chosen = {by_factors[of] for of in covering_sample(list(by_factors)[::-1])}
    rows = {case.row for case in chosen}
    named = {row for row in ROWS if row not in rows and any(is_case(f"{LAWS}[{row}]", name) for name in NAMED)}
    first = {case.row: case for case in reversed(SAMPLE) if case.row in named}
    return [case for case in SAMPLE if case in chosen or first.get(case.row) == case]


FEW = few()
REST = [case for case in SAMPLE if case not in FEW]


def chosen_of(cell: tuple[str, str]) -> Case:
    """A run of a cell, by turns, so that the cells of rows which follow each other have most of them between them."""
    row, model = cell
    ways = runs(ROWS[row])
    turn = 11 * list(MODELS).index(model) + list(ROWS).index(row)  # 11 has no divisor in common with how many they are
    return Case(row, model, *ways[turn % len(ways)])


def config(case: Case) -> Any:
    row = ROWS[case.row]
    cut = f"train.global_batch={case.global_batch}", f"train.micro_steps={case.micro_steps}"
    clip = () if case.max_norm is None else (f"train.max_norm={case.max_norm}",)
    return config_of(row.layout, *row.overrides, *cut, *clip, *OPTIMIZERS[case.optimizer], steps=STEPS)


def record(cell: Sequence[Case]) -> list[list[RecordedStep]]:
    """In a worker: the steps of each case, all of one layout."""
    processes = processes_of(config(cell[0]))
    return [record_run(task_of(case.model), config(case), processes, STEPS) for case in cell]


def data_ranks(case: Case) -> range:
    """One of all the ranks that see the same samples, for each share of them; later stages see what the first does."""
    layout = ROWS[case.row].resolved
    return range(0, layout.dp * layout.cp * layout.tp, layout.cp * layout.tp)


def batches_of(case: Case, task: Sentence, ranks: Sequence[Sequence[RecordedStep]]) -> list[Any]:
    """The very samples that the ranks fed, step by step."""
    dataset, batches = task.dataset("train"), []
    for step in range(STEPS):
        positions = fed(ranks, step, data_ranks(case))
        assert list(positions) == list(range(step * case.global_batch, (step + 1) * case.global_batch))
        batches.append(default_collate([dataset[sample] for sample in positions.values()]))
    return batches


def make_optimizer(case: Case, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if case.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)
    return torch.optim.AdamW(parameters, lr=0.001, weight_decay=0.01)


def reference(case: Case, ranks: Sequence[Sequence[RecordedStep]]) -> list[ReferenceStep]:
    """What one device computes."""
    task = task_of(case.model)
    batches = batches_of(case, task, ranks)
    if case.model == "gan":
        return reference_of_a_pair(case, task, batches)
    model = initial_model(task).double()
    # What a batch statistic sees is a micro-step (law 2).
    parts = case.micro_steps if has_batch_statistics({"": model}) else 1
    counted = [(batch, int((batch["y"] != IGNORED).sum())) for batch in batches]
    return plain_loop(
        model,
        lambda parameters: make_optimizer(case, parameters),
        counted,
        lambda m, b: loss_of(task, m, b, parts),
        case.max_norm,
        finish=update_balance,
    )


def loss_of(task: Sentence, model: nn.Module, batch: Any, num_parts: int) -> torch.Tensor:
    """The sum over consecutive parts of near-equal size."""
    cut = (value.tensor_split(num_parts) for value in (batch["x"], batch["y"]))
    return torch.stack([task.loss(model(x), {"y": y}) for x, y in zip(*cut, strict=True)]).sum()


def reference_of_a_pair(case: Case, task: Any, batches: list[Any]) -> list[ReferenceStep]:
    """The loop that everybody writes for two models in turn."""
    models = {which: module.double() for which, module in initial_model(task).items()}
    optimizers = {which: make_optimizer(case, list(models[which].parameters())) for which in ("maker", "critic")}
    steps = []
    for batch in batches:
        losses, gradients, norm = [], dict[str, torch.Tensor](), torch.zeros(())
        for which, loss, targets in task.step(models, batch):
            for optimizer in optimizers.values():
                optimizer.zero_grad()
            (loss / targets).backward()
            losses.append(float(loss.detach()) / targets)
            named = dict(models[which].named_parameters())
            gradients |= {f"{which}.{name}": p.grad.clone() for name, p in named.items() if p.grad is not None}
            norm = nn.utils.clip_grad_norm_(named.values(), case.max_norm or float("inf"))
            optimizers[which].step()
        kept = {f"{which}.{n}": p.detach().clone() for which, m in models.items() for n, p in m.named_parameters()}
        steps.append(ReferenceStep(losses[0], float(norm), gradients, kept))
    return steps


def check_counters(case: Case, ranks: Sequence[Sequence[RecordedStep]]) -> None:
    """Whole numbers in buffers: each rank's own forwards and samples, without fillers; a BatchNorm's, everybody's."""
    for rank in ranks:
        counts = {"calls": 0, "seen": 0, "num_batches_tracked": 0, "tokens_per_expert": 0}
        for index, step in enumerate(rank):
            first = index * case.global_batch
            micro_steps = torch.arange(first, first + case.global_batch).tensor_split(case.micro_steps)
            sizes = [len(set(part.tolist()) & set(step.positions)) for part in micro_steps]
            assert sum(sizes) == len(step.positions)
            counts["calls"] += sum(size > 0 for size in sizes)
            counts["seen"] += sum(sizes)
            counts["num_batches_tracked"] += case.micro_steps
            for name, (_, value) in step.buffers.items():
                if not value.is_floating_point():
                    wanted = counts[name.rpartition(".")[2]]
                    assert bool((value == wanted).all()), f"{case}: step {index}: {name} is {value}, not {wanted}"


def check(pool: Pools, cell: Sequence[Case]) -> None:
    recorded = pool(ROWS[cell[0].row].world_size).run(record, cell, timeout=240)
    for index, case in enumerate(cell):
        ranks = [rank[index] for rank in recorded]
        expected = reference(case, ranks)
        assert case.max_norm is None or min(step.norm for step in expected) > case.max_norm, "nothing is clipped"
        differences = compare(ranks, expected, adaptive=case.optimizer == "adamw")
        assert not differences, f"{case}: {'; '.join(map(str, differences[:5]))}"
        check_counters(case, ranks)


@pytest.mark.parametrize("row", dict.fromkeys(case.row for case in FEW))
def test_equal_to_one_device(pool: Pools, row: str) -> None:
    """The sample, layout by layout: the cases of one share their processes' groups."""
    check(pool, [case for case in FEW if case.row == row])


@pytest.mark.full
@pytest.mark.parametrize("row", dict.fromkeys(case.row for case in REST))
def test_equal_to_one_device_in_every_pair(pool: Pools, row: str) -> None:
    check(pool, [case for case in REST if case.row == row])


@pytest.mark.full
@pytest.mark.parametrize("cell", CELLS, ids="-".join)
def test_equal_to_one_device_in_every_layout_with_every_model(pool: Pools, cell: tuple[str, str]) -> None:
    check(pool, [chosen_of(cell)])


def large(name: str) -> Any:
    """A layout of more than four processes is refused in the full run."""
    return pytest.param(name, marks=pytest.mark.full) if ROWS[name].world_size > 4 else name


REFUSING = [large(name) for name in dict.fromkeys(name for name, _ in REFUSED)]


def refused(cells: Sequence[tuple[str, str]]) -> list[str]:
    """In a worker: what each cell of one layout is refused with."""
    found = []
    cases = [Case(name, model, *runs(ROWS[name])[0]) for name, model in cells]
    processes = processes_of(config(cases[0]))
    for case in cases:
        with pytest.raises(LayoutError) as error:
            session_of(task_of(case.model), config(case), processes)
        found.append(str(error.value))
    return found


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", REFUSING)
def test_what_makes_no_sense_is_refused_by_name(pool: Pools, name: str) -> None:
    cells = [cell for cell in REFUSED if cell[0] == name]
    for told in pool(ROWS[name].world_size).run(refused, cells, timeout=240):
        for (_, model), message in zip(cells, told, strict=True):
            pattern = refusal(ROWS[name], model)
            assert pattern is not None
            assert re.match(pattern, message), message


def test_the_sample_covers_what_it_should() -> None:
    """Every layout, every model with every schedule, and some rank without a sample."""
    held = {(ROWS[case.row].resolved.schedule, case.model) for case in SAMPLE if ROWS[case.row].resolved.pp > 1}
    schedules = {row.resolved.schedule for row in ROWS.values()}
    assert held == {(schedule, model) for schedule in schedules for model in MODELS if model != "gan"}
    assert {case.row for case in SAMPLE} >= {name for name, row in ROWS.items() if row.world_size <= 4}
    assert any(case.global_batch < case.micro_steps * ROWS[case.row].resolved.dp for case in SAMPLE)
    for names in EVERY_WAY:
        whole = {chosen_of((name, model))[2:] for name, model in CELLS if name in names}
        assert whole == set(runs(ROWS[names[0]]))
    assert {*CELLS, *HELD} == {(name, model) for name in ROWS for model in MODELS} - {*REFUSED}


def test_make_test_has_every_mode_and_every_pair_of_what_it_tells_apart() -> None:
    layouts = [ROWS[case.row].resolved for case in FEW]
    for key in ("schedule", "context", "recompute", "sharding"):
        assert {getattr(layout, key) for layout in layouts} == {getattr(row.resolved, key) for row in ROWS.values()}, (
            key
        )
    assert {case.model for case in FEW if ROWS[case.row].resolved.pp > 1} == MODELS.keys() - {"gan"}
    assert {pair for case in FEW for pair in pairs(broad(case))} == {
        pair for case in COVERING for pair in pairs(broad(case))
    }
