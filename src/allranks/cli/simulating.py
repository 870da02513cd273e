"""From a SimulationRequest to a printed Simulation: the plan gives step and checkpoint, the request the rest."""

import math
import shlex
import sys
from dataclasses import asdict, dataclass, replace
from typing import Any, final

from allranks.cli.output import print_json, stdout_kept_free, write_printed
from allranks.cli.planned_model import find_subject
from allranks.cli.planning import ask
from allranks.cluster import Cluster
from allranks.durable import check_target, write_whole
from allranks.errors import ConfigError
from allranks.plan import Estimate
from allranks.plan_request import PlanRequest
from allranks.planning.amounts import TIMES, read_number
from allranks.planning.answer import make_plan
from allranks.planning.hardware import find_cluster
from allranks.planning.setting import setting_of
from allranks.planning.upkeep_cost import state_bytes
from allranks.rehearsing.expectations import best_interval, enough_spares
from allranks.rehearsing.failure_rates import NODE_DEVICES, find_failures
from allranks.simulation import DAY, FailureModel, Operation, Scope, Simulation, Tier
from allranks.simulation_request import SimulationRequest
from allranks.units import format_bytes, format_seconds

MOST_DAYS = 3650

SHORTEST_SECONDS = 1.0
"""Between two saves, where neither a step nor a save takes as long: the shortest interval that is looked at."""

STORAGE_PER_DEVICE = 2e12 / 7500 / NODE_DEVICES
"""Bytes/s that storage takes and gives for each device: 2 TB/s over 7,500 servers (arXiv 2407.21783, section 3.3.1), as
if each were a node of NODE_DEVICES."""


@final
@dataclass(frozen=True)
class Costs:
    """What one step and one checkpoint take, and the nodes of one data-parallel replica, with what was decided.

    Attributes:
        model: its name; "" where the user gave every figure.
        save_seconds: that training stops; write_seconds: until the checkpoint counts; load_seconds: to read it.
    """

    model: str
    step_seconds: float
    save_seconds: float
    write_seconds: float
    load_seconds: float
    replica_nodes: int
    notes: tuple[str, ...]

    @property
    def whole_save_seconds(self) -> float:
        """From the start of a save until it counts."""
        return self.save_seconds + self.write_seconds

    @property
    def shortest_seconds(self) -> float:
        """No interval that is advised is shorter."""
        return max(self.step_seconds, self.whole_save_seconds, SHORTEST_SECONDS)


def answer(request: SimulationRequest) -> int:
    """Simulate and print. Raises AllranksError: what is asked cannot be answered."""
    if request.html is not None:
        check_target(request.html)
    with stdout_kept_free(request.json):
        found = simulation_of(request)
    if request.json:
        print_json(document(found))
    else:
        from allranks.reporting.simulation_text import render_simulation

        print(render_simulation(found))
    return write_printed(lambda: _write(request, found))


def _write(request: SimulationRequest, found: Simulation) -> None:
    """The page, if it is asked for."""
    if request.html is not None:
        from allranks.reporting.simulation_page import render_simulation_page

        write_whole(request.html, render_simulation_page(found, shlex.join(["allranks", *sys.argv[1:]])))


def simulation_of(request: SimulationRequest) -> Simulation:
    """The simulation that a request asks for. Raises ConfigError for a figure that cannot be."""
    from allranks.rehearsing.simulate import Trial, simulate

    _check_counts(request)
    _check_more_than_nothing(request)
    cluster = find_cluster(request.cluster)
    model, assumed = find_failures(request.failures, cluster.devices_per_node)
    costs = costs_of(request, cluster)
    _check_saved_in_time(request, costs)
    operation, notes = operation_of(request, cluster, costs, model)
    return simulate(
        operation,
        model,
        step_seconds=costs.step_seconds,
        shortest_seconds=costs.shortest_seconds,
        trial=Trial(request.runs, request.seed),
        named=(costs.model, cluster.name, cluster.devices_per_node),
        notes=(*costs.notes, *notes, *assumed),
    )


