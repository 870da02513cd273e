"""Which linear layers multiply in float8, and what is refused; tests/distributed/test_float8_laws.py has the law."""

import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from allranks.errors import ConfigError, TaskError
from allranks.models.moe import MoETransformer
from allranks.models.transformer import Transformer
from allranks.parallel.float8 import lower_linears
from allranks.verdict import Decision

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class Lowered(nn.Linear):
    """Stands for torchao's layer."""

    def __init__(self, original: nn.Linear, emulate: bool) -> None:
        super().__init__(1, 1)
        self.weight, self.bias, self.emulate = original.weight, original.bias, emulate


def convert(module: nn.Module, *, module_filter_fn: Any, config: Any) -> nn.Module:
    """Stands for torchao.float8.convert_to_float8_training, with its contract."""
    if isinstance(module, nn.Linear):
        return Lowered(module, config.emulate) if module_filter_fn(module, "") else module
    for owner_name, owner in list(module.named_modules()):
        for name, part in list(owner.named_children()):
            if isinstance(part, nn.Linear) and module_filter_fn(part, f"{owner_name}.{name}"):
                setattr(owner, name, Lowered(part, config.emulate))
    return module


STAND_IN: Any = SimpleNamespace(
    Float8LinearConfig=lambda emulate, pad_inner_dim: SimpleNamespace(emulate=emulate),
    convert_to_float8_training=convert,
)


def lower(module: nn.Module, *hints: str, device: torch.device = CPU) -> tuple[nn.Module, list[str], list[str]]:
    """The module, which layers were lowered, and what was said; by the stand-in."""
    decisions: list[Decision] = []
    with patch.dict(sys.modules, {"torchao": STAND_IN, "torchao.float8": STAND_IN}):
        found = lower_linears({"": module}, hints, device, decisions)[""]
    return found, [name for name, part in found.named_modules() if isinstance(part, Lowered)], list(map(str, decisions))


def test_layers_inside_of_blocks_are_lowered() -> None:
    model = Transformer(16, 2, 32, 2, ffn=48, max_seq=8)
    parameters = {name: id(parameter) for name, parameter in model.named_parameters()}
    found, lowered, said = lower(model)
    names = ["attention.query", "attention.key", "attention.value", "attention.out", "feed_forward.gate"]
    assert found is model and {name.partition(".")[0] for name in lowered} == {"layers"}, "the head stays as it is"
    assert len(lowered) == 14 and all(any(name.endswith(part.split(".")[-1]) for name in lowered) for part in names)
    assert {name: id(parameter) for name, parameter in found.named_parameters()} == parameters
    assert said == [
        "14 linear layers inside of the model's blocks multiply in float8, emulated in float32 since the device is the "
        "CPU, because train.precision=float8, all else as under bfloat16"
    ]


def test_widths_that_16_does_not_divide_stay() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 40), nn.GELU(), nn.Linear(40, 5))
    _, lowered, said = lower(model)
    assert lowered == ["0"]
    assert said[0].endswith("; 2 of widths that 16 does not divide stay in bfloat16: 2 ...")
    assert "of the model, in which nothing repeats multiply" in said[0]


def test_what_is_no_plain_layer_stays() -> None:
    class Own(nn.Linear):
        pass

    hooked, changed = nn.Linear(16, 16), nn.Linear(16, 16)
    hooked.register_forward_hook(lambda *_: None)
    changed.forward = lambda input: input  # type: ignore[method-assign]
    parts = {"own": Own(16, 16), "hooked": hooked, "changed": changed, "plain": nn.Linear(16, 16)}
    _, lowered, _ = lower(nn.ModuleDict(parts), "*")
    assert lowered == ["plain"]


def test_what_routes_to_experts_stays() -> None:
    model = MoETransformer(16, 2, 32, 2, num_experts=16, top_k=2, ffn=16, max_seq=8)
    scores = [name for name, part in model.named_modules() if name.endswith("score")]
    _, lowered, _ = lower(model)
    assert len(scores) == 2 and len(lowered) == 8 and not set(scores) & set(lowered)


