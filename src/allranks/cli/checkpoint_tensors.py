"""What of `allranks checkpoint` needs torch: the digest of every tensor, and a model as one file."""

import difflib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from allranks.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    import torch

    from allranks.checkpointing.checkpoint import Checkpoint


def check_everything(checkpoint: "Checkpoint") -> None:
    """Read every byte, compare the digests of files, then of tensors. Raises CheckpointError for the first damage."""
    from allranks.checkpointing.checking import check_files
    from allranks.checkpointing.checkpoint import verify_files

    verify_files(checkpoint)
    check_files(checkpoint)


def export_model(checkpoint: "Checkpoint", out: Path, *, ema: bool = False, only: Sequence[str] = ()) -> list[str]:
    """Write the model's tensors to one safetensors file, whole or not at all; returns their names.

    With `ema` parameters are the averages that were kept of them. With `only` no more is written than what these globs
    name ("*.up.weight").

    A tied tensor is written under each of its names, so that `load_state_dict` takes the file as it is.

    Raises:
        CheckpointError: the checkpoint is damaged, or holds no model or no averages.
        ConfigError: the file cannot be written, a glob names no tensor, or safetensors does not know a tensor's type.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    from allranks.checkpointing.restore import read_model_values
    from allranks.durable import replacing

    tensors = read_model_values(checkpoint, ema=ema)
    if not tensors:
        raise CheckpointError(f"{checkpoint.path} holds no tensor of a model: there is nothing to export")
    for pattern in only:
        if not any(fnmatchcase(name, pattern) for name in tensors):
            near = difflib.get_close_matches(pattern, tensors, n=3, cutoff=0)
            raise ConfigError(f"--only '{pattern}' names no tensor of the model; it has {', '.join(near)}")
    if only:
        tensors = {name: value for name, value in tensors.items() if any(fnmatchcase(name, glob) for glob in only)}
    _check_types(tensors)
    aliases = {alias.removeprefix("model.") for alias in checkpoint.manifest.aliases}
    apart = {name: tensor.clone() if name in aliases else tensor for name, tensor in tensors.items()}
    try:
        with replacing(out) as temporary:
            save_file(apart, temporary, metadata={"format": "pt"})
    except (OSError, SafetensorError, ValueError) as error:
        raise ConfigError(f"'{out}' cannot be written: {error}; name another file") from None
    return list(apart)


def _check_types(tensors: "Mapping[str, torch.Tensor]") -> None:
    """See that safetensors has a name for every tensor's type. Raises ConfigError: for one it has none."""
    import torch
    from safetensors.torch import save

    for dtype in {tensor.dtype: None for tensor in tensors.values()}:
        try:
            save({"none": torch.empty(0, dtype=dtype)})
        except Exception:  # KeyError of some versions: which types it knows it does not tell
            of_type = [name for name, tensor in tensors.items() if tensor.dtype is dtype]
            more = f" (and {len(of_type) - 1} more)" if len(of_type) > 1 else ""
            raise ConfigError(
                f"'{of_type[0]}'{more} is {str(dtype).removeprefix('torch.')}, which a safetensors file cannot hold; "
                "name with --only what is to be exported without it"
            ) from None
