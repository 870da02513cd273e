"""examine_loss: sums pass, means are refused, coupled losses are reported, and nothing is disturbed."""

import random
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional

from allranks.errors import TaskError
from allranks.stepping import kept_state
from allranks.stepping.loss_check import NUM_SAMPLES, examine_loss
from allranks.stepping.loss_nature import LossNature
from allranks.task import Task, resolve_inputs, resolve_targets

Loss = Callable[[Any, Any], Any]


class Given(Task):
    """A Task whose loss is given by the test."""

    given: ClassVar[Loss]

    def model(self) -> nn.Module:
        return nn.Linear(3, 4)

    def dataset(self, split: str) -> Any:
        return samples(NUM_SAMPLES)

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        found: torch.Tensor = type(self).given(output, batch)
        return found


def samples(num: int, dtype: torch.dtype = torch.float32) -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    labels = [0, 1, 2, -100, 3, 1, 0, 2]
    return [(torch.randn(3, generator=generator).to(dtype), labels[index]) for index in range(num)]


def examine(loss: Loss, module: nn.Module | None = None, num: int = NUM_SAMPLES, coupled: bool = False) -> LossNature:
    torch.manual_seed(0)
    made = module or nn.Linear(3, 4)
    Given.given, Given.coupled = staticmethod(loss), coupled
    task = Given()
    some = samples(num, next(made.parameters()).dtype)
    batch = task.collate(some)
    inputs, targets = resolve_inputs(task, made, batch), resolve_targets(task, batch)
    return examine_loss(task, made, some, inputs=inputs.call, targets=targets.call)


def sum_loss(output: Any, batch: Any) -> Any:
    return functional.cross_entropy(output, batch[1], reduction="sum")


def info_nce(output: Any, batch: Any) -> Any:
    return functional.cross_entropy(output @ output.T, torch.arange(len(output)), reduction="sum")


@pytest.mark.parametrize("num", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_sum_is_a_sum(num: int, dtype: torch.dtype) -> None:
    nature = examine(sum_loss, nn.Linear(3, 4).to(dtype), num)
    assert nature.kind == "sum"
    assert "add up to the whole" in nature.because
    assert f"for {max(3, num)} samples" in nature.because


@pytest.mark.parametrize("num", [1, 3, 4, 5, 8])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("loss", "over"),
    [
        (lambda output, batch: functional.cross_entropy(output, batch[1]), "targets"),
        (lambda output, batch: sum_loss(output, batch) / len(output), "samples|targets"),
        (lambda output, batch: output.square().mean(), "samples|targets"),
    ],
)
def test_a_mean_is_refused_with_its_numbers(loss: Loss, over: str, num: int, dtype: torch.dtype) -> None:
    with pytest.raises(TaskError, match=rf"loss returns a mean over ({over}) \(.* for .* samples.*reduction='sum'"):
        examine(loss, nn.Linear(3, 4).to(dtype), num)


def test_a_mean_over_no_target_is_told_as_one() -> None:
    def loss(output: Any, batch: Any) -> Any:
        return functional.cross_entropy(output, torch.full_like(batch[1], -100))

    with pytest.raises(TaskError, match="is nan before the first step"):
        examine(loss)
    only_last = [
        (torch.ones(3), -100),
        (torch.ones(3), -100),
        (torch.ones(3), 1),
        (torch.ones(3), 2),
        (torch.ones(3), 3),
    ]
    Given.given, Given.coupled = staticmethod(lambda output, batch: functional.cross_entropy(output, batch[1])), False
    task = Given()
    resolved = resolve_targets(task, task.collate(only_last))
    with pytest.raises(TaskError, match="of 2 samples is nan as they hold no target: a mean over nothing"):
        examine_loss(task, nn.Linear(3, 4), only_last, inputs=lambda batch: (batch[0],), targets=resolved.call)


@pytest.mark.parametrize(
    "loss",
    [
        info_nce,
        lambda output, batch: sum_loss(output, batch) + 10.0 * output.detach().abs().max() * output.sum().sigmoid(),
        lambda output, batch: sum_loss(output, batch) + 1.0,
    ],
)
def test_a_coupled_loss_is_reported(loss: Loss) -> None:
    nature = examine(loss)
    assert nature.kind == "coupled"
    assert "do not add up" in nature.because


def causal_mean(output: Any, batch: Any) -> Any:
    """The mean over labels shifted by one, as transformers' CausalLM gives it: one less than there are targets."""
    logits = output[:, :-1].flatten(0, 1)
    return functional.cross_entropy(logits, batch[1][:, 1:].flatten())


