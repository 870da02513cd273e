"""The sections of a Config: every key a user may type, with its default, unit, range and meaning.

Each class is frozen and strict: an unknown key, `"4"` for a number or `1e3` for a whole number is refused. The
reference of all keys is generated from these fields.
"""

from typing import Annotated, Any, Literal, final

from pydantic import BaseModel, ConfigDict, Field, model_validator

from allranks.left_out import LeftOut

LARGEST = 2**63 - 1
Count = Annotated[int, Field(ge=1, le=LARGEST)]
CountOrZero = Annotated[int, Field(ge=0, le=LARGEST)]
Degree = Count | Literal["*"]

AXES = ("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep")
PROCESS_AXES = AXES[:-1]
"""The axes whose product is the number of processes: ep re-cuts the data-parallel ranks."""


def key(
    default: object,
    description: str,
    *,
    unit: str = "",
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
) -> Any:
    """One config key: its default, its meaning, its unit ("" where it has none) and its bounds, as pydantic.Field."""
    return Field(default, description=description, json_schema_extra={"unit": unit}, ge=ge, gt=gt, le=le, lt=lt)


class Section(BaseModel):
    """Abstract: one frozen table of keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


@final
class TrainConfig(Section):
    """What one optimizer step is, and how many there are."""

    steps: Count | None = key(None, "optimizer steps of the whole run", unit="steps")
    epochs: Count | None = key(
        None, "passes over the training data; 1 where train.steps is not given either", unit="epochs"
    )
    max_seconds: float | None = key(
        None,
        "from the start of the command, restarts included: saved before then, and ended with 75; not given: no limit",
        unit="s",
        gt=0,
    )
    global_batch: Count = key(32, "samples per optimizer step, over all processes", unit="samples")
    micro_batch: Count | None = key(
        None, "samples per forward on one data-parallel rank; not given: its whole share at once", unit="samples"
    )
    micro_steps: Count | None = key(
        None, "forwards per optimizer step, for tasks with batch statistics or a coupled loss", unit="forwards"
    )
    seed: CountOrZero = key(0, "decides initial values, order of the data and random numbers")
    precision: Literal["float32", "bfloat16", "float16", "float8", "float64"] = key(
        "float32",
        "the type of the heavy operations; parameters stay float32 (float64 under float64); float8 needs torchao",
    )
    ema: float | None = key(
        None,
        "what stays, in an optimizer step, of an exponential moving average of the parameters, which validation then "
        "measures; not given: no average",
        gt=0,
        lt=1,
    )
    max_norm: float | None = key(None, "gradients are scaled down to this norm; not given: no clipping", gt=0)
    deterministic: bool = key(False, "use deterministic kernels only (slower on CUDA)")
    backend: Literal["auto", "nccl", "gloo", "mpi"] = key("auto", "the library that carries messages between processes")

    @model_validator(mode="before")
    @classmethod
    def _fill_length(cls, values: object) -> object:
        if isinstance(values, dict) and values.get("steps") is None and values.get("epochs") is None:
            return {**values, "epochs": 1}
        return values


@final
class OptimizerConfig(Section):
    """The optimizer of a Task that does not make its own."""

    name: Literal["adamw", "adam", "sgd"] = key("adamw", "the update rule")
    lr: float = key(1e-3, "the learning rate at the top of the schedule", gt=0)
    weight_decay: float = key(0.01, "decay of the weights (decoupled under adamw)", ge=0)
    momentum: float = key(0.0, "momentum of sgd", ge=0, lt=1)
    beta1: float = key(0.9, "decay of Adam's mean of gradients", ge=0, lt=1)
    beta2: float = key(0.999, "decay of Adam's mean of squared gradients", ge=0, lt=1)
    eps: float = key(1e-8, "added to Adam's denominator", gt=0)


@final
class ScheduleConfig(Section):
    """How the learning rate moves. Given in steps of the first start, kept and evaluated in samples."""

    name: Literal["constant", "linear", "cosine"] = key("constant", "the shape after the warmup")
    warmup: CountOrZero = key(0, "steps from zero up to optimizer.lr", unit="steps")
    steps: Count | None = key(
        None, "where the schedule ends; not given: the first train.steps, also after a resume", unit="steps"
    )
    floor: float = key(0.0, "the learning rate at the end, as a fraction of optimizer.lr", ge=0, le=1)


@final
class LayoutConfig(Section):
    """How the work is spread. Either no degree is given (the program chooses) or all are: those not named become 1."""

    kind: Literal["mesh", "data_parallel", "placement"] = key(
        "mesh", "mesh: processes along axes; data_parallel and placement: several devices in a process"
    )
    dp_replicate: Count | Literal["*", "nodes"] | None = key(
        None, "copies of the model; '*': what is left, 'nodes': one a node", unit="processes"
    )
    dp_shard: Degree | None = key(None, "processes that share one copy's parameters", unit="processes")
    tp: Degree | None = key(None, "processes that share each layer (tensor parallel)", unit="processes")
    cp: Degree | None = key(None, "processes that share each sequence (context parallel)", unit="processes")
    pp: Degree | None = key(None, "stages of the pipeline", unit="processes")
    ep: Count | None = key(
        None, "processes that share the experts; divides dp_replicate * dp_shard, takes no '*'", unit="processes"
    )
    sharding: Literal["full", "grad_op", "none", "optimizer"] | None = key(
        None, "what dp_shard shares: everything, gradients and optimizer, nothing, the optimizer; not given: full"
    )
    schedule: Literal["1f1b", "gpipe", "interleaved", "looped_bfs", "interleaved_zb", "zbv", "dualpipev"] = key(
        "1f1b", "the order of a pipeline's forwards and backwards"
    )
    recompute: Literal["none", "selective", "full", "budget"] = key(
        "none", "which activations are computed again instead of kept"
    )
    offload: Literal["none", "parameters", "activations", "all"] = key("none", "what waits in the host's memory")
    batchnorm: Literal["sync", "local", "broadcast"] | None = key(
        None,
        "whose samples a batch statistic sees: all ranks', each rank's own, the same with rank 0's running ones; "
        "not given: what hints() says, else sync",
    )
    compile: Literal["none", "block"] = key("none", "whether each block goes through torch.compile")
    static_graph: bool = key(False, "promise DDP that every step uses the same parameters")
    gather: Literal["float32", "bfloat16"] | None = key(
        None, "in what type sharded parameters travel; not given: bfloat16 on CUDA where it computes so, else float32"
    )
    prefetch: Count | None = key(None, "layers gathered ahead of the one that computes; not given: as torch does it")
    ddp_bucket_mb: float | None = key(
        None, "the size of one gradient message of DDP; not given: torch's", unit="MiB", gt=0
    )
    ddp_hook: Literal["none", "bfloat16", "float16", "powersgd"] = key(
        "none", "how the gradients of DDP travel: rounded to a lower type, or as matrices of a low rank"
    )
    powersgd_rank: Count = key(4, "the rank of what powersgd sends of each matrix")
    powersgd_start: CountOrZero = key(1000, "steps before which powersgd sends gradients whole", unit="steps")
    local_sgd: Count | None = key(
        None, "steps that the copies take by themselves before they are put together; not given: none", unit="steps"
    )
    outer_lr: float = key(0.7, "of local_sgd: the rate of the step that puts them together; 1: all the way", gt=0)
    outer_momentum: float = key(0.9, "of local_sgd: momentum of that step; 0: none", ge=0, lt=1)
    outer_nesterov: bool = key(True, "of local_sgd: whether that momentum is Nesterov's")
    context: Literal["ulysses", "ring"] = key(
        "ulysses", "how the processes of a sequence attend: ulysses swaps positions for heads, ring passes keys around"
    )
    placement: dict[str, str] | None = key(
        None, "a glob of module or parameter names = a device of the process; layout=placement without it: balanced"
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_degrees(cls, values: object) -> object:
        if isinstance(values, dict) and any(values.get(axis) is not None for axis in AXES):
            return {**values, **{axis: 1 for axis in AXES if values.get(axis) is None}}
        if isinstance(values, dict) and values.get("placement"):
            return {**values, "kind": "placement"}  # rules alone mean the devices of one process
        return values

    @model_validator(mode="after")
    def _take_what_is_left_once(self) -> "LayoutConfig":
        takers = [axis for axis in AXES if getattr(self, axis) == "*"]
        if len(takers) > 1:
            raise ValueError(f"{' and '.join(takers)} both take what is left (*): only one axis can")
        return self

    @property
    def chosen(self) -> bool:
        """Whether the user named a layout; if not, the program chooses."""
        return self.kind != "mesh" or self.dp_replicate is not None

    @property
    def placed(self) -> bool:
        """Whether a process spreads its modules over several devices."""
        return self.kind == "placement" or bool(self.placement)


@final
class DataConfig(Section):
    """How samples reach the loop."""

    workers: CountOrZero = key(
        0, "processes that load data, for each training process; 0: the loop's own thread", unit="processes"
    )
    text: str | None = key(
        None, "files (a glob) that the built-in text task reads; not given: the Python standard library"
    )
    skip: str = key(
        "", "positions in the order of samples that are never fed, as FIRST:PAST with commas between; a rollback adds"
    )

    @property
    def left_out(self) -> LeftOut:
        """What `skip` names."""
        return LeftOut.parse(self.skip)

    @model_validator(mode="after")
    def _name_ranges(self) -> "DataConfig":
        try:
            LeftOut.parse(self.skip)
        except ValueError as error:
            raise ValueError(f"data.skip={self.skip}: {error}") from None
        return self


@final
class EvaluateConfig(Section):
    """When the validation split is measured."""

    every: CountOrZero | None = key(
        None, "steps between evaluations; not given: once at the end; 0: never", unit="steps"
    )


@final
class CheckpointConfig(Section):
    """When the state is saved, and how long it is kept."""

    every: Count | None = key(None, "steps between checkpoints; not given: as checkpoint.seconds says", unit="steps")
    seconds: float = key(
        1800.0,
        "where checkpoint.every is not given: so long after one the next is due, by rank 0's clock; 0: only at the end",
        unit="s",
        ge=0,
    )
    keep: Count = key(2, "newest checkpoints that are kept", unit="checkpoints")
    keep_every: Count | None = key(
        None, "steps between checkpoints that stay for ever, beside the newest; not given: none stays", unit="steps"
    )
    quota_gb: float | None = key(
        None,
        "what RUN/checkpoints may take, the one being written too: of the newest, down to the last good one, as many "
        "go as have to; not given: no limit",
        unit="GB",
        gt=0,
    )
    failures: CountOrZero = key(
        2,
        "saves in a row that may fail while the run goes on; one more ends it with 78, and so does the last one",
        unit="saves",
    )
    asynchronous: bool | Literal["auto"] = key(
        "auto",
        "steps go on while a copy of the state in the host's memory is written; auto: on CUDA, where that copy takes "
        "nothing from the model, if checkpoint.every is given",
    )
    mirror: str | None = key(
        None,
        "where fsspec brings a copy of every checkpoint, such as s3://bucket/folder or /mnt/share; a resume takes what "
        "is newer there; not given: nowhere",
    )
    memory_every: Count | None = key(
        None,
        "steps between copies in the memory of this host (of several hosts: each file in that of two), from the newest "
        "of which killed workers go on; not given: none",
        unit="steps",
    )

    @property
    def every_seconds(self) -> float | None:
        """`seconds`, where they count; None: they do not."""
        return self.seconds or None if self.every is None else None

    @property
    def quota_bytes(self) -> int | None:
        """What `quota_gb` says."""
        return None if self.quota_gb is None else round(self.quota_gb * 1e9)

    def beside(self, device_type: str) -> bool:
        """Whether those after a number of steps are written beside the training on devices of that type."""
        return device_type == "cuda" if self.asynchronous == "auto" else self.asynchronous


@final
class TrackConfig(Section):
    """Where numbers go besides the journal."""

    tensorboard: bool = key(True, "write TensorBoard event files")
