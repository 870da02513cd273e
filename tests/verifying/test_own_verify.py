"""`allranks.verify`: real processes, raw torch.distributed, right and wrong."""

import os
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import allranks
from allranks.errors import ConfigError
from allranks.verifying.answer import Answer
from allranks.verifying.own_verify import EVEN, OWN_PRECISION, PACKED, hindrance, not_tried, say_packed, verify_program
from allranks.verifying.recording import Noise, OneDevice, RunRecord
from allranks.verifying.variants import ORDERED
from tests.verifying.records import evidence, one_device

pytestmark = pytest.mark.distributed

IGNORED = -100
HELDOUT = Path(__file__).parents[2] / "corpus" / "heldout"


def batches(ignored: int = 0, seed: int = 1) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(4):
        x = torch.randn(8, 6, generator=generator)
        y = torch.randint(0, 3, (8,), generator=generator)
        y[:ignored] = IGNORED
        found.append((x, y))
    return found


def build(distributed: bool) -> Any:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))
    if distributed:
        model = DistributedDataParallel(model)
        torch.manual_seed(100 + dist.get_rank())
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(model: Any, optimizer: Any, some: Any, change: Callable[[Any], None] = lambda model: None) -> float:
    optimizer.zero_grad()
    total = 0.0
    for x, y in some:
        loss = nn.functional.cross_entropy(model(x), y, ignore_index=IGNORED) / len(some)
        loss.backward()
        total += float(loss.detach())
    change(model)
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return total


def past_the_wrapper(model: Any, optimizer: Any, some: Any) -> float:
    return train(model.module if hasattr(model, "module") else model, optimizer, some)


def a_billionth(model: Any) -> None:
    if isinstance(model, DistributedDataParallel):
        model.module[0].weight.grad *= 1 + 1e-9


def test_a_right_loop_is_equal() -> None:
    answer = allranks.verify(build, train, batches())
    assert answer.equal and answer.exit_code == 0, str(answer)
    assert answer.to_json()["verdicts"] == []
    assert str(answer).startswith(
        "equal: 2 processes compute what one device computes, over 4 steps\n"
        f"  {EVEN}\n  no resume was tried: the program has no save and load\n"
        "  no evaluation was tried: the program has no evaluate\n  gradients before clipping: equal to"
    )


def in_eval(distributed: bool) -> Any:
    """A model whose ranks never drop: nobody has put it back into train()."""
    model, optimizer = build(distributed)
    return (model.eval() if distributed else model), optimizer


def one_layer_in_eval(distributed: bool) -> Any:
    """The last rank alone leaves one of two dropouts out."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))
    if distributed:
        torch.manual_seed(100 + dist.get_rank())
        model[3].train(dist.get_rank() == 0)
        model = DistributedDataParallel(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (in_eval, "one device drops with 0.1, the ranks with nothing"),
        (one_layer_in_eval, "of 0.1, a sample goes through 2 dropouts on one device, 1 on rank 1"),
    ],
)
def test_ranks_that_do_not_drop_as_one_device_does(wrong: Any, said: str) -> None:
    """No gradient differs: dropouts let everything pass while gradients are compared."""
    answer = allranks.verify(wrong, train, batches())
    (finding,) = answer.findings
    assert (finding.verdict.kind, finding.verdict.evidence) == ("other", (said,)), str(answer)


@pytest.mark.parametrize(
    ("num_steps", "steps", "saved", "resumed", "evaluated", "told"),
    [
        (4, 4, 2, 2, True, ()),
        (4, 4, 0, 0, True, ("no resume was tried: the program has no save and load",)),
        (8, 3, 0, 0, True, ("no resume was tried: it is saved before step 4, and the data ends sooner",)),
        (4, 2, 2, 0, True, ("no resume was tried: the data ends where it is saved, before step 2",)),
        (4, 3, 2, 1, True, ("no second save was resumed: the data ends where it is made, before step 3",)),
        (2, 2, 1, 1, False, ("no evaluation was tried: the program has no evaluate",)),
        (2, 2, 1, 1, None, ("no evaluation was compared: evaluate returns nothing",)),
    ],
)
def test_what_was_not_tried_is_told(
    num_steps: int, steps: int, saved: int, resumed: int, evaluated: bool | None, told: tuple[str, ...]
) -> None:
    run = one_device()
    run.steps, run.saved_before = [deepcopy(run.steps[0]) for _ in range(steps)], saved
    run.resumed = RunRecord(first=saved, steps=run.steps[:resumed]) if resumed else None
    run.evaluation = run.evaluation if evaluated else {} if evaluated is None else None
    assert not_tried([run], num_steps) == told
    run.keeps = True
    assert not_tried([run], num_steps) == (*told, "nothing that is kept was compared: state returns nothing")


@pytest.mark.parametrize(("alone", "rank", "told"), [((), (), 0), ((0, 1), (0, 1), 2), ((), (1,), 1), ((1,), (), 1)])
def test_samples_that_were_not_compared_are_told(alone: tuple[int, ...], rank: tuple[int, ...], told: int) -> None:
    """Nothing is said of them either where a rank's batch alone has no rows."""
    record = evidence()
    for run, packed in ((record.one.run, alone), (record.ranks[1], rank)):
        for step in packed:
            run.steps[step].packed = True
    assert say_packed(record, 2) == ((PACKED.format(told, 2),) if told else ())


