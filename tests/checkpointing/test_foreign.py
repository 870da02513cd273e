"""Files of other programs: tensors come in, code does not."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from allranks.checkpointing.foreign import read_foreign
from allranks.errors import CheckpointError

MODEL = {"0.weight": torch.arange(6.0).reshape(2, 3), "0.bias": torch.ones(2)}


def saved(path: Path, value: Any) -> Path:
    torch.save(value, path)
    return path


def same(found: dict[str, torch.Tensor]) -> bool:
    return found.keys() == MODEL.keys() and all(torch.equal(found[name], MODEL[name]) for name in MODEL)


@pytest.mark.parametrize("suffix", ["pt", "pth", "bin", "ckpt"])
def test_a_state_dict_is_taken_as_it_is(tmp_path: Path, suffix: str) -> None:
    found, said = read_foreign(saved(tmp_path / f"a.{suffix}", MODEL))
    assert same(found) and said == ()
    save_file(MODEL, tmp_path / "a.safetensors")
    assert same(read_foreign(tmp_path / "a.safetensors")[0])


@pytest.mark.parametrize(
    ("wrap", "key", "words"),
    [
        (lambda m: {"model": m, "epoch": 3}, None, ("taken from the file's key 'model'",)),
        (lambda m: {"model_state_dict": m, "lr": 0.1}, None, ("taken from the file's key 'model_state_dict'",)),
        (lambda m: {"net": {"g": m, "d": {}}}, "net.g", ()),
        (lambda m: {f"module.{name}": t for name, t in m.items()}, None, ("'module.' is left out before every name",)),
        (
            lambda m: {f"_orig_mod.module.{name}": t for name, t in m.items()},
            None,
            ("'_orig_mod.' is left out before every name", "'module.' is left out before every name"),
        ),
    ],
)
def test_where_the_model_is_in_a_file_is_found_or_named(
    tmp_path: Path, wrap: Any, key: str | None, words: tuple[str, ...]
) -> None:
    found, said = read_foreign(saved(tmp_path / "a.pt", wrap(MODEL)), key)
    assert same(found) and sorted(said) == sorted(words)


def test_a_name_that_only_some_have_is_no_wrapper(tmp_path: Path) -> None:
    mixed = {"module.weight": torch.ones(1), "head": torch.ones(1)}
    assert read_foreign(saved(tmp_path / "a.pt", mixed))[0].keys() == mixed.keys()


class Bomb:
    """Unpickling it makes a folder."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("zipped", [True, False])
def test_no_code_is_run(tmp_path: Path, zipped: bool) -> None:
    path, mark = tmp_path / "a.pt", tmp_path / "ran"
    torch.save({"model": MODEL, "extra": Bomb(mark)}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match="holds more than tensors and plain values, and allranks runs no code"):
        read_foreign(path)
    assert not mark.exists()


def test_a_whole_module_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"runs no code that comes in a file; save it again .*state_dict\(\)"):
        read_foreign(saved(tmp_path / "a.pt", torch.nn.Linear(2, 2)))


def test_what_is_wrong_with_a_file_is_one_line(tmp_path: Path) -> None:
    whole = saved(tmp_path / "a.pt", MODEL)
    half, empty = tmp_path / "half.pt", tmp_path / "empty.pt"
    half.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    empty.write_bytes(b"")
    (tmp_path / "bad.safetensors").write_bytes(b"\x00" * 16)
    cases: list[tuple[Path, str | None, str]] = [
        (tmp_path / "none.pt", None, "No such file"),
        (half, None, "cannot be read"),
        (empty, None, "cannot be read"),
        (tmp_path / "bad.safetensors", None, "cannot be read"),
        (tmp_path / "a.onnx", None, "files that can be imported end in .pt"),
        (whole, "model", "there is no 'model' in it; at its top it has the keys 0.weight, 0.bias"),
        (saved(tmp_path / "l.pt", [1]), None, "it is no dict of tensors but has a list; name the key with --key"),
        (saved(tmp_path / "d.pt", {"a": {"b": 1}}), "a", "its 'a' is no dict of tensors but has the keys b"),
        (saved(tmp_path / "e.pt", {}), None, "is no dict of tensors"),
    ]
    for path, key, words in cases:
        with pytest.raises(CheckpointError) as told:
            read_foreign(path, key)
        assert words in str(told.value) and "\n" not in str(told.value), path


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own, of its quantized tensors
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: torch.ones(2).to_sparse(), "torch.sparse_coo"),
        (lambda: torch.ones(2, device="meta"), "without values"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "quantized"),
    ],
)
def test_what_is_no_plain_tensor_is_named(tmp_path: Path, make: Callable[[], torch.Tensor], said: str) -> None:
    torch.save({"weight": torch.ones(2), "scale": make()}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=f"scale is {said}, and a checkpoint holds plain tensors"):
        read_foreign(tmp_path / "a.pt")