def sentences(*lengths: int) -> list[Any]:
    """Of at most 9 words, each embedded and its own label; padded with what is no label."""
    generator = torch.Generator().manual_seed(5)
    words = torch.randint(0, 4, (len(lengths), 9), generator=generator)
    labels = words.clone()
    for label, length in zip(labels, lengths, strict=True):
        label[length:] = -100
    return list(zip(torch.nn.functional.one_hot(words, 4)[..., :3].float(), labels, strict=True))


def examine_sentences(loss: Loss, *, coupled: bool = False) -> LossNature:
    torch.manual_seed(0)
    Given.given, Given.coupled = staticmethod(loss), coupled
    task, some, module = Given(), sentences(2, 2, 9, 8, 2), nn.Linear(3, 4)
    counted = resolve_targets(task, task.collate(some)).call
    return examine_loss(task, module, some, inputs=lambda batch: (batch[0],), targets=counted)


def test_a_mean_over_something_else_is_refused() -> None:
    with pytest.raises(
        TaskError, match=r"returns a mean, as .* between its parts \(.* for 2 .* for 3 .*reduction='sum'"
    ):
        examine_sentences(causal_mean)
    with pytest.raises(TaskError, match="returns a mean, as the whole lies between its parts"):
        examine_sentences(lambda output, batch: -causal_mean(output, batch))
    assert examine_sentences(causal_mean, coupled=True).kind == "coupled"
    summed = examine_sentences(lambda output, batch: causal_mean(output, batch) * (batch[1][:, 1:] != -100).sum())
    assert summed.kind == "sum"


def test_a_mean_whose_parts_are_equal_is_refused() -> None:
    with pytest.raises(
        TaskError, match=r"returns a mean over .* \(5 for 5 samples, 5 for 2 samples, 5 for 3 samples\)"
    ):
        examine(lambda output, batch: 5.0 + 0 * output.sum())


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    "loss",
    [
        lambda output, batch: output.square().sum(1).max(),
        lambda output, batch: output.square().sum(1).min(),
        lambda output, batch: info_nce(output, batch) + output.square().sum(),
        lambda output, batch: sum_loss(output, batch) * len(output),
        lambda output, batch: output.square().sum().sqrt(),
    ],
)
def test_a_coupled_loss_is_no_mean(loss: Loss, sign: int) -> None:
    """Its whole is the largest or the smallest of the parts, or beyond them."""
    assert examine(lambda output, batch: sign * loss(output, batch)).kind == "coupled"


def test_parts_of_both_signs_tell_nothing_of_a_mean() -> None:
    def loss(output: Any, batch: Any) -> Any:
        return 0 * output.sum() + {5: 1.0, 2: -2.0, 3: 7.0}[len(output)]

    assert examine(loss).kind == "coupled"


def test_a_declared_coupling_is_taken_at_its_word() -> None:
    assert examine(info_nce, coupled=True).because == "Given says so (coupled = True)"
    with pytest.raises(TaskError, match="without dims"):
        examine(lambda output, batch: output, coupled=True)


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (lambda output, batch: output.sum().item(), r"Given.loss returned -?\d.*: return a tensor \(no .item"),
        (lambda output, batch: {"loss": output.sum()}, r"returned \{loss: a float32 tensor \[\]\}: return a tensor"),
        (lambda output, batch: output.sum(-1), r"returned a float32 tensor \[5\]: return one floating-point number"),
        (lambda output, batch: output.sum()[None], r"returned a float32 tensor \[1\]"),
        (lambda output, batch: (output > 0).sum(), r"returned a int64 tensor \[\]: return one floating-point"),
        (lambda output, batch: output.detach().sum(), "without a gradient: is something detached"),
        (lambda output, batch: output.sum() * float("inf"), "of 5 samples is -?(inf|nan) before the first step"),
    ],
)
def test_what_is_no_loss_is_refused(loss: Loss, says: str) -> None:
    with pytest.raises(TaskError, match=says):
        examine(loss)