def weighed(rank: int, world_size: int) -> Any:
    """Batches with the weights of three classes beside the samples."""
    for x, y in batches():
        yield [(x.chunk(world_size)[rank], y.chunk(world_size)[rank], torch.ones(3))]


def test_batches_with_one_odd_tensor_are_not_said_to_be_packed() -> None:
    answer = allranks.verify(plain, unnumbered(train), weighed, num_steps=2)
    assert answer.equal and "have not one length" in answer.notes[0] and EVEN not in answer.notes, str(answer)


def test_one_step_is_too_few() -> None:
    """Of the optimizer's state nothing would show."""
    answer = allranks.verify(build, train, batches()[:1])
    assert answer.exit_code == 3 and "the data is too small for two steps\n  it gives 1" in str(answer), str(answer)


def test_where_the_data_ends_at_the_save_nothing_is_resumed_and_that_is_told() -> None:
    def save(model: Any, optimizer: Any, folder: Path) -> None:
        (folder / "nothing").touch()

    def load(model: Any, optimizer: Any, folder: Path) -> None:
        raise RuntimeError("nobody calls this")

    answer = allranks.verify(build, train, batches()[:2], save=save, load=load)
    assert answer.equal and "no resume was tried: the data ends where it is saved, before step 2" in answer.notes


def test_uneven_shares_are_not_said_to_be_even() -> None:
    uneven = [(torch.randn(5, 6, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2, 0, 1]))] * 2
    answer = allranks.verify(sharded, sums, uneven, num_steps=2)
    assert answer.equal and EVEN not in answer.notes, str(answer)


def sums(model: Any, optimizer: Any, some: Any) -> None:
    optimizer.zero_grad()
    for x, y in some:
        share = dist.get_world_size() / 5
        loss = nn.functional.cross_entropy(model(x), y, reduction="sum") * share
        loss.backward()
    optimizer.step()


def measured_by_rank_0(model: Any, some: Any) -> dict[str, Any]:
    return {"sum": model(some[0]).sum()} if dist.get_rank() == 0 else {}


def kept_by_rank_0(rank: int, world_size: int) -> Any:
    return [torch.ones(3, 6, dtype=torch.float64)] if rank == 0 else []


