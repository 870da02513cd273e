"""`train.precision=float8` as a GPU computes it: torchao multiplies in eight bits, and lowers what autocast would.

On a processor torchao emulates the products by others in float32, which hold other tensors, and it asks for the
autocast of CUDA alone. Here the products have torch's kernels for shapes, and the processor's autocast stands for
CUDA's.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from allranks.parallel import float8
from allranks.rehearsing.world import replaced


@contextmanager
def multiplying_in_eight_bits() -> Iterator[None]:
    """Inside, linear layers that are lowered run as on a GPU."""
    enabled = torch.is_autocast_enabled

    def is_enabled(device_type: str = "cuda") -> bool:
        return enabled("cpu" if device_type == "cuda" else device_type)

    with ExitStack() as stack:
        stack.enter_context(replaced(float8, "emulates", lambda device: False))
        stack.enter_context(replaced(torch, "is_autocast_enabled", is_enabled))
        stack.enter_context(replaced(torch, "get_autocast_gpu_dtype", lambda: torch.get_autocast_dtype("cpu")))
        yield