def test_a_single_layer_is_replaced_and_hints_say_where() -> None:
    found, _, _ = lower(nn.Linear(16, 16))
    assert isinstance(found, Lowered) and found.emulate
    model = nn.ModuleDict({"one": nn.Sequential(nn.Linear(16, 16)), "two": nn.Sequential(nn.Linear(16, 16))})
    assert lower(model, "two")[1] == ["two.0"]


def test_a_model_without_a_layer_that_fits_is_refused() -> None:
    with pytest.raises(TaskError) as caught:
        lower(nn.Sequential(nn.Linear(8, 8)))
    assert str(caught.value) == (
        "train.precision=float8 finds no nn.Linear whose widths 16 divides (first '0') in the model's blocks: take "
        "train.precision=bfloat16"
    )
    with pytest.raises(TaskError, match=r"finds no nn\.Linear in the model's blocks"):
        lower(nn.Conv1d(1, 1, 1))


def test_without_torchao_the_extra_is_named() -> None:
    with patch.dict(sys.modules, {"torchao": None, "torchao.float8": None}), pytest.raises(ConfigError) as caught:
        lower_linears({"": nn.Linear(16, 16)}, (), CPU, [])
    assert str(caught.value).startswith(
        "train.precision=float8 needs torchao, which is not installed: pip install 'torchao>=0.18', or take "
        "train.precision=bfloat16 ("
    )


def test_what_torchao_warns_of_when_it_is_imported_is_not_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Libraries with kernels of other formats, which this machine cannot load. Errors are, and what it says later."""
    told = "import logging\nlog = logging.getLogger(__name__)\n"
    (tmp_path / "torchao").mkdir()
    (tmp_path / "torchao/__init__.py").write_text(f"{told}log.warning('Failed to load _C.so')\nlog.error('torn')\n")
    (tmp_path / "torchao/float8.py").write_text(f"{told}log.warning('no kernel')\n")
    with patch.dict(sys.modules):
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchao"]:
            del sys.modules[name]
        monkeypatch.syspath_prepend(tmp_path)
        with pytest.raises(AttributeError, match="Float8LinearConfig"):
            lower_linears({"": nn.Linear(16, 16)}, (), CPU, [])
    logging.getLogger("torchao").warning("later")
    assert caplog.messages == ["torn", "later"]


def test_a_gpu_has_to_know_it() -> None:
    knows = "get_device_capability"
    with patch.object(torch.cuda, knows, lambda _: (8, 0)), pytest.raises(ConfigError) as caught:
        lower(nn.Linear(16, 16), device=CUDA)
    assert str(caught.value) == (
        "train.precision=float8 needs a GPU of compute capability 8.9 (Ada, Hopper or newer), and this one has 8.0: "
        "take train.precision=bfloat16"
    )
    with patch.object(torch.cuda, knows, lambda _: (9, 0)):
        found, _, said = lower(nn.Linear(16, 16), device=CUDA)
    assert isinstance(found, Lowered) and not found.emulate and "emulated" not in said[0]


def test_torchao_itself_is_what_the_stand_in_stands_for() -> None:
    pytest.importorskip("torchao")
    model = Transformer(16, 2, 32, 2, ffn=48, max_seq=8)
    decisions: list[Decision] = []
    found = lower_linears({"": model}, (), CPU, decisions)[""]
    lowered = [name for name, part in found.named_modules() if type(part).__name__ == "Float8Linear"]
    assert lowered == lower(Transformer(16, 2, 32, 2, ffn=48, max_seq=8))[1]
    assert all(found.get_submodule(name).config.emulate for name in lowered)  # type: ignore[union-attr]


def test_any_number_of_rows_is_multiplied() -> None:
    """A gradient of weights sums over rows, which a GPU's product wants 16 to divide: 3 samples of 7 positions."""
    pytest.importorskip("torchao")
    module = nn.Sequential(nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16)), nn.Sequential(nn.Linear(16, 16)))
    lowered = lower_linears({"": module}, (), CPU, [])[""]
    configs: list[Any] = [part.config for part in lowered.modules() if hasattr(part, "config")]
    assert configs and all(config.pad_inner_dim for config in configs)
    lowered(torch.randn(3, 7, 16)).square().sum().backward()
    assert all(one.grad is not None and one.grad.isfinite().all() for one in lowered.parameters())
