"""rehearsing/data/refused_types.json: types that torch's kernels for shapes take, and those of a processor refuse.

`OMP_NUM_THREADS=1 python -m tools.kernel_types` writes it, for the torch that is installed, from torch's own samples of
its operators: each operator that a sample calls, in its forward and its backward, is given other types, once for shapes
alone and once for few zeros, as a dry run does (`allranks.rehearsing.kernels`). Left out are those that end the process
on zeros, and those of which a sound sample would be refused.
"""

import contextlib
import json
import logging
import os
import sys
import types
import unittest
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, product
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from allranks.profiling.fakes import run_kernel
from allranks.rehearsing.kernels import REFUSED, Kernels, find_refusal

SAMPLES = 4
"""Of each operator of torch's list."""
CALLS = 6
"""Of one operator, of other forms, dims or types, that are given other types."""
OTHER = {torch.float32: (torch.float64, torch.bfloat16), torch.int64: (torch.int32,)}
"""By the type of a tensor: what takes its place, for one tensor at a time."""
SINGLE = (torch.bfloat16, torch.float16, torch.int64, torch.bool)
"""Which take the place of all floats at once."""

Learnt = tuple[str, str, str]
"""(What, list, operator): "refused" or "misjudged"; "asking" before its kernels are called."""
Asked = tuple[str, str]
"""(List, operator): "mixed" or "alone", and a name without the underscore of its form in place."""


@dataclass(frozen=True)
class Call:
    """An operator as a sample calls it."""

    func: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Of its schema, without namespace."""
        return str(self.func._schema.name).removeprefix("aten::").removesuffix("_")

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that it gets."""
        return [leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, torch.Tensor)]

    def given(self, kinds: Sequence[torch.dtype]) -> "Call":
        """With its tensors in other types."""
        rest = iter(kinds)
        told = list(self.args), dict(self.kwargs)
        return Call(self.func, *pytree.tree_map_only(torch.Tensor, lambda one: one.detach().to(next(rest)), told))


class Recording(TorchDispatchMode):
    """Keeps each operator of aten that is called inside, once for the same types and numbers of dims."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: dict[object, Call] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = Call(func, args, kwargs or {})
        plain = all(one.layout == torch.strided and not one.is_quantized for one in call.tensors)
        if func.namespace == "aten" and call.tensors and plain:
            self.calls.setdefault((func, *((one.dtype, one.dim()) for one in call.tensors)), call)
        return func(*args, **(kwargs or {}))


@dataclass
class Found:
    """What was asked.

    Attributes:
        refused: of the two lists; misjudged: that refuse what a sample did.
        ends: that end the process, and what was called with them: a kernel that writes beyond its zeros ends it later.
        asked: how often each was.
    """

    asked: Counter[str] = field(default_factory=Counter)
    refused: set[Asked] = field(default_factory=set)
    misjudged: set[Asked] = field(default_factory=set)
    ends: set[str] = field(default_factory=set)

    def lists(self) -> dict[str, list[str]]:
        """Without what is left out."""
        right = {(kind, name) for kind, name in self.refused - self.misjudged if name not in self.ends}
        return {kind: sorted(name for which, name in right if which == kind) for kind in ("mixed", "alone")}

    def to_json(self) -> dict[str, object]:
        """The file's document."""
        wrong = sorted({name for _, name in self.misjudged})
        left_out = {"ends the process": sorted(self.ends), "refuses what is sound": wrong}
        return {"torch": torch.__version__.partition("+")[0], **self.lists(), "left out": left_out}


def operators() -> Sequence[Any]:
    """torch's list of its operators with samples. It asks for a package of torch's own tests, whose place is taken."""
    if "expecttest" not in sys.modules:
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stand_in
    from torch.testing._internal.common_methods_invocations import op_db

    return [one for one in op_db if torch.float32 in one.supported_dtypes("cpu")]


