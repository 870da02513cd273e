"""What the recorder sees of a few kernels."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional

from allranks.profiling.fakes import fake_mode
from allranks.profiling.recorder import Recorder
from allranks.profiling.recording import Recording

ROWS, WIDTH = 3, 4
WEIGHT_BYTES, ACTIVATION_BYTES = WIDTH * WIDTH * 4, ROWS * WIDTH * 4


class Net(nn.Module):
    """A layer, and what `then` does with its output."""

    scale: torch.Tensor

    def __init__(self, then: Callable[["Net", torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("scale", torch.ones(ROWS, WIDTH))
        self.then = then

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.then(self, self.layer(x))


def watch(
    then: Callable[[Net, torch.Tensor], torch.Tensor], lower: AbstractContextManager[object] | None = None
) -> Recording:
    """The recording on fake tensors; real ones give the same calls."""
    found = []
    for mode in (fake_mode(), nullcontext()):
        with mode:
            net, x = Net(then), torch.ones(ROWS, WIDTH)
            recorder = Recorder({"": net}, {"layer.weight": net.layer.weight}, [net.scale])
            with recorder.recording() as recording:
                with nullcontext() if lower is None else lower:
                    output = net(x)
                output.sum().backward()
        found.append(recording)
    seen = [[(c.op, c.modules, c.backward, c.saved_bytes, c.flops, c.moved_bytes) for c in r.calls] for r in found]
    assert seen[0] == seen[1]
    assert found[0].peak_bytes() == found[1].peak_bytes()
    return found[0]


def saved(recording: Recording) -> dict[str, int]:
    return {call.op: call.saved_bytes for call in recording.calls if call.saved_bytes}


def test_a_product_keeps_its_input() -> None:
    found = watch(lambda net, x: x)
    (product,) = [call for call in found.calls if call.op == "mm" and not call.backward]
    assert product.modules == ("", "layer")
    assert product.parameters == ("layer.weight",)
    assert (product.saved_bytes, product.flops) == (ACTIVATION_BYTES, 2 * ROWS * WIDTH * WIDTH)
    assert product.moved_bytes == 2 * ACTIVATION_BYTES  # the input and the output; parameters aside
    assert found.saved_bytes == ACTIVATION_BYTES
    assert found.backward_flops() == 2 * ROWS * WIDTH * WIDTH


def test_an_input_counts_where_it_is_read_and_an_output_where_it_is_made() -> None:
    assert saved(watch(lambda net, x: torch.sin(x))) == {"mm": ACTIVATION_BYTES, "sin": ACTIVATION_BYTES}
    assert saved(watch(lambda net, x: torch.tanh(x))) == {"mm": ACTIVATION_BYTES, "tanh": ACTIVATION_BYTES}


def test_what_is_kept_twice_and_views_of_it_count_once() -> None:
    found = watch(lambda net, x: torch.sin(x) + torch.cos(x) + x.view(-1).square().view(ROWS, WIDTH))
    assert found.saved_bytes == 2 * ACTIVATION_BYTES  # x of the model, and the layer's output


def test_buffers_and_parameters_are_no_activations() -> None:
    assert watch(lambda net, x: x * net.scale).saved_bytes == ACTIVATION_BYTES
    (added,) = [c for c in watch(lambda net, x: x + net.scale).calls if c.op == "add"]
    assert [(read.is_buffer, read.wants) for read in added.inputs] == [(False, True), (True, False)]


def test_a_copy_of_a_weight_in_a_lower_precision_is_no_activation() -> None:
    found = watch(lambda net, x: net.layer(x), torch.autocast("cpu", torch.bfloat16))
    assert found.weight_copy_bytes == WEIGHT_BYTES / 2
    assert found.saved_bytes == 2 * ACTIVATION_BYTES / 2
    assert all(call.saved_bytes == 0 for call in found.calls if call.from_parameters)
    assert watch(lambda net, x: net.layer(x)).weight_copy_bytes == 0


def test_a_part_without_gradients_keeps_nothing() -> None:
    def then(net: Net, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            aside = torch.sin(net.layer(x))
        return x + aside

    assert watch(then).saved_bytes == ACTIVATION_BYTES


def test_inference_mode_is_taken_apart() -> None:
    def then(net: Net, x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            aside = functional.linear(x.detach(), net.layer.weight.detach())
        return x + float(aside.shape[0])

    found = watch(then)
    assert sum(call.flops for call in found.calls if not call.backward) == 2 * 2 * ROWS * WIDTH * WIDTH


def test_what_was_there_before_is_told_from_what_the_step_made() -> None:
    found = watch(lambda net, x: torch.sin(x))
    kept = {call.op: (call.saved_bytes, call.given_bytes) for call in found.calls if call.saved_bytes}
    assert kept == {"mm": (ACTIVATION_BYTES, ACTIVATION_BYTES), "sin": (ACTIVATION_BYTES, 0)}
    assert [at for *_, at in found.events] == sorted(at for *_, at in found.events)


def test_the_peak_holds_what_is_alive_at_once() -> None:
    # The input of the model was there before; the layer's output and the sine's are alive together.
    assert watch(lambda net, x: torch.sin(x)).peak_bytes() >= 2 * ACTIVATION_BYTES
    small, large = (
        watch(lambda net, x, again=again: again(x)).peak_bytes()  # type: ignore[misc]
        for again in (torch.relu, lambda x: torch.cat([torch.sin(x)] * 8).sum(0, keepdim=True) + x)
    )
    assert large >= small + 7 * ACTIVATION_BYTES


def test_the_module_that_raised_is_the_last_that_ran() -> None:
    def then(net: Net, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no")

    net = Net(then)
    recorder = Recorder({"": nn.Sequential(net)}, {})
    with pytest.raises(ValueError, match="no"), recorder.recording():
        net(torch.ones(ROWS, WIDTH))
    assert recorder.running == "0"