def test_no_process_sees_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")

    def built(distributed: bool) -> Any:
        side = "ranks" if distributed else "one"
        (tmp_path / f"{side}-{os.environ['CUDA_VISIBLE_DEVICES']}").touch()
        model, optimizer = build(distributed)
        return model.eval(), optimizer  # no dropout, whose generators would have to be saved

    def save(model: Any, optimizer: Any, folder: Path) -> None:
        torch.save([model.state_dict(), optimizer.state_dict()], folder / f"{dist.get_rank()}.pt")

    def load(model: Any, optimizer: Any, folder: Path) -> None:
        for one, kept in zip((model, optimizer), torch.load(folder / "0.pt"), strict=True):
            one.load_state_dict(kept)
        (tmp_path / f"load-{dist.get_world_size()}-{os.environ['CUDA_VISIBLE_DEVICES']}").touch()

    answer = allranks.verify(built, train, batches(), num_steps=2, save=save, load=load)
    assert answer.equal, str(answer)
    assert {path.name for path in tmp_path.iterdir()} == {"one-", "ranks-", "load-1-", "load-2-"}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_an_evaluation_by_rank_0_alone_is_no_finding() -> None:
    def evaluate(model: Any, some: Any) -> dict[str, Any]:
        return measured_by_rank_0(getattr(model, "module", model).eval(), some)

    answer = allranks.verify(build, train, batches(), num_steps=2, evaluate=evaluate, validation=kept_by_rank_0)
    assert answer.equal, str(answer)


def alone_nothing(*some: Any) -> dict[str, Any]:
    return {"held": 7.0} if dist.get_world_size() > 1 else {}


@pytest.mark.parametrize(("name", "kind"), [("evaluate", "S30"), ("state", "S31")])
def test_what_ranks_alone_return_is_no_equality(name: str, kind: str) -> None:
    answer = allranks.verify(build, train, batches(), num_steps=2, **{name: alone_nothing})  # type: ignore[arg-type]
    assert [finding.verdict.kind for finding in answer.findings] == [kind], str(answer)


@pytest.mark.full
def test_uneven_targets_are_found_with_the_weights_of_the_ranks() -> None:
    answer = allranks.verify(build, train, batches(ignored=3))
    (finding,) = answer.findings
    assert finding.verdict.kind == "S9" and finding.step == 0 and answer.exit_code == 1
    # Rank 0 has 1 of 5 targets and half of the mean of means.
    assert finding.verdict.evidence[0] == "weights of the ranks' batches [0.5, 0.5], on one device [0.2, 0.8]"


@pytest.mark.full
@pytest.mark.parametrize(
    ("step", "data", "more", "kind"),
    [
        (past_the_wrapper, batches(), {}, "S10"),
        (past_the_wrapper, batches(), {"micro_batches": 2}, "S10"),
        (lambda m, o, b: train(m, o, b, a_billionth), batches(), {}, "S16"),
        (train, batches(ignored=1), {"micro_batches": 2}, "S8"),
    ],
)
def test_wrong_loops_are_found(step: Any, data: Any, more: dict[str, Any], kind: str) -> None:
    answer = allranks.verify(build, step, data, **more)
    assert [finding.verdict.kind for finding in answer.findings] == [kind], str(answer)


def noisy(model: Any, optimizer: Any, some: Any) -> float:
    return train(model, optimizer, [(x + torch.randn(6), y) for x, y in some])


@pytest.mark.full
def test_a_loop_that_draws_by_itself_cannot_be_verified() -> None:
    answer = allranks.verify(build, noisy, batches())
    assert answer.exit_code == 3 and not answer.equal
    assert "not deterministic on one device" in str(answer) and "randn" in str(answer)


def flowing(*, apart: bool, scaled: bool = False) -> Answer:
    """Of a loop whose samples each have a time, the same on all ranks unless `apart`; or whose features have a scale,
    drawn as many as one device has samples.
    """

    def built(distributed: bool) -> Any:
        model, optimizer = plain(distributed)
        if distributed and apart:
            torch.manual_seed(100 + dist.get_rank())
        return model, optimizer

    def step(model: Any, optimizer: Any, some: Any) -> float:
        times = [torch.rand(8)[:6] if scaled else torch.rand(len(x))[:, None] for x, _ in some]
        return train(model, optimizer, [(x * time, y) for time, (x, y) in zip(times, some, strict=True)])

    return allranks.verify(built, step, batches(), num_steps=2)


@pytest.mark.parametrize(("apart", "kinds"), [(True, []), (False, ["S6"])])
def test_a_number_for_each_sample_is_verified(apart: bool, kinds: list[str]) -> None:
    """It could not be, and the answer said to draw it by rand with one row for each sample, as it was."""
    answer = flowing(apart=apart)
    assert answer.exit_code == len(kinds), str(answer)
    assert [finding.verdict.kind for finding in answer.findings] == kinds