class Rounding(nn.Linear):
    """Its results depend a little on the size of the batch, as those of kernels in a low precision may."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return super().forward(value) * (1.01 if len(value) == NUM_SAMPLES else 1.0)


def test_a_lower_precision_widens_the_tolerance_and_the_loss_sees_float32() -> None:
    seen = set()

    def loss(output: Any, batch: Any) -> Any:
        seen.add(output.dtype)
        return output.square().sum()

    Given.given, Given.coupled = staticmethod(loss), False
    module = Rounding(3, 4)

    def kind(**lower: Any) -> str:
        some = samples(NUM_SAMPLES)
        count = resolve_targets(Given(), Given().collate(some)).call
        found: str = examine_loss(Given(), module, some, inputs=lambda batch: (batch[0],), targets=count, **lower).kind
        return found

    assert kind() == "coupled"
    assert kind(autocast=lambda: torch.autocast("cpu", torch.bfloat16), compute=torch.bfloat16) == "sum"
    assert seen == {torch.float32}


def test_in_a_lower_precision_an_output_without_tensors_is_refused() -> None:
    class Hidden(nn.Linear):
        def forward(self, value: torch.Tensor) -> Any:
            return SimpleNamespace(value=super().forward(value))

    Given.given, Given.coupled = staticmethod(lambda output, batch: output.value.square().sum()), False
    some = samples(NUM_SAMPLES)

    def examine_it(**lower: Any) -> LossNature:
        count = resolve_targets(Given(), Given().collate(some)).call
        return examine_loss(Given(), Hidden(3, 4), some, inputs=lambda batch: (batch[0],), targets=count, **lower)

    assert examine_it().kind == "sum"
    with pytest.raises(TaskError, match="the model returns a SimpleNamespace, in which no tensor is found"):
        examine_it(autocast=lambda: torch.autocast("cpu", torch.bfloat16), compute=torch.bfloat16)


def test_a_frozen_model_is_told() -> None:
    with pytest.raises(TaskError, match="no parameter of the model requires one"):
        examine(sum_loss, nn.Linear(3, 4).requires_grad_(False))


def test_a_zero_loss_is_undecided_and_says_so() -> None:
    nature = examine(lambda output, batch: (output * 0).sum())
    assert nature.kind == "sum"
    assert "could not be told from a mean, as some of these samples add nothing" in nature.because


class Noisy(nn.Module):
    """Draws random numbers in evaluation mode too."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.scale = scale

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.linear(value) + self.scale * torch.randn(1)
        return output


def test_noise_in_evaluation_mode_makes_a_sum_no_coupling() -> None:
    def summed(output: Any, batch: Any) -> Any:
        return output.square().sum() + 5.0 * len(output)

    assert examine(summed, Noisy(0.1)).kind == "sum"
    assert "add up to the whole in training mode, where what is drawn is fixed (" in examine(summed, Noisy(9.0)).because


class Denoising(nn.Module):
    """Draws a time and noise for each sample in both modes, and guesses the noise."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        time, noise = torch.rand(len(value), 1), torch.randn_like(value)
        return self.linear(torch.cat([(1 - time) * value + time * noise, time], 1)), noise


def squared(output: Any, reduction: str, power: float = 1.0) -> torch.Tensor:
    guess, noise = output
    return functional.mse_loss(guess, noise, reduction=reduction) ** power


@pytest.mark.parametrize("seed", range(1, 4))
def test_a_model_that_draws_in_its_forward_is_judged_in_training_mode(seed: int) -> None:
    def seeded(reduction: str, power: float = 1.0) -> LossNature:
        drawn = iter(range(seed, 100))

        def loss(output: Any, batch: Any) -> torch.Tensor:
            torch.manual_seed(next(drawn))
            return squared(output, reduction, power)

        return examine(loss, Denoising())

    with pytest.raises(TaskError, match=r"Given\.loss returns a mean over \w+ \(.* for 3 samples\): return the SUM"):
        seeded("mean")
    assert seeded("sum").kind == "sum"
    assert seeded("sum", power=2.0).kind == "coupled"


def test_a_model_that_cannot_take_the_parts_is_told() -> None:
    class Fixed(nn.Linear):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return super().forward(value.view(5, 3))

    with pytest.raises(TaskError, match=r"(?s)fails on a batch of 2 samples, though 5 work.*value\.view\(5, 3\)"):
        examine(sum_loss, Fixed(3, 4))


class Counting(nn.Module):
    """Dropout, batch statistics, a buffer that every forward changes, and all three generators."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.part[1].eval()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.get_buffer("calls").add_(1)
        random.random()
        numpy.random.rand()
        torch.rand(1)
        output: torch.Tensor = self.part(value)
        return output


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_disturbed(fails: bool) -> None:
    module = Counting()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    modes = [part.training for part in module.modules()]

    def draw() -> tuple[Any, ...]:
        return random.random(), float(numpy.random.rand()), float(torch.rand(1))

    def loss(output: Any, batch: Any) -> Any:
        return output.mean() if fails else sum_loss(output, batch)

    states = random.getstate(), numpy.random.get_state()
    torch.manual_seed(0)
    expected = draw()
    random.setstate(states[0])
    numpy.random.set_state(states[1])
    if fails:
        with pytest.raises(TaskError, match="mean"):
            examine(loss, module)
    else:
        assert examine(loss, module).kind == "sum"
    assert draw() == expected
    assert [part.training for part in module.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())