def _check_counts(request: SimulationRequest) -> None:
    if not 0 < request.days <= MOST_DAYS:
        raise ConfigError(f"--days {request.days:g}: more than 0 and at most {MOST_DAYS}; --days 60, say")
    if request.spares is not None and request.spares < 0:
        raise ConfigError(f"--spares {request.spares}: at least 0; leave it out for enough in 999 of 1000 moments")
    if request.runs is not None and request.runs < 1:
        raise ConfigError(f"--runs {request.runs}: at least 1; leave it out for as many as the figures need")
    if request.seed < 0:
        raise ConfigError(f"--seed {request.seed}: a seed is a whole number from 0; --seed 0, say, or leave it out")


def _check_more_than_nothing(request: SimulationRequest) -> None:
    """A save or a restart may cost nothing; a step and an interval that take no time, and no storage, are none."""
    times = (
        (request.step, "--step", "10s"),
        (request.every, "--every", "10min"),
        (request.peer_every, "--peer-every", "1min"),
    )
    for text, option, example in times:
        if text is not None and not _time(text, option):
            raise ConfigError(f"{option} {text}: takes more than no time; {option} {example}, say, or leave it out")
    if request.storage is not None and not 0 < request.storage < math.inf:
        raise ConfigError(f"--storage {request.storage:g}: is more than 0 GB/s; --storage 200, say, or leave it out")


def _check_saved_in_time(request: SimulationRequest, costs: Costs) -> None:
    """Of a save that the run does not live to see nothing can be said that helps."""
    if costs.whole_save_seconds <= request.days * DAY:
        return
    if costs.write_seconds >= costs.save_seconds:
        given = "" if request.storage is None else f"--storage {request.storage:g}: "
        what, move = f"{given}to write a checkpoint", "more GB/s with --storage"
    else:
        given = "" if request.save_cost is None else f"--save-cost {request.save_cost}: "
        what, move = f"{given}a save", "less with --save-cost"
    raise ConfigError(
        f"{what} takes {format_seconds(costs.whole_save_seconds)}, longer than the run of "
        f"{format_seconds(request.days * DAY)}: give {move}, or more --days"
    )


def costs_of(request: SimulationRequest, cluster: Cluster) -> Costs:
    """From the plan of the model, where there is one; what the user gives comes first."""
    if not request.arguments:
        return _costs_as_given(request)
    name, size, each, best = _planned(request, cluster)
    speed, because = _storage(request.storage, cluster)
    through = size / speed
    copy = size / cluster.num_devices / (cluster.host_bandwidth or 0.0) if cluster.host_bandwidth else 0.0
    step, save, load = (_seconds(text, name) for text, name in _texts(request))
    notes = [f"a checkpoint is {format_bytes(size)}: {each:.3g} bytes a parameter, written while training goes on"]
    if because:
        notes.append(f"storage takes {format_bytes(speed)}/s, because {because}")
    layout = best.choice.layout
    if step is None:
        notes.append(f"a step takes {format_seconds(best.step_seconds.expected)} ({layout}), because the plan says so")
    return Costs(
        model=name,
        step_seconds=best.step_seconds.expected if step is None else step,
        save_seconds=copy if save is None else save,
        write_seconds=through,
        load_seconds=through if load is None else load,
        replica_nodes=math.ceil(layout.tp * layout.cp * layout.pp / cluster.devices_per_node),
        notes=tuple(notes),
    )


def _costs_as_given(request: SimulationRequest) -> Costs:
    """Of no model. Raises ConfigError for an option whose figure would come from one."""
    options = ("--layout", request.layout), ("--global-batch", request.global_batch), ("--storage", request.storage)
    if without := [option for option, given in options if given is not None]:
        verb = "belongs" if len(without) == 1 else "belong"
        load = "; what storage costs, --save-cost and --load say" if request.storage is not None else ""
        raise ConfigError(f"{' and '.join(without)} {verb} to a model: name one, such as llama3-405b{load}")
    times = [_seconds(text, name) or 0.0 for text, name in _texts(request)]
    left = [name for text, name in _texts(request) if text is None]
    nothing = f", and nothing where it is left out ({', '.join(left)})" if left else ""
    note = f"no model is named: a step, a save and a load take what is given{nothing}"
    return Costs("", times[0], times[1], 0.0, times[2], 1, (note,))