def test_as_many_numbers_as_samples_by_chance_accuse_nobody() -> None:
    answer = flowing(apart=True, scaled=True)
    assert answer.exit_code == 3 and "not deterministic on one device" in str(answer), str(answer)


class AllSum(torch.autograd.Function):
    """The sum over ranks of what each has of an output."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor) -> torch.Tensor:
        whole = part.clone()
        dist.all_reduce(whole)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


@pytest.mark.parametrize(("handed", "kinds"), [(None, ["S7"]), (0, []), (-1, [])])
def test_noise_of_ranks_that_share_a_layer(handed: int | None, kinds: list[str]) -> None:
    """Each its own; or one rank's, the first one's or the last one's, for all of them."""

    def cut(distributed: bool) -> Any:
        torch.manual_seed(0)
        rank, size = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
        layer = nn.Linear(6, 3, bias=False)
        layer.weight = nn.Parameter(layer.weight.detach().chunk(size, 1)[rank].clone())
        torch.manual_seed(100 + rank)
        return layer, torch.optim.SGD(layer.parameters(), lr=0.1)

    def step(model: Any, optimizer: Any, some: Any) -> float:
        optimizer.zero_grad()
        for x, y in some:
            noise = torch.randn_like(x)
            if handed is not None:
                dist.broadcast(noise, handed % dist.get_world_size())
            mine = (x + noise).chunk(dist.get_world_size(), 1)[dist.get_rank()]
            whole = AllSum.apply(model(mine))  # type: ignore[no-untyped-call]
            loss = nn.functional.cross_entropy(whole, y)
            loss.backward()
        optimizer.step()
        return loss.item()

    answer = allranks.verify(cut, step, lambda rank, size: [[batch] for batch in batches()], num_steps=2)
    assert [finding.verdict.kind for finding in answer.findings] == kinds, str(answer)
    assert answer.exit_code == len(kinds), str(answer)


def noise_of(scale: float, *, wrong: bool) -> Callable[[Any, Any, Any], float]:
    """A step with noise that no seed reaches; a wrong one goes past the wrapper besides."""

    def step(model: Any, optimizer: Any, some: Any) -> float:
        inner = model.module if wrong and hasattr(model, "module") else model
        loss = train(inner, optimizer, [(x * (1 + scale * os.urandom(1)[0] / 255), y) for x, y in some])
        return loss

    return step


@pytest.mark.parametrize(("scale", "wrong"), [(1.0, True), (0.05, True), (1e-3, True), (1e-3, False)])
def test_noise_from_nowhere_is_told_and_nothing_is_judged_by_it(scale: float, wrong: bool) -> None:
    """It moves the runs that show what rounding does, too: a wrong loop was called equal."""
    answer = allranks.verify(build, noise_of(scale, wrong=wrong), batches(), num_steps=2)
    assert answer.exit_code == 3 and not answer.equal, str(answer)
    assert str(answer).startswith(
        "could not be verified: the program is not deterministic on one device\n"
        "  no seed reaches what it draws from: os.urandom\n"
        "  two runs with the same seeds differ: step 0: the gradient of"
    )
    assert "or draw it by torch.randn or rand with one row for each sample" in str(answer)


def test_what_one_device_cannot_be_compared_with() -> None:
    nothing = hindrance(OneDevice(RunRecord()))
    assert nothing is not None and nothing.exit_code == 3 and "there is no data on one device" in str(nothing)
    stopped = hindrance(OneDevice(one_device(), noise=Noise("step 0: ...", seeded=True)))
    assert stopped is not None and "the program is not deterministic on one device" in str(stopped)
    assert hindrance(OneDevice(one_device())) is None


def unless_empty(model: Any, optimizer: Any, some: Any) -> float:
    """A step that has nothing to compute a loss of where there is no batch, or one of no rows."""
    for x, y in some:
        loss = nn.functional.cross_entropy(model(x[: len(x) or None]), y)
        loss.backward()
        assert len(x), "no rows"
    return loss.item()


