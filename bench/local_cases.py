"""The layouts that plan_local.py measures: those listed here, and the one that the planner's own search chooses."""

from collections.abc import Mapping, Sequence

from local_steps import DEPTH, PRECISION, Case, config_of

from allranks.cluster import Cluster
from allranks.errors import AllranksError, LayoutError
from allranks.model_profile import ModelProfile
from allranks.plan import Choice, Plan
from allranks.planning.answer import make_plan
from allranks.planning.question import Question
from allranks.training.prepare import resolve_layout

GLOBAL_BATCH = {"transformer": 4, "perceptron": 128}
TRANSFORMER = (
    ("ddp", 2), ("ddp", 1), ("dp_shard=*,sharding=optimizer", 2), ("fsdp", 2), ("fsdp", 1),
    ("fsdp,sharding=grad_op", 2), ("fsdp,recompute=full", 2), ("ddp,recompute=full", 2), ("tp=2,dp_shard=*", 4),
    ("pp=2,dp_shard=*,schedule=gpipe", 1), ("pp=2,dp_shard=*", 2), ("pp=2,dp_shard=*", 1), ("cp=2,dp_shard=*", 4),
    ("tp=*", 4), ("pp=*", 1), ("cp=*", 4), ("dp_replicate=*,tp=2", 4), ("dp_replicate=*,pp=2", 1),
)  # fmt: skip
PERCEPTRON = (
    ("ddp", 64), ("ddp", 32), ("dp_shard=*,sharding=optimizer", 64), ("fsdp", 64), ("fsdp,sharding=grad_op", 64),
    ("fsdp,recompute=full", 64), ("ddp,recompute=full", 64), ("tp=2,dp_shard=*", 128),
    ("pp=2,dp_shard=*,schedule=gpipe", 32), ("pp=2,dp_shard=*", 32), ("tp=*", 128), ("pp=*", 32),
    ("dp_replicate=*,tp=2", 128), ("dp_replicate=*,pp=2", 32),
)  # fmt: skip
NUM_PARTS = {"transformer": 6, "perceptron": DEPTH}
QUICK = ("ddp", "fsdp", "pp=2,dp_shard=*")
SPECS = {
    "transformer": ("allranks.benchmarking.subject:Subject", "task.size=10m"),
    "perceptron": ("bench/local_steps.py:Perceptron",),
}
"""What `allranks plan` calls them."""


def plan_cases(nproc: int, quick: bool, only: str | None = None) -> tuple[list[Case], list[dict[str, str]]]:
    """Every listed layout that `nproc` processes can have, micro-batches shrunk with the ranks' shares; and those that
    are refused, with the reason."""
    found, refused = [], []
    for model, layouts in (("transformer", TRANSFORMER), ("perceptron", PERCEPTRON)):
        for text, micro_batch in layouts:
            if (quick and text not in QUICK) or only not in (None, model):
                continue
            whole = GLOBAL_BATCH[model]
            try:
                layout = Case(model, text, whole, 1).resolve(nproc)
                share = max(1, micro_batch * 2 // nproc if layout.pp == layout.tp == layout.cp == 1 else micro_batch)
                case = Case(model, str(layout), whole, min(share, whole // layout.dp))
                refuse(case, nproc)
            except AllranksError as error:
                refused.append({"model": model, "layout": text, "because": str(error)})
                continue
            found.append(case)
    return list(dict.fromkeys(found)), refused


def refuse(case: Case, nproc: int) -> None:
    """Raises what a run refuses before it starts, of what its config and its model's parts say."""
    layout = resolve_layout(config_of(case, 1), nproc)
    stages = layout.num_stages
    if stages > NUM_PARTS[case.model]:
        raise LayoutError(f"pp={layout.pp} needs {stages} parts, and the model has {NUM_PARTS[case.model]}")


def choice_of(case: Case, nproc: int) -> Choice:
    """A Case as the planner takes it."""
    layout = case.resolve(nproc)
    return Choice(layout, case.global_batch, case.micro_batch, PRECISION, layout.num_stages // layout.pp)


def case_of(model: str, choice: Choice) -> Case:
    """What the planner takes as a Case."""
    layout = choice.layout
    return Case(model, str(layout), choice.global_batch, choice.micro_batch, layout.context)


def search_plan(model: str, profile: ModelProfile, cluster: Cluster) -> Plan:
    """The plan of the planner's own search over every layout, as `plan_command` prints it."""
    return make_plan(Question(lambda seq, precision: profile, cluster, GLOBAL_BATCH[model], (PRECISION,)))


def plan_command(model: str, cluster: str) -> list[str]:
    """The words of the command line that prints what `search_plan` finds."""
    words = ["allranks", "plan", *SPECS[model], "--cluster", cluster]
    return [*words, "--global-batch", str(GLOBAL_BATCH[model]), "--precision", PRECISION]


def chosen_cases(profiles: Mapping[str, ModelProfile], cluster: Cluster) -> dict[str, Case]:
    """By model: what its search chooses. LayoutError where nothing fits."""
    found = {}
    for model, profile in profiles.items():
        best = search_plan(model, profile, cluster).best
        if best is None:
            raise LayoutError(f"{model}: no layout fits on {cluster.name}")
        found[model] = case_of(model, best.estimate.choice)
    return found


def with_chosen(cases: Sequence[Case], chosen: Mapping[str, Case]) -> list[Case]:
    """The cases of each model with the chosen one, behind the others of its model where it is not among them."""
    models = dict.fromkeys([*(case.model for case in cases), *chosen])
    grouped = [[*(case for case in cases if case.model == model), chosen[model]] for model in models]
    return list(dict.fromkeys(case for group in grouped for case in group))