def run(operator: Any, sample: Any) -> None:
    """One sample, forward and backward."""
    found = operator.op(sample.input, *sample.args, **sample.kwargs)
    grown = [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if grown:
        torch.stack([leaf.abs().sum().to(torch.float32) for leaf in grown]).sum().backward()


def samples_of(operator: Any) -> list[Any]:
    """The first few."""
    return list(islice(operator.sample_inputs("cpu", torch.float32, requires_grad=operator.supports_autograd), SAMPLES))


def record(operator: Any) -> list[Call]:
    """What the first samples of an operator call."""
    recording = Recording()
    for sample in samples_of(operator):
        with contextlib.suppress(Exception), recording:  # a sample may be of no use here
            run(operator, sample)
    return list(recording.calls.values())


def changes(call: Call) -> Iterator[tuple[str, Call]]:
    """("mixed" or "alone", the call in other types)."""
    kinds = [one.dtype for one in call.tensors]
    for place, kind in enumerate(kinds) if len(kinds) > 1 else ():
        for other in OTHER.get(kind, ()):
            yield "mixed", call.given([*kinds[:place], other, *kinds[place + 1 :]])
    if set(kinds) == {torch.float32}:
        for other in SINGLE:
            yield "alone", call.given([other] * len(kinds))


def parts(call: Call) -> bool:
    """Whether shapes alone take the types, and a processor's kernel does not: as a dry run would say."""
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            args, kwargs = pytree.tree_map_only(torch.Tensor, mode.from_tensor, (call.args, call.kwargs))
            call.func(*args, **kwargs)
    except Exception:  # a dry run sees that by itself
        return False
    return find_refusal(call.func, call.args, call.kwargs, [*{one.dtype: None for one in call.tensors}]) is not None


def ask(operator: Any, known: Found) -> Iterator[Learnt]:
    """What an operator's kernels refuse that shapes take."""
    for call in record(operator):
        if known.asked[call.name] >= CALLS or call.name in known.ends:
            continue
        yield "asking", "-", call.name
        for kind, changed in changes(call):
            if (kind, call.name) not in known.refused and parts(changed):
                yield "refused", kind, call.name


def prove(operator: Any, known: Found) -> Iterator[Learnt]:
    """What a dry run would refuse of samples that run: as they are, under autocast, with an input of another type."""
    if operator.name in known.ends:
        return
    for how, sample in product((None, "autocast", torch.bfloat16, torch.float64), samples_of(operator)):
        given = sample.transform(lambda leaf: leaf)
        if isinstance(how, torch.dtype):
            if not isinstance(sample.input, torch.Tensor):
                continue
            given.input = sample.input.detach().to(how).requires_grad_(operator.supports_autograd)
        yield "asking", "-", operator.name
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast")
        with contextlib.suppress(Exception), autocast:
            run(operator, given)
            while (refused := refused_in(operator, given, known)) is not None:
                yield "misjudged", *refused


def refused_in(operator: Any, sample: Any, known: Found) -> Asked | None:
    """The operator at which a dry run of a sample would end, if it does."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    faked = sample.transform(lambda leaf: mode.from_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf)
    try:
        with mode, Checking(Kernels(on_cuda=False, refused=known.lists())):
            run(operator, faked)
    except Refused as error:
        name, _, said = str(error).partition(":")[0].partition(" ")
        asked = "mixed" if " and " in said else "alone", name.removesuffix("_")
        return asked if asked in known.refused - known.misjudged else None
    return None


class Refused(Exception):
    """A dry run would end there."""


class Checking(TorchDispatchMode):
    """Looks at each operator as a dry run does."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kernels = kernels

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            self._kernels.check(func._schema.name, func, args, kwargs or {})
        except RuntimeError as error:
            raise Refused(str(error)) from error
        return run_kernel(func, args, kwargs or {})


def search(some: Sequence[Any]) -> Found:
    """Ask all of them, and then try whether what is sound stays so, in processes that may end."""
    found = Found()
    torch.set_num_threads(1)  # a second thread would be none in a process that is forked
    for job in (ask, prove):
        place = 0
        while place < len(some):
            reading, writing = os.pipe()
            process = os.fork()
            if process == 0:
                os.close(reading)
                _go_through(some[place:], job, found, writing)
            os.close(writing)
            with open(reading) as lines:
                called, done = _note(lines, found)
            _, status = os.waitpid(process, 0)
            place += done
            if status != 0:
                assert not called <= found.ends, f"{job.__name__}: {some[place].name} ends the process"
                found.ends |= called
    return found


def _go_through(some: Iterable[Any], job: Callable[..., Iterator[Learnt]], known: Found, writing: int) -> None:
    logging.getLogger("torch._subclasses.fake_tensor").disabled = True
    with os.fdopen(writing, "w", buffering=1) as out, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for operator in some:
            for what, kind, name in job(operator, known):
                _learn(known, what, kind, name)
                out.write(f"{what} {kind} {name}\n")
            out.write("done - -\n")
    os._exit(0)


def _note(lines: Iterable[str], found: Found) -> tuple[set[str], int]:
    """(What was asked of the one that was not done, how many are done)."""
    called: set[str] = set()
    done = 0
    for line in lines:
        what, kind, name = line.split()
        called = set() if what == "done" else called | {name}
        done += what == "done"
        _learn(found, what, kind, name)
    return called, done


def _learn(found: Found, what: str, kind: str, name: str) -> None:
    if what == "asking":
        found.asked[name] += 1
    elif what != "done":
        getattr(found, what).add((kind, name))


def render(names: Sequence[str] = ()) -> str:
    """The file; of some of torch's operators alone, where they are named."""
    some = [one for one in operators() if not names or one.name in names]
    return json.dumps(search(some).to_json(), indent=1) + "\n"


def main(names: Sequence[str]) -> None:
    """Write it; or print what it would be of those that are named."""
    if names:
        print(render(names), end="")
    else:
        REFUSED.write_text(render())


if __name__ == "__main__":
    main(sys.argv[1:])