def of_a_sample(*, empty: bool) -> Callable[[int, int], Any]:
    """Steps of one sample, the second's for rank 0 alone: the others get an empty batch, or none."""

    def data(rank: int, world_size: int) -> Any:
        for index, (x, y) in enumerate(batches()):
            few = 1 if index == 1 else len(x)
            mine = x[:few].tensor_split(world_size)[rank], y[:few].tensor_split(world_size)[rank]
            yield [mine] if empty or len(mine[0]) else []

    return data


@pytest.mark.parametrize("empty", [True, False])
def test_a_function_that_leaves_a_rank_without_a_sample_is_told(empty: bool) -> None:
    answer = allranks.verify(plain, unless_empty, of_a_sample(empty=empty), num_steps=2)
    assert answer.exit_code == 3 and str(answer).startswith(
        "could not be verified: the data is too small to be split\n"
        "  step 1 of data has samples, but none for rank 1 of 2 processes\n  rank 1:"
    ), str(answer)
    assert str(answer).endswith("next: give each step at least 2 samples, one for each process")


def test_a_program_that_fails_where_every_rank_has_samples_is_not_excused_by_them() -> None:
    def step(model: Any, optimizer: Any, some: Any) -> float:
        assert dist.get_rank() == 0, "of its own"
        return train(model, optimizer, some)

    answer = allranks.verify(plain, step, drawn_for_all, num_steps=2)
    assert str(answer).startswith("could not be verified: the program fails on one of 2 processes"), str(answer)
    assert "of its own" in str(answer)


def test_data_that_is_too_small_to_be_split_is_told() -> None:
    """And not as an error of the program, which has nothing to compute a loss of."""
    answer = allranks.verify(build, unless_empty, [tuple(part[:1] for part in batch) for batch in batches()])
    assert answer.exit_code == 3 and str(answer).startswith(
        "could not be verified: the data is too small to be split\n"
        "  step 0 of data has 1 sample, for 2 processes: some have none\n  rank 1:"
    )
    assert str(answer).endswith("next: give each step at least 2 samples, one for each process")


def half_step(factor: float, *, exact: bool) -> Callable[[Any, Any, Any], float]:
    """A step whose forward autocasts, with a gradient that the ranks have so many times too large."""

    def step(model: Any, optimizer: Any, some: Any) -> float:
        optimizer.zero_grad()
        ((x, y),) = some
        with torch.autocast("cpu", torch.bfloat16):
            output = model(x if exact else x.float())
        loss = nn.functional.cross_entropy(output.float() if not exact else output, y)
        loss.backward()
        if isinstance(model, DistributedDataParallel):
            model.module[0].weight.grad *= factor
        optimizer.step()
        return loss.item()

    return step


@pytest.mark.full
@pytest.mark.parametrize(
    ("factor", "exact", "code"), [(1.0, True, 0), (1 + 1e-9, True, 1), (1.0, False, 0), (1.25, False, 1)]
)
def test_a_loop_that_autocasts(factor: float, exact: bool, code: int) -> None:
    """In float64, which autocast leaves alone; one that insists on float32 in its own precision, more coarsely."""
    answer = allranks.verify(build, half_step(factor, exact=exact), batches())
    assert answer.exit_code == code, str(answer)
    assert [finding.tensor for finding in answer.findings] == ["0.weight"] * code
    assert any("computes in bfloat16" in note for note in answer.notes) != exact


def of_pairs(factor: float) -> Callable[[Any, Any, Any], None]:
    """A step on pairs of rows beside each other, whose gradients the ranks have so many times too large."""

    def step(model: Any, optimizer: Any, some: Any) -> None:
        optimizer.zero_grad()
        for x, _ in some:
            z = model(x)
            ((z[0::2] - z[1::2]) ** 2).mean().backward()
        if isinstance(model, DistributedDataParallel):
            for parameter in model.parameters():
                parameter.grad = None if parameter.grad is None else parameter.grad * factor
        optimizer.step()

    return step


@pytest.mark.parametrize("factor", [1.0, 1 + 1e-9, 1.04])
def test_where_the_order_of_samples_means_something_no_tenth_is_allowed(factor: float) -> None:
    """Another order was taken for rounding, so that a factor of 1.04 passed."""
    answer = allranks.verify(plain, of_pairs(factor), batches(), num_steps=2)
    assert answer.equal == (factor == 1.0), str(answer)
    assert ORDERED in answer.notes