def _storage(given: float | None, cluster: Cluster) -> tuple[float, str]:
    """Bytes/s of all nodes together, and why; "": the user has said so."""
    if given is not None:
        return given * 1e9, ""
    if cluster.storage_bandwidth is not None:
        return cluster.storage_bandwidth * cluster.nodes, f"{cluster.name} says so for each node (storage_gb_per_s)"
    return STORAGE_PER_DEVICE * cluster.num_devices, "Llama 3's took as much for as many devices"


def _texts(request: SimulationRequest) -> tuple[tuple[str | None, str], ...]:
    return (request.step, "--step"), (request.save_cost, "--save-cost"), (request.load, "--load")


def _planned(request: SimulationRequest, cluster: Cluster) -> tuple[str, float, float, Estimate]:
    """The model's name, the bytes of a checkpoint and of each parameter there, and the estimate of what it runs as."""
    asked = PlanRequest(request.arguments, (request.cluster,), layout=request.layout, global_batch=request.global_batch)
    question = ask(asked, find_subject(asked), cluster).question
    plan = make_plan(question)
    if plan.best is None:
        why = plan.closest.because if plan.closest else f"every layout is refused: {plan.refusals[0].because}"
        raise ConfigError(f"{plan.model} does not run on {cluster.name}: {why}; see `allranks plan`")
    best = plan.best.estimate
    profile = question.make_profile(question.seq, best.choice.precision)
    size = state_bytes(profile, setting_of(best.choice))
    return plan.model, size, size / profile.parameters, best


def operation_of(
    request: SimulationRequest, cluster: Cluster, costs: Costs, model: FailureModel
) -> tuple[Operation, tuple[str, ...]]:
    """How the run is kept, and what was decided for the user."""
    notes = []
    every = _seconds(request.every, "--every")
    disk = Tier("storage", Scope.CLUSTER, every or DAY, costs.save_seconds, costs.write_seconds, costs.load_seconds)
    tiers: tuple[Tier, ...] = (disk,)
    peer = _seconds(request.peer_every, "--peer-every")
    if peer:
        tiers = (Tier("peer's memory", Scope.NODE, peer, costs.save_seconds, costs.save_seconds), disk)
    spares = request.spares
    if spares is None:
        spares = enough_spares(cluster.nodes, model)
        notes.append(f"{spares} spare nodes, because so many are under repair at most in 999 of 1000 moments")
    operation = Operation(
        nodes=cluster.nodes,
        spares=spares,
        seconds=request.days * DAY,
        tiers=tiers,
        detect_seconds=_time(request.detect, "--detect"),
        restart_seconds=_time(request.restart, "--restart"),
        elastic_nodes=costs.replica_nodes if request.elastic else 0,
    )
    if every is None:
        every = best_interval(operation, model, costs.shortest_seconds)
        notes.append(f"a checkpoint every {format_seconds(every)}, because {_why_every(every, costs, model, cluster)}")
        operation = replace(operation, tiers=(*tiers[:-1], replace(disk, every_seconds=every)))
    return operation, tuple(notes)


def _why_every(every: float, costs: Costs, model: FailureModel, cluster: Cluster) -> str:
    """Why an interval is that of `best_interval`."""
    if not model.per_second(cluster.nodes):
        return "nothing fails: that is the whole run"
    if every > costs.shortest_seconds:
        return "Daly's formula says so"
    below = "Daly's formula says less" if costs.save_seconds else "a save costs training nothing"
    if every == costs.whole_save_seconds:
        return f"a save takes so long, and {below}"
    if every == costs.step_seconds:
        return f"a step takes so long, and {below}"
    return f"{below}, and a shorter one is not looked at"


def _seconds(text: str | None, option: str) -> float | None:
    return None if text is None else _time(text, option)


def _time(text: str, option: str) -> float:
    """Seconds; nothing at all is a time too. Raises ConfigError with the forms that there are."""
    return 0.0 if text.strip() in ("0", "0s") else read_number(text, TIMES, option)


def document(found: Simulation) -> dict[str, Any]:
    """The simulation for programs; a scope goes by its name."""
    return asdict(found, dict_factory=lambda pairs: {name: _plain(value) for name, value in pairs})


def _plain(value: object) -> object:
    return value.name.lower() if isinstance(value, Scope) else value
