"""Ranks that enter different units wait for each other: they find out why, instead of waiting for the timeout.

Where the ranks of an FSDP group enter unequally many units, one of them waits for parameters that no other is about to
send, and the others wait for its gradients. Nothing is done about it until a collective takes long. Then each of those
that wait tells through the store what it has entered, and looks what the next rank of its group tells: a pair that has
parted is found by both of its ranks, and what they find is what all others of the group raise too. A rank that only
computes for long tells nothing, and is waited for.

A rank of a pipeline may also wait for another stage, which nobody watches: one of its threads tells for it.

Over gloo: there the host waits for every collective of FSDP by the functions of `gloo_ops`.
"""

import json
import threading
import time
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Final, final

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from allranks.errors import TaskError
from allranks.parallel.path import EXPERTS, STATISTICS, Path

SLICE_SECONDS: Final = 5.0
"""After so long the ranks begin to tell each other, and so often they look."""

Told = Mapping[int, tuple[Sequence[str], bool]]
"""Step -> the units entered in it, and whether it is over."""

_watched: Counter[str] = Counter()  # by group: parallelize is collective, so that all of its ranks count alike


@final
class Watch:
    """The ranks of an FSDP group, as one of them sees the others while it waits.

    Args:
        path: what this rank has entered.
        group: the ranks that gather its units.
    """

    def __init__(self, path: Path, group: dist.ProcessGroup) -> None:
        self._path = path
        self._rank, self._ranks = dist.get_rank(), dist.get_process_group_ranks(group)
        name = f"allranks/path/{group.group_name}/{self._ranks[0]}/{_watched[group.group_name]}"
        _watched[group.group_name] += 1
        self._store = PrefixStore(name, dist.distributed_c10d._get_default_store())
        self._told = ""

    def wait(self, work: dist.Work) -> None:
        """Wait for a collective. Raises TaskError where ranks of the group have parted, naming two and where."""
        while True:
            try:
                work.wait(timedelta(seconds=SLICE_SECONDS))
            except RuntimeError:
                if work.is_completed():
                    # It has failed, or come to its end just after the slice: the same call tells which.
                    work.wait()
                    return
                self._compare()
            else:
                return

    def count(self) -> tuple[int, int]:
        """Which step this rank is in, counted by `Path.take`, and how many units it has entered in it."""
        step, (entered, _) = max(self._path.told().items())
        return step, len(entered)

    def tell(self) -> None:
        """Tell the others what this rank has entered."""
        told = json.dumps(self._path.told())
        if told != self._told:
            self._store.set(str(self._rank), told)
            self._told = told

    def _compare(self) -> None:
        self.tell()
        rank, path = self._rank, self._path.told()
        following = self._ranks[(self._ranks.index(rank) + 1) % len(self._ranks)]
        if self._store.check([str(following)]):
            theirs = {int(step): pair for step, pair in json.loads(self._store.get(str(following))).items()}
            if (names := find_parting(path, theirs)) is not None:
                self._store.compare_set("found", "", describe_parting((rank, following), names))
        if self._store.check(["found"]):
            text = self._store.get("found").decode()
            self._see_that_all_know()
            raise TaskError(f"the ranks ran different modules: {text}")

    def _see_that_all_know(self) -> None:
        """A rank that ends takes its connections along, perhaps the store: others would only see that they broke."""
        heard, deadline = self._store.add("heard", 1), time.monotonic() + 2 * SLICE_SECONDS
        while heard < len(self._ranks) and time.monotonic() < deadline:
            time.sleep(SLICE_SECONDS / 50)
            heard = self._store.add("heard", 0)


def watch_path(path: Path, group: dist.ProcessGroup, *, staged: bool) -> None:
    """Have `path` be compared while this rank waits; `staged`: it waits for other stages, too."""
    watch = Watch(path, group)
    path.wait = watch.wait
    if staged:
        tell_beside(watch)


def tell_beside(watch: Watch) -> None:
    """Have a thread tell what the rank of `watch` has entered, where it enters nothing for long."""
    threading.Thread(target=_tell_on, args=(weakref.ref(watch),), name="allranks-path", daemon=True).start()


def _tell_on(reference: "weakref.ref[Watch]") -> None:
    before: tuple[int, int] | None = None
    while True:
        time.sleep(SLICE_SECONDS)
        watch = reference()
        if watch is None:
            return
        entered = watch.count()
        if entered == before:
            try:
                watch.tell()
            except RuntimeError:
                return  # the store is gone, and with it the world
        before = entered
        del watch


def find_parting(ours: Told, theirs: Told) -> tuple[str, str] | None:
    """What each of two ranks entered where they first entered something else, "nothing more" for an end; or None.

    One that has entered less, in a step that is not over for it, may only be slower.
    """
    for step in sorted(ours.keys() & theirs.keys()):
        (own, own_over), (other, other_over) = ours[step], theirs[step]
        place = first_difference(own, other)
        lacks = [over for names, over in ((own, own_over), (other, other_over)) if place >= len(names)]
        if not lacks or (len(lacks) == 1 and lacks[0]):
            return name_entered(own, place), name_entered(other, place)
    return None


def first_difference(one: Sequence[str], other: Sequence[str]) -> int:
    """The first place at which they differ; the length of the shorter one where it goes on in the other."""
    differing = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differing, min(len(one), len(other)))


def name_entered(names: Sequence[str], place: int) -> str:
    """What was entered there, in words."""
    entered = names[place] if place < len(names) else Path.END
    return "nothing more" if entered == Path.END else entered or "the model"


def describe_parting(ranks: tuple[int, int], entered: tuple[str, str]) -> str:
    """Who entered what, why that cannot be, and what to do."""
    (first, here), (second, there) = sorted(zip(ranks, entered, strict=True))
    why = "A sharded layout gathers a module's parameters on all ranks together, and adds up their gradients"
    remedy = "name what a forward may leave out in hints().optional (world.parallelize(optional=)), or use --layout ddp"
    if any(words.startswith(STATISTICS) for words in entered):
        why = "A synchronised BatchNorm takes its statistics on all ranks together"
        remedy = "say layout.batchnorm=local (or broadcast), or have every forward enter it"
    elif any(words.startswith(EXPERTS) for words in entered):
        why = "Under ep all ranks exchange the tokens of a module of experts together"
        remedy = "have every forward enter it, or leave ep out"
    return (
        f"rank {first} {here}, rank {second} {there}. {why}, so these were mixed: nothing of this step is saved; "
        f"{remedy}"
    )