def images(distributed: bool) -> Any:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    return DistributedDataParallel(model) if distributed else model, torch.optim.SGD(model.parameters(), lr=0.1)


def of_images(model: Any, optimizer: Any, some: Any) -> None:
    optimizer.zero_grad()
    for x, y in some:
        nn.functional.cross_entropy(model(x.to(torch.float32) / 255), y).backward()
    optimizer.step()


@pytest.mark.parametrize(("size", "kinds"), [(8, []), (9, ["S9"])])
def test_a_convolution_that_casts_is_compared_in_its_own_precision(size: int, kinds: list[str]) -> None:
    """Its error names no dtype as that of a product does. Shares of 5 and 4 are averaged as if they were even."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(0, 256, (size, 1, 6, 6), generator=generator, dtype=torch.uint8)
    answer = allranks.verify(images, of_images, [(x, torch.arange(size) % 3)] * 2, num_steps=2)
    assert [finding.verdict.kind for finding in answer.findings] == kinds, str(answer)
    assert answer.notes[0].startswith(OWN_PRECISION.split(" (", maxsplit=1)[0]) and "bias type" in answer.notes[0]


def no_data(rank: int, world_size: int) -> Any:
    return open("no-such-file")


@pytest.mark.full
def test_data_that_fails_is_told_as_the_programs_own_error() -> None:
    answer = allranks.verify(build, train, no_data)
    assert answer.exit_code == 3 and "the program fails on one device" in str(answer)
    assert "no-such-file" in str(answer) and "Traceback" not in str(answer)


def test_bad_input_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 2 processes"):
        allranks.verify(build, train, batches(), nproc=1)
    with pytest.raises(ConfigError, match="nproc=9: more than the 8 processes that run on one machine"):
        allranks.verify(build, train, batches(), nproc=9)
    with pytest.raises(ConfigError, match="from the second step on"):
        allranks.verify(build, train, batches(), num_steps=1)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("columns", []),
        ("S18_columns_one_after_another", ["S18"]),  # by a load on one process
        ("recurrent", []),  # noise of a generator of its own
        ("S06_noise_of_one_seed", ["S6"]),
        ("S30_mean_of_perplexities", ["S30"]),
    ],
)
def test_held_out_programs_that_verify_was_mended_for(name: str, kinds: list[str]) -> None:
    answer = verify_program(str(HELDOUT / f"{name}.py"))
    assert [finding.verdict.kind for finding in answer.findings] == kinds, str(answer)


def shared_noise(scale: float) -> Callable[[Any, Any, Any], float]:
    """A step that draws noise for the samples of all ranks and takes its own ranks' part of it."""
    own = torch.Generator().manual_seed(3)

    def step(model: Any, optimizer: Any, some: Any) -> float:
        ((x, y),) = some
        noise = scale * torch.randn(8, 6, generator=own).tensor_split(dist.get_world_size())[dist.get_rank()]
        return train(model, optimizer, [(x + noise, y)])

    def build_anew(distributed: bool) -> Any:
        own.manual_seed(3)
        return build(distributed)

    step.build = build_anew  # type: ignore[attr-defined]
    return step


def sharded(distributed: bool) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    if distributed:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def sequences(rank: int, world_size: int) -> Any:
    for seed in range(4):
        x = torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(seed))
        yield [(x, (x[..., 0] > 0).long())]


def drawn_for_all(rank: int, world_size: int) -> Any:
    for seed in range(4):
        torch.manual_seed(seed)
        x = torch.randn(8, 6).chunk(world_size)[rank]
        yield [(x, (x[:, 0] > 0).long())]


def test_batches_that_each_rank_draws_for_all_and_takes_its_part_of() -> None:
    """They were taken for noise of the samples of the step before, and for augmentation with the same numbers."""
    answer = allranks.verify(sharded, train, drawn_for_all, num_steps=3)
    assert answer.equal, str(answer)


