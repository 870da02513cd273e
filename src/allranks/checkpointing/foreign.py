"""Tensors from files that other programs wrote: safetensors, and torch's own format read without running code.

`torch.load(weights_only=True)` builds tensors and plain containers and refuses all else; there is no other way in here.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from allranks.errors import CheckpointError
from allranks.ordinary_file import open_ordinary

SUFFIXES: Final = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
KEYS: Final = ("model", "state_dict", "model_state_dict", "module")
"""Under which of its keys a file's dict usually has the model."""

WRAPPERS: Final = ("module.", "_orig_mod.")
"""What DistributedDataParallel and torch.compile put before every name."""


def read_foreign(path: Path, key: str | None = None) -> tuple[dict[str, torch.Tensor], tuple[str, ...]]:
    """The model's tensors in a file by name, on the CPU, and what was done to find them, in words.

    Args:
        key: under which the file's dict has them, `a.b` for a dict in a dict; None: found where it is the file itself
            or one of KEYS.

    Raises:
        CheckpointError: it cannot be read, holds more than tensors and plain values, or no tensors where these should
            be.
    """
    if path.suffix not in SUFFIXES:
        raise CheckpointError(f"'{path}': files that can be imported end in {', '.join(SUFFIXES)}")
    try:
        os.close(open_ordinary(path)[0])
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from None
    found = _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)
    said: list[str] = []
    if key is None and not _is_model(found):
        key = next((name for name in KEYS if isinstance(found, Mapping) and _is_model(found.get(name))), None)
        said += [] if key is None else [f"taken from the file's key '{key}'"]
    for part in key.split(".") if key is not None else ():
        if not isinstance(found, Mapping) or part not in found:
            raise CheckpointError(f"{path}: there is no '{key}' in it; at its top it has {_name(found)}")
        found = found[part]
    if not _is_model(found):
        where = f"its '{key}'" if key is not None else "it"
        raise CheckpointError(f"{path}: {where} is no dict of tensors but has {_name(found)}; name the key with --key")
    model: dict[str, torch.Tensor] = dict(found)
    for wrapper in (*WRAPPERS, *WRAPPERS):  # one may be inside the other
        if model and all(name.startswith(wrapper) for name in model):
            model = {name.removeprefix(wrapper): tensor for name, tensor in model.items()}
            said.append(f"'{wrapper}' is left out before every name")
    for name, tensor in model.items():
        if tensor.is_quantized or tensor.is_meta or tensor.layout is not torch.strided:
            kind = "quantized" if tensor.is_quantized else "without values" if tensor.is_meta else str(tensor.layout)
            raise CheckpointError(f"{path}: {name} is {kind}, and a checkpoint holds plain tensors: save it as one")
    return model, tuple(said)


def _read_torch(path: Path) -> Any:
    return _reading(path, lambda: torch.load(path, map_location="cpu", weights_only=True))


def _read_safetensors(path: Path) -> Any:
    from safetensors.torch import load_file

    return _reading(path, lambda: load_file(path))


def _reading(path: Path, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except Exception as error:  # of many classes, torch's among them
        text = " ".join(str(error).split())
        if "weights_only" in text or "WeightsUnpickler" in text or "Unsupported" in text:
            more = "it holds more than tensors and plain values, and allranks runs no code that comes in a file"
            remedy = "save it again where you trust it, by torch.save(model.state_dict(), ...)"
            raise CheckpointError(f"{path}: {more}; {remedy}") from error
        raise CheckpointError(
            f"{path} cannot be read ({type(error).__name__}: {text[:200]}): it is damaged, or its name's ending is not "
            "that of what it holds; tensors come from torch.save() or safetensors"
        ) from error


def _is_model(value: object) -> bool:
    """Whether it is a dict of names to tensors, and not an empty one."""
    if not isinstance(value, Mapping) or not value:
        return False
    return all(isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in value.items())


def _name(value: object) -> str:
    if not isinstance(value, Mapping):
        return f"a {type(value).__name__}"
    names = [str(name) for name in list(value)[:8]]
    return f"the keys {', '.join(names)}" + (", ..." if len(value) > len(names) else "")