class OnlyInTraining(nn.Module):
    """Does something with its hidden values while it trains, and nothing else."""

    def __init__(self, does: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 6), nn.Linear(6, 4)
        self.does = does

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        hidden = self.first(value)
        found: torch.Tensor = self.last(self.does(hidden) if self.training else hidden)
        return found


def mixed_up(x: torch.Tensor) -> torch.Tensor:
    """By a share and a permutation that are drawn."""
    share = torch.distributions.Beta(torch.tensor(2.0), torch.tensor(2.0)).sample()
    return share * x + (1 - share) * x[torch.randperm(len(x))]


@pytest.mark.parametrize(
    "does",
    [
        lambda x: x - x.mean(0),
        lambda x: (x - x.mean(0)) / (x.var(0) + 1e-5).sqrt(),
        lambda x: x + x.std(0).mean(),
        lambda x: functional.dropout(x, 0.5) - x.mean(0),
        lambda x: 0.7 * x + 0.3 * x.roll(1, 0),
        mixed_up,
    ],
)
def test_a_coupling_in_training_mode_alone_is_reported(does: Callable[[torch.Tensor], torch.Tensor]) -> None:
    nature = examine(sum_loss, OnlyInTraining(does))
    assert nature.kind == "coupled"
    assert nature.because.startswith("in training mode the parts of a batch do not add up to the whole (")
    assert ": its samples are coupled, or something is added to every batch" in nature.because
    assert examine(sum_loss, OnlyInTraining(does).eval()).kind == "sum"
    assert examine(sum_loss, OnlyInTraining(does), coupled=True).because == "Given says so (coupled = True)"


class Attending(nn.Module):
    """Attention that drops, over three positions."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.last = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True), nn.Linear(12, 4)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        x = value.unsqueeze(-1).expand(-1, -1, 4)
        scored = functional.scaled_dot_product_attention(x, x, x, None, 0.5 if self.training else 0.0)
        found: torch.Tensor = self.last((self.attention(x, x, x)[0] + scored).flatten(1))
        return found


class Recurrent(nn.Module):
    """Drops between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.last = nn.GRU(3, 4, num_layers=2, dropout=0.5), nn.Linear(4, 4)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.layers(value.unsqueeze(0))[0][0])
        return found


def dropped_path(x: torch.Tensor) -> torch.Tensor:
    return x * x.new_empty(len(x), 1).bernoulli_(0.8) / 0.8


@pytest.mark.parametrize(
    "module",
    [
        lambda: nn.Sequential(nn.Linear(3, 6), nn.Dropout(0.5), nn.AlphaDropout(0.5), nn.RReLU(), nn.Linear(6, 4)),
        lambda: nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 4)),
        lambda: nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6, track_running_stats=False), nn.Linear(6, 4)),
        lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4))),
        lambda: OnlyInTraining(lambda x: functional.dropout(x, 0.5)),
        lambda: OnlyInTraining(dropped_path),
        lambda: OnlyInTraining(lambda x: x + torch.randn_like(x)),
        lambda: OnlyInTraining(lambda x: x * (torch.rand(len(x), 1) < 0.5)),
        Attending,
        Recurrent,
    ],
)
def test_what_draws_or_is_declared_is_not_accused(module: Callable[[], nn.Module]) -> None:
    nature = examine(sum_loss, module())
    assert nature.kind == "sum"
    assert nature.because.startswith("the parts of a batch add up to the whole (")
    assert nature.because.endswith("for 3 samples)")


