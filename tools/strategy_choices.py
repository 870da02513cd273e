"""The ways to spread a model that a user chooses from: what each process has, when to use it, how it is started."""

from dataclasses import dataclass

TASK = "task.py"


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to spread a model.

    Attributes:
        layout: as it is typed.
        has: what each process has.
        when: to use it.
        measured: the strategies of the benchmark, where they are called otherwise.
        why_not: why the benchmark has no figure for it; empty: it has.
        guide: the page that says more.
        settings: keys beside the layout, which its string does not take.
    """

    layout: str
    has: str
    when: str
    measured: tuple[str, ...] = ()
    why_not: str = ""
    guide: str = ""
    settings: str = ""

    @property
    def name(self) -> str:
        """What tells it from the others."""
        return f"{self.layout} {self.settings}".rstrip()

    @property
    def rows(self) -> tuple[str, ...]:
        """The benchmark's strategies that time it."""
        return () if self.why_not else self.measured or (self.layout,)

    @property
    def words(self) -> str:
        """How a user starts it, behind `allranks train TASK`."""
        layout = f'"{self.layout}"' if "*" in self.layout else self.layout  # which some shells would look for
        return f"--layout {layout} {self.settings}".rstrip()


ONE_DEVICE = "the processes of the stored run have one device each, where it changes nothing"
NO_ACCELERATOR = "it needs an accelerator, and the stored run is of a CPU"
STRATEGIES = (
    Strategy("single", "everything", "It fits, and one device is fast enough."),
    Strategy("ddp", "the whole model; gradients are averaged", "The model fits on each device: the first choice."),
    Strategy(
        "ddp",
        "as ddp; gradients travel rounded to half (`bfloat16`, or `float16`)",
        "Links are slower than a step: the first thing to try. Not the same gradients: the guide says how far.",
        measured=("ddp layout.ddp_hook=bfloat16", "ddp layout.ddp_hook=float16"),
        guide="slow-links",
        settings="layout.ddp_hook=bfloat16",
    ),
    Strategy(
        "ddp",
        "as ddp; of each large matrix of gradients two thin ones travel (PowerSGD)",
        "Links are ten times too slow, and layers large.",
        measured=("ddp layout.ddp_hook=powersgd layout.powersgd_start=2 layout.ddp_bucket_mb=64",),
        guide="slow-links",
        settings="layout.ddp_hook=powersgd",
    ),
    Strategy(
        "ddp",
        "a whole model that trains by itself; all meet every 100 steps (local SGD, DiLoCo)",
        "Copies are in other cities. Goes with what shards inside a copy, too: `dp_replicate=2,dp_shard=*`.",
        measured=("ddp layout.local_sgd=2",),
        guide="slow-links",
        settings="layout.local_sgd=100",
    ),
    Strategy(
        "dp_shard=*,sharding=optimizer",
        "the whole model, its rows of the optimizer's state (ZeRO-1)",
        "The model fits, with the optimizer's state it does not.",
    ),
    Strategy(
        "fsdp,sharding=grad_op",
        "its part of gradients and optimizer state, whole parameters from the forward to the backward (ZeRO-2)",
        "Memory is short by less than the parameters; one gathering a micro-step less than fsdp.",
    ),
    Strategy(
        "fsdp",
        "its part of parameters, gradients and optimizer state (FSDP2, ZeRO-3)",
        "The model does not fit on a device.",
    ),
    Strategy(
        "fsdp,sharding=none",
        "the whole model, through FSDP2",
        "To compare with fsdp, or to average over cut tensors where DDP takes none.",
    ),
    Strategy(
        "dp_replicate=2,dp_shard=*",
        "its part, and there are two copies (HSDP)",
        "Links inside a machine are faster than those between machines; `hsdp` is one copy a machine.",
        measured=("dp_replicate=2,dp_shard=2",),
    ),
    Strategy(
        "tp=2",
        "its part of every large layer (tensor parallel)",
        "Single layers or their activations are too large, and links are fast.",
        measured=("tp=*",),
        guide="split-layers",
    ),
    Strategy(
        "tp=2,dp_shard=2",
        "its part of the part",
        "Large models on several machines: tp inside a machine, dp_shard across.",
        guide="split-layers",
    ),
    Strategy(
        "pp=2",
        "some of the layers, a stage",
        "Links are slow: only activations at the borders of stages travel.",
        measured=("pp=*",),
        guide="pipeline",
    ),
    Strategy(
        "pp=2,schedule=gpipe",
        "as pp=2; all forwards, then all backwards",
        "To compare: more activations wait than under `1f1b`, the default.",
        guide="pipeline",
    ),
    Strategy(
        "pp=2,schedule=interleaved",
        "two stages of half the size (`looped_bfs`: their forwards together)",
        "Stages wait too long for each other, and links take twice the messages.",
        measured=("pp=2,schedule=interleaved", "pp=2,schedule=looped_bfs"),
        guide="pipeline",
        settings="train.micro_steps=8",
    ),
    Strategy(
        "pp=2,schedule=zbv",
        "two stages; the halves of a backward come apart (`interleaved_zb` and `dualpipev`, too)",
        "As above, where waits have to be filled; not with tp, cp, dp_shard, recompute or compile.",
        measured=("pp=2,schedule=interleaved_zb", "pp=2,schedule=zbv", "pp=2,schedule=dualpipev"),
        guide="pipeline",
    ),
    Strategy(
        "placement",
        "some layers on each of its devices, one process (rules in `[layout.placement]`, or balanced by bytes)",
        "The model fits on no single device and nothing repeats in it, or a large embedding belongs on the host.",
        why_not=ONE_DEVICE,
        guide="placement",
    ),
    Strategy(
        "placement,dp_replicate=2",
        "a whole model over its share of the machine's devices (DDP around placement)",
        "As above, with devices for several copies.",
        why_not=ONE_DEVICE,
        guide="placement",
    ),
    Strategy(
        "cp=2",
        "its part of every sequence (`layout.context=ulysses`, or `=ring`)",
        "Sequences are too long for one device.",
        measured=("cp=*",),
        guide="long-sequences",
    ),
    Strategy(
        "cp=2",
        "the same; keys and values go round",
        "As above, where heads are fewer than processes, or attention's memory counts.",
        measured=("cp=* layout.context=ring",),
        guide="long-sequences",
        settings="layout.context=ring",
    ),
    Strategy(
        "dp_replicate=2,ep=2",
        "some of the experts of every layer",
        "A mixture of experts whose experts do not fit on each device. Measured with experts in the model's place.",
        measured=("ddp,ep=2",),
        guide="experts",
    ),
    Strategy(
        "fsdp,recompute=full",
        "as fsdp; each block's forward is run again in the backward",
        "Activations take the memory, not parameters. Goes with every layout but the schedules that split the backward "
        "(`interleaved_zb`, `zbv`, `dualpipev`) and `data_parallel` on several GPUs.",
        guide="save-memory",
    ),
    Strategy(
        "ddp,recompute=selective",
        "as ddp; only cheap operations are run again",
        "As above, where full costs too much time; `recompute=budget,compile=block` lets the compiler choose.",
        guide="save-memory",
    ),
    Strategy(
        "ddp,offload=activations",
        "as ddp; what a block keeps for its backward waits in the host's memory",
        "Activations take the memory, and the link to the host is fast. Goes with every layout but `placement` and "
        "`data_parallel` on several GPUs.",
        why_not=NO_ACCELERATOR,
        guide="save-memory",
    ),
    Strategy(
        "fsdp,offload=parameters",
        "as fsdp; its part waits in the host's memory (`offload=all`: activations, too)",
        "Sharding alone does not make parameters and optimizer state fit.",
        why_not=NO_ACCELERATOR,
        guide="save-memory",
    ),
    Strategy(
        "ddp,compile=block",
        "as ddp; every block is compiled",
        "Runs long enough to pay for the compilation.",
        guide="save-memory",
    ),
    Strategy(
        "data_parallel",
        "everything, on all GPUs of one process (nn.DataParallel)",
        "To compare with an old script; ddp is faster.",
        why_not="it is nn.DataParallel itself; without GPUs it changes nothing",
        guide="migrate-from-data-parallel",
    ),
)
