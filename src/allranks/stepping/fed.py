"""What a micro-step was fed, said with the error that it meets: which samples, and which of them asks a table for a row
that it does not have.

An index out of range is the commonest error of data and vocabulary that do not fit; torch says neither the index nor
whose it is. On CUDA it says nothing in the place where it happens, and no more is found here.
"""

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
import torch.nn.functional as F

from allranks.data.micro_step import MicroStep
from allranks.errors import AllranksError

SHOWN = 8
"""Sample numbers that are shown of a micro-step."""


@contextmanager
def fed(micro_step: MicroStep) -> Iterator[None]:
    """Around what is computed of a micro-step: an error of the user's code passes through, with a note."""
    try:
        yield
    except AllranksError:
        raise
    except Exception as error:
        samples = [int(sample) for sample in micro_step.samples]
        if samples:
            first, last = int(micro_step.positions[0]), int(micro_step.positions[-1])
            more = f" and {len(samples) - SHOWN} more" if len(samples) > SHOWN else ""
            shown = ", ".join(map(str, samples[:SHOWN]))
            error.add_note(f"allranks: in a forward of samples {shown}{more} (positions {first} to {last})")
        with suppress(Exception):  # under a transformation of torch a tensor may have no values
            if found := find_row(error, samples):
                error.add_note(f"allranks: {found}")
        raise


def find_row(error: Exception, samples: Sequence[int]) -> str:
    """Which row of which table an IndexError of an embedding is about, and whose it is, in words; "" where that is not
    to be seen.

    Args:
        samples: of the rows of a batch, where it has as many.
    """
    if not isinstance(error, IndexError):
        return ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code is not F.embedding.__code__:
            continue
        indices, weight = frame.f_locals.get("input"), frame.f_locals.get("weight")
        if not isinstance(indices, torch.Tensor) or not isinstance(weight, torch.Tensor):
            return ""
        wrong = ((indices < 0) | (indices >= weight.shape[0])).nonzero()
        if not len(wrong):
            return ""
        place = tuple(wrong[0].tolist())
        named = place and indices.shape[0] == len(samples)
        whose = f"sample {samples[place[0]]}" if named else "one of them"
        return f"{whose} asks for row {int(indices[place])} of an embedding that has rows 0 to {weight.shape[0] - 1}"
    return ""