class Contrasting(nn.Module):
    """Compares each sample with negatives of a vocabulary, in training."""

    def __init__(self, draw: Callable[[int], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.table = nn.Linear(3, 6), nn.Linear(6, 4), nn.Embedding(40, 6)
        self.draw = draw

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        hidden = self.first(value)
        if self.training:
            negatives = self.table(self.draw(2 * len(value)).view(len(value), 2))
            hidden = hidden + (negatives * hidden[:, None]).sum(1)
        found: torch.Tensor = self.last(hidden)
        return found


CHOOSES = (
    "of training mode it is not known, as the loss depends on what is chosen there, by a permutation or by weights"
)


@pytest.mark.parametrize(
    ("draw", "says"),
    [
        (lambda n: torch.multinomial(torch.ones(40), n, replacement=True), "samples)"),
        (lambda n: torch.multinomial(torch.ones(40), n), CHOOSES),
        (lambda n: torch.randperm(40)[:n], CHOOSES),
        (lambda n: torch.randperm(40)[:2].repeat(n // 2), "samples)"),
    ],
)
def test_negatives_of_a_table_are_no_coupling(draw: Callable[[int], torch.Tensor], says: str) -> None:
    nature = examine(sum_loss, Contrasting(draw))
    assert nature.kind == "sum"
    assert nature.because.endswith(says)


@pytest.mark.parametrize(
    "does",
    [
        lambda x: 0.7 * x + 0.3 * x.repeat(2, 1)[torch.randperm(2 * len(x))][: len(x)],
        lambda x: x + x[torch.multinomial(torch.ones(len(x)), len(x))],
        lambda x: x - x.mean(0) + 0 * torch.randperm(40).sum(),
    ],
)
def test_a_choice_among_samples_or_of_no_weight_hides_no_coupling(does: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert examine(sum_loss, OnlyInTraining(does)).kind == "coupled"


def failing(x: torch.Tensor) -> torch.Tensor:
    raise ValueError(len(x))


@pytest.mark.parametrize(
    ("does", "why"),
    [
        (lambda x: x * numpy.random.rand(), "as random numbers are drawn there by other means than torch's functions"),
        (lambda x: (x - x.mean(0)) * random.random(), "as random numbers are drawn there by other means"),
        (lambda x: x / (len(x) != 2), "as the loss of so few samples is not finite there"),
        (failing, r"as it fails there (ValueError)"),
    ],
)
def test_what_cannot_be_told_in_training_mode_is_said(does: Callable[[torch.Tensor], torch.Tensor], why: str) -> None:
    nature = examine(sum_loss, OnlyInTraining(does))
    assert nature.kind == "sum"
    assert "add up to the whole" in nature.because
    assert f"; of training mode it is not known, {why}" in nature.because


def no_memory(x: torch.Tensor) -> torch.Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_failure_in_training_mode_is_raised_where_other_ranks_wait() -> None:
    module = OnlyInTraining(failing)
    Given.given, Given.coupled = staticmethod(sum_loss), False
    some = samples(NUM_SAMPLES)
    count = resolve_targets(Given(), Given().collate(some)).call
    given: dict[str, Any] = {"inputs": lambda batch: (batch[0],), "targets": count}
    with pytest.raises(ValueError, match="5"):
        examine_loss(Given(), module, some, **given, collective=True)
    assert examine_loss(Given(), module, some, **given, call=lambda batch: None).kind == "elsewhere"
    with pytest.raises(torch.OutOfMemoryError):
        examine(sum_loss, OnlyInTraining(no_memory))


def test_attributes_that_training_changes_are_as_before() -> None:
    module: Any = OnlyInTraining(lambda x: x * (count() / 5))
    module.calls, module.seen = 0, []

    def count() -> int:
        module.calls += 1
        module.seen.append(module.calls)
        return int(module.calls)

    assert examine(sum_loss, module).kind == "sum"
    assert (module.calls, module.seen, module.training) == (0, [], True)


class Remembering(nn.Module):
    """Keeps what it has seen, in either mode, in a bank of rows and in a centre that it moves in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.bank, self.centre = nn.Linear(3, 4), deque[torch.Tensor](maxlen=9), torch.zeros(3)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.bank.extend(value)
        self.centre += value.sum(0)
        found: torch.Tensor = self.linear(value)
        return found


def test_what_forward_and_loss_remember_is_as_before() -> None:
    def loss(output: Any, batch: Any) -> Any:
        task.seen.append(len(output))
        task.centre += output.detach().mean()
        return sum_loss(output, batch)

    module = Remembering()
    task: Any = Given()
    Given.given, Given.coupled = staticmethod(loss), False
    task.seen, task.centre, some = [], torch.zeros(()), samples(NUM_SAMPLES)
    count = resolve_targets(task, task.collate(some)).call
    examine_loss(task, module, some, inputs=lambda batch: (batch[0],), targets=count)
    assert (len(module.bank), module.centre.tolist()) == (0, [0, 0, 0])
    assert (task.seen, task.centre.item()) == ([], 0)


def test_what_is_too_large_to_be_put_back_is_named() -> None:
    module = Remembering()
    with patch.object(kept_state, "MOST_BYTES", 8):
        nature = examine(sum_loss, module)
    assert nature.because.endswith(
        "; centre changes there and is too large to be put back: the run begins with it as these samples have left it"
    )
    assert module.centre.any() and not module.bank
