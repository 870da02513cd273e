"""A model as one file that any program reads; and damage that only tensor digests see."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from allranks.checkpointing.checkpoint import Checkpoint, seal, verify_files
from allranks.checkpointing.manifest import render_manifest
from allranks.cli.checkpoint_tensors import check_everything, export_model
from allranks.errors import CheckpointError, ConfigError
from allranks.parameter_map import Box, Entry
from tests.checkpointing.worlds import Pairs, save_alone


class Tied(nn.Module):
    """Two layers that share a weight, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 4)
        self.head = nn.Linear(4, 3)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(2.0))


def entry(name: str, tensor: torch.Tensor) -> Entry:
    shape = tuple(tensor.shape)
    return Entry(name, shape, str(tensor.dtype).removeprefix("torch."), Box.whole(shape), (0,))


def save_model(directory: Path, model: nn.Module) -> Checkpoint:
    state = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
    pairs: Pairs = [(entry(f"model.{name}", value), value) for name, value in state.items()]
    pairs.append((entry("optimizer.exp_avg.scale", torch.ones(())), torch.ones(())))
    return save_alone(directory, pairs=pairs)


def test_the_exported_file_loads_into_the_model(tmp_path: Path) -> None:
    model = Tied()
    names = export_model(save_model(tmp_path, model), tmp_path / "out.safetensors")
    assert sorted(names) == ["embedding.weight", "head.bias", "head.weight", "scale"]
    fresh = Tied()
    fresh.load_state_dict(load_file(tmp_path / "out.safetensors"), strict=True)
    assert all(torch.equal(value, fresh.state_dict()[name]) for name, value in model.state_dict().items())


def test_averages_take_the_place_of_parameters(tmp_path: Path) -> None:
    model, average = Tied(), torch.randn(3, 4)
    state = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
    pairs: Pairs = [(entry(f"model.{name}", value), value) for name, value in state.items()]
    pairs.append((entry("ema.embedding.weight", average), average))
    tied = {"model.head.weight": "model.embedding.weight", "ema.head.weight": "ema.embedding.weight"}
    checkpoint = save_alone(tmp_path, pairs=pairs, aliases=tied)
    export_model(checkpoint, tmp_path / "raw.safetensors")
    export_model(checkpoint, tmp_path / "ema.safetensors", ema=True)
    raw, averaged = (load_file(tmp_path / f"{name}.safetensors") for name in ("raw", "ema"))
    assert raw.keys() == averaged.keys() == model.state_dict().keys()
    changed = {name for name, value in raw.items() if not torch.equal(value, averaged[name])}
    assert changed == {"embedding.weight", "head.weight"} and torch.equal(averaged["head.weight"], average)


def test_some_of_the_tensors_alone(tmp_path: Path) -> None:
    model = Tied()
    names = export_model(save_model(tmp_path, model), tmp_path / "out.safetensors", only=("head.*", "s?ale"))
    assert sorted(names) == ["head.bias", "head.weight", "scale"]
    kept = load_file(tmp_path / "out.safetensors")
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in kept.items()) and len(kept) == 3


def test_a_checkpoint_without_a_model_is_refused(tmp_path: Path) -> None:
    value = torch.ones(2)
    checkpoint = save_alone(tmp_path, pairs=[(entry("optimizer.x", value), value)], aliases={})
    with pytest.raises(CheckpointError, match="holds no tensor of a model"):
        export_model(checkpoint, tmp_path / "out.safetensors")


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    checkpoint = save_model(tmp_path / "checkpoints", Tied())
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        export_model(checkpoint, tmp_path / "file" / "out.safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "file"]


def test_a_type_that_the_file_cannot_hold_is_refused_by_name(tmp_path: Path) -> None:
    values = {"phase": torch.ones(2, dtype=torch.complex128), "weight": torch.ones(3), "turn": torch.ones(2) + 0j}
    pairs: Pairs = [(entry(f"model.{name}", value), value) for name, value in values.items()]
    checkpoint, out = save_alone(tmp_path / "checkpoints", pairs=pairs, aliases={}), tmp_path / "out.safetensors"
    with pytest.raises(ConfigError, match=r"^'phase' is complex128, which a safetensors file cannot hold; .*--only"):
        export_model(checkpoint, out)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]
    assert sorted(export_model(checkpoint, out, only=("weight", "turn"))) == ["turn", "weight"]
    assert load_file(out)["turn"].dtype == torch.complex64


def test_a_tensor_digest_that_differs_is_seen_although_every_file_is_good(tmp_path: Path) -> None:
    checkpoint = save_model(tmp_path, Tied())
    check_everything(checkpoint)
    record = checkpoint.manifest.tensors["model.scale"]
    other = record.model_copy(update={"digest": "0" * 16})
    tensors = {**checkpoint.manifest.tensors, "model.scale": other}
    text = render_manifest(checkpoint.manifest.model_copy(update={"tensors": tensors}))
    (checkpoint.path / "manifest.json").write_text(text)
    (checkpoint.path / "COMMITTED").write_bytes(seal(text.encode()))
    altered = Checkpoint.open(checkpoint.path)
    verify_files(altered)
    with pytest.raises(CheckpointError, match=r"model\.scale"):
        check_everything(altered)
