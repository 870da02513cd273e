"""What `allranks plan` plans: a name, a shape, a Hugging Face config.json, or a user's Task, each as a Subject."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

from allranks.attention_windows import say_windows
from allranks.cli.train import read_arguments
from allranks.cluster import Cluster
from allranks.config import resolve_config
from allranks.config_sections import LayoutConfig
from allranks.errors import ConfigError
from allranks.model_profile import ModelProfile
from allranks.plan_request import PlanRequest
from allranks.planning.question import MakeProfile
from allranks.shape_operations import OWN
from allranks.upkeep import Upkeep

if TYPE_CHECKING:
    from allranks.model_shape import ModelShape


LAYOUT_KEY = "layout."
MEASURED = "the model's costs are those of real steps, because --measured; "
ON_GPU = "for GPUs they run on this machine's"
ON_PROCESSOR = (
    "no GPU is at hand, so that they run on the processor, whose kernels may keep other activations than a GPU's"
)


@final
@dataclass(frozen=True)
class Subject:
    """A model, and what its own config says about a run of it.

    Attributes:
        make: (positions of a sample or None, precision, "cpu" or "cuda") -> what the model costs there.
        seq: positions of a sample where nobody names another; 0: it has none.
        task: its spec; None for a model by its sizes.
        global_batch, micro_batch, micro_steps, precision: of the Task's config; None where nothing says so.
        defaulted: which of `micro_batch` and `precision` the Task's defaults name, and not the user.
        layout: that section of its config; of a model by its sizes what keys behind its name say, None without any.
        upkeep: (the device's kind, whether that is the machine at hand) -> what its config says of one.
        settings: what the user gave for the Task, by full key, for RUN.toml.
        notes: what a plan says of where its figures come from.
    """

    make: Callable[[int | None, str, str], ModelProfile]
    seq: int
    task: str | None = None
    global_batch: int | None = None
    micro_batch: int | None = None
    micro_steps: int | None = None
    precision: str | None = None
    defaulted: frozenset[str] = frozenset()
    layout: LayoutConfig | None = None
    upkeep: Callable[[str, bool], Upkeep] = lambda kind, here: Upkeep(beside=kind == "cuda")
    settings: Mapping[str, object] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def profiles_on(self, cluster: Cluster) -> MakeProfile:
        """See Question: of what the devices of `cluster` would run."""
        return lambda seq, precision: self.make(seq, precision, cluster.device.kind)


def find_subject(request: PlanRequest) -> Subject:
    """The model that `request` names. Raises ConfigError or TaskError, with the nearest names for an unknown one."""
    words = request.arguments
    keys = tuple(word for word in words if word.startswith(LAYOUT_KEY))
    by_sizes = bool(request.sizes) and keys == words
    if request.measured and (by_sizes or not (words and is_task(words))):
        raise ConfigError(
            "--measured runs real steps of a Task, and a model by its sizes has no program and no samples"
        )
    if not words and not request.sizes:
        raise ConfigError(
            "plan needs a model: a Task, a name such as llama3-8b, a config.json, or --layers --hidden --heads"
        )
    if words and is_task(words) and not by_sizes:
        refuse_sizes(words[0], request.sizes)
        return _of_task(request)
    from allranks.named_models import find_shape

    name, *others = [word for word in words if word not in keys] or [""]
    if others:
        raise ConfigError(
            f"'{others[0]}' behind the model {name}: config files and keys belong to a Task, but for those of the "
            f"section layout, as in {LAYOUT_KEY}context=ring"
        )
    return _of_shape(find_shape(name, **request.sizes), keys)


def is_task(words: tuple[str, ...]) -> bool:
    """Whether the first of the words names a Task or a config, rather than a model by name."""
    first = words[0]
    key, equals, _ = first.partition("=")
    if first.endswith(".json") and not (equals and "." in key and "/" not in key):
        return False  # a config.json, whatever is in the names of its folders
    return ".py" in first or ":" in first or first.endswith(".toml") or "=" in first


def refuse_sizes(task: str, sizes: Mapping[str, int]) -> None:
    """Raise ConfigError where a Task is given sizes, too."""
    if sizes:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in sizes)
        raise ConfigError(f"{options}: {task} is a Task, which has its own sizes")


def _of_shape(shape: "ModelShape", keys: tuple[str, ...]) -> Subject:
    def make(seq: int | None, precision: str, device: str) -> ModelProfile:
        return shape.profile(seq, precision, OWN)

    layout = resolve_config(task_defaults={}, toml=None, overrides=keys, layout=None).layout if keys else None
    return Subject(make, shape.seq, layout=layout, notes=_windows_of(shape))


def _windows_of(shape: "ModelShape") -> tuple[str, ...]:
    """What is counted of attention in windows, where layers have them."""
    if not shape.windows:
        return ()
    return (
        f"{say_windows(shape.windows, shape.layers)}, and no more is counted, because kernels for windows compute no"
        " more (FlashAttention, FlexAttention); under cp all positions are, because it takes windows as masks alone;"
        " if yours has full attention, write null for sliding_window in the config.json",
    )


def _of_task(request: PlanRequest) -> Subject:
    """A Task is traced: torch is imported here, and the user's code runs."""
    from allranks.cli.planned_task import task_facts

    spec, toml, overrides = read_arguments(request.arguments)
    facts: dict[str, Any] = task_facts(spec, toml, overrides, measured=request.measured)
    if not request.measured:
        return Subject(**facts)
    import torch

    measured = MEASURED + (ON_GPU if torch.cuda.is_available() else ON_PROCESSOR)
    return Subject(**{**facts, "notes": (measured, *facts["notes"])})
