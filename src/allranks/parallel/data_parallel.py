"""layout=data_parallel: nn.DataParallel, one process that drives all GPUs of a machine by threads.

In each forward it copies the module from the first GPU to the others, splits every tensor of the arguments along dim 0,
and gathers the outputs on the first GPU, where the loss is computed. It is here because scripts have it; `ddp` does the
same work without the copies, with one process a GPU. Source:
https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import nn
from torch.utils import _pytree as pytree

from allranks.errors import LayoutError
from allranks.parallel.balance import find_routers
from allranks.parallel.batchnorm import has_batch_statistics
from allranks.verdict import Decision

FIRST = torch.device("cuda", 0)


@final
class Copies(nn.DataParallel[nn.Module]):
    """nn.DataParallel whose threads compute in the type in which it was called.

    Autocast's type is each thread's own, and torch tells its threads whether there is one, not which (`_worker` in
    parallel_apply.py): they would take float16, in which small gradients vanish without a scale.
    """

    def parallel_apply(self, replicas: Sequence[Any], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        """Run the copies, each in a thread."""
        if torch.is_autocast_enabled(FIRST.type):
            dtype = torch.get_autocast_dtype(FIRST.type)
            replicas = [partial(_run_in, dtype, replica) for replica in replicas]
        found: list[Any] = super().parallel_apply(replicas, inputs, kwargs)
        return found


def _run_in(dtype: torch.dtype, replica: Callable[..., object], *inputs: object, **kwargs: object) -> object:
    with torch.autocast(FIRST.type, dtype):
        return replica(*inputs, **kwargs)


def split_over_devices(
    modules: Mapping[str, nn.Module], num_devices: int, decisions: list[Decision], home: torch.device = FIRST
) -> dict[str, nn.Module]:
    """The modules under nn.DataParallel, each as `.module` of what is called; what that means goes to `decisions`.

    Args:
        num_devices: GPUs that this process sees.
        home: where the modules are.

    Raises:
        LayoutError: the modules are not where nn.DataParallel takes them; or each device would take batch statistics
            of its own samples, or run a forward of the first one's, whose tokens would balance all experts.
    """
    if num_devices and home.type == "cpu":
        raise LayoutError(
            f"data_parallel takes the {num_devices} GPU(s) of this machine, and the device is cpu: use --layout "
            "single, or hide them with CUDA_VISIBLE_DEVICES="
        )
    if num_devices > 1:
        _check_forwards(modules)
    if num_devices > 1 and has_batch_statistics(modules):
        raise LayoutError(
            f"under data_parallel BatchNorm sees each GPU's own samples only, and keeps those of the first of "
            f"{num_devices}: use --layout ddp, or --layout single for one GPU"
        )
    if num_devices > 1 and any(find_routers(module) for module in modules.values()):
        raise LayoutError(
            f"under data_parallel the routers of experts count the tokens of the first of {num_devices} GPUs alone: "
            "use --layout ddp, or --layout single for one GPU"
        )
    called: dict[str, nn.Module] = {which: Copies(module) for which, module in modules.items()}
    if num_devices > 1:
        what = f"each forward copies the model to {num_devices} GPUs, splits the batch, gathers outputs on the first"
        decisions.append(Decision(what, "layout=data_parallel; ddp spares the copies, with one process a GPU"))
        return called
    here = "there is no GPU" if num_devices == 0 else "there is one GPU"
    why = f"{here}, and it splits over GPUs; see --layout ddp"
    decisions.append(Decision("data_parallel changes nothing here", why))
    return called


def _check_forwards(modules: Mapping[str, nn.Module]) -> None:
    """A copy has its module's attributes: a forward among them computes with the module, not with the copy."""
    for module in modules.values():
        for name, member in module.named_modules():
            if "forward" in vars(member):
                raise LayoutError(
                    f"under data_parallel the copies of {name or 'the model'} would run the first GPU's forward, "
                    "which recompute, offload and compile give a block: leave them out, or use --layout ddp"
                )


def describe_gathering(output: object, num_samples: int, num_devices: int) -> Decision:
    """What gathering the outputs costs the first device, from those of `num_samples` samples."""
    num_bytes = sum(leaf.nbytes for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor))
    where = "on the first GPU" if num_devices else "on the first device, where there are several"
    what = f"the outputs of a sample take {num_bytes / num_samples:,.0f} B {where}"
    return Decision(what, "data_parallel gathers those of the whole batch there, and computes the loss on them alone")