def plain(distributed: bool) -> Any:
    """Without dropout, which a seed in `data` would let drop alike."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    if distributed:
        model = DistributedDataParallel(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def numbered_anew(rank: int, world_size: int) -> Any:
    """A part of a batch that is drawn for all, with the number of each sample in this part."""
    for x, y in ((x, y) for ((x, y),) in drawn_for_all(rank, world_size)):
        yield [(x, y, torch.arange(len(x)))]


def unnumbered(step: Callable[[Any, Any, Any], float]) -> Callable[[Any, Any, Any], float]:
    """A step that does not look at the numbers."""
    return lambda model, optimizer, some: step(model, optimizer, [(x, y) for x, y, _ in some])


@pytest.mark.parametrize(("step", "kinds"), [(train, []), (past_the_wrapper, ["S10"])])
def test_samples_that_are_numbered_in_their_batch_hide_no_mistake_and_are_none(step: Any, kinds: list[str]) -> None:
    """They were accused of augmentation with the same numbers, and a forward past the wrapper of other samples."""
    answer = allranks.verify(plain, unnumbered(step), numbered_anew, num_steps=3)
    assert [finding.verdict.kind for finding in answer.findings] == kinds, str(answer)


@pytest.mark.parametrize(("factor", "kinds"), [(1.0, []), (1.5, ["other", "S5"])])
def test_in_a_low_precision_alone_too(factor: float, kinds: list[str]) -> None:
    answer = allranks.verify(plain, unnumbered(half_step(factor, exact=False)), numbered_anew, num_steps=3)
    assert [finding.verdict.kind for finding in answer.findings] == kinds, str(answer)
    assert any("computes in bfloat16" in note for note in answer.notes)


def over_positions(cut: bool) -> Callable[[Any, Any, Any], None]:
    """A step on whole sequences, of which each rank computes its positions, or all."""

    def step(model: Any, optimizer: Any, some: Any) -> None:
        optimizer.zero_grad()
        size, rank = dist.get_world_size(), dist.get_rank()
        for x, y in some:
            mine = (x.chunk(size, 1)[rank], y.chunk(size, 1)[rank]) if cut else (x, y)
            loss = nn.functional.cross_entropy(model(mine[0]).flatten(0, 1), mine[1].flatten())
            loss.backward()
        optimizer.step()

    return step


def hybrid(distributed: bool) -> Any:
    """Over a mesh of two dims."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    if distributed:
        mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp_replicate", "dp_shard"))
        fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def copied(distributed: bool) -> Any:
    """Whole on every rank."""
    model, _ = sharded(False)
    if distributed:
        model = DistributedDataParallel(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


@pytest.mark.parametrize(
    ("build", "cut", "kinds"),
    [
        (sharded, True, []),
        (sharded, False, ["S4"]),
        (hybrid, True, []),
        (hybrid, False, ["S4"]),
        (copied, True, []),
        (copied, False, ["S4"]),
    ],
)
def test_ranks_that_are_fed_the_same_repeat_each_other_or_cut_sequences(
    build: Callable[[bool], Any], cut: bool, kinds: list[str]
) -> None:
    answer = allranks.verify(build, over_positions(cut), sequences, num_steps=2)
    assert [finding.verdict.kind for finding in answer.findings] == kinds, str(answer)
    assert ("ranks 0, 1 were fed the same samples" in str(answer)) == cut


@pytest.mark.full
def test_noise_that_is_drawn_for_all_and_shared_out_stays_in_its_place() -> None:
    step = shared_noise(0.1)
    answer = allranks.verify(step.build, step, batches())  # type: ignore[attr-defined]
    assert answer.equal, str(answer)


@pytest.mark.parametrize(
    ("lost", "what"), [("alone", "the program fails on one device"), ("a rank", "the program fails on one of 2 proc")]
)
def test_a_program_that_ends_its_process_leaves_nothing_verified(lost: str, what: str) -> None:
    def ending(model: Any, optimizer: Any, some: Any) -> float:
        if lost == "alone" or hasattr(model, "module"):
            sys.exit(0)
        return train(model, optimizer, some)

    answer = allranks.verify(build, ending, batches(), num_steps=2)
    assert answer.exit_code == 3 and str(answer).startswith(f"could not be verified: {what}"), str(answer)
