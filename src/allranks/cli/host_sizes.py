"""How many workers each of several hosts starts, and which layout that makes, for every number of hosts of a run."""

from typing import TYPE_CHECKING

from allranks.errors import AllranksError, LayoutError
from allranks.hosts_request import HostsRequest
from allranks.layout import num_processes, render_layout
from allranks.request import TrainRequest
from allranks.verdict import Decision

if TYPE_CHECKING:
    from allranks.layout import Layout
    from allranks.training.prepare import Prepared


def choose_workers(prepared: "Prepared", request: TrainRequest, hosts: HostsRequest) -> tuple[int, Decision]:
    """How many workers this host starts. Raises LayoutError where the layout's do not divide over the hosts."""
    import torch

    from allranks.training.choose_processes import fewer_for_batch

    if request.nproc is not None:
        return request.nproc, Decision(_on(request.nproc * hosts.nodes, hosts), "--nproc says so")
    gpus = torch.cuda.device_count() if request.device != "cpu" else 0
    total = num_processes(prepared.config.layout, max(1, gpus) * hosts.nodes, hosts.nodes)
    if total % hosts.nodes and hosts.least < hosts.nodes:
        total = max(1, gpus) * hosts.nodes  # those that are left over are spares
    if total % hosts.nodes:
        raise LayoutError(f"the layout asks for {total} processes, which {hosts.nodes} hosts cannot share: say --nproc")
    because = f"{gpus} GPU(s) a host" if gpus else "without a GPU, one a host"
    batch = prepared.config.train.global_batch
    fewer = fewer_for_batch(prepared, total, hosts.nodes)
    if fewer < total:
        total = fewer
        because = f"train.global_batch={batch} gives no more than that a sample, and every host starts as many"
    return total // hosts.nodes, Decision(_on(total, hosts), because)


def _on(processes: int, hosts: HostsRequest) -> str:
    return f"{processes} processes on {hosts.nodes} hosts" + ("" if hosts.least == hosts.nodes else " at most")


def is_left_to_plan(prepared: "Prepared", nproc: int, hosts: HostsRequest) -> bool:
    """Whether the host that leads plans the layout, of which nothing can be said before."""
    return prepared.is_open and nproc * hosts.nodes > 1


def layout_of_hosts(prepared: "Prepared", nproc: int, hosts: HostsRequest) -> tuple["Layout", tuple[Decision, ...]]:
    """The layout with as many hosts as there may be; with what is left over then, and how few can train.

    Raises:
        LayoutError: it does not fit a fixed number of hosts, or none of those that a run may have.
    """
    from allranks.training.prepare import resolve_layout
    from allranks.training.seats import seat_workers

    if hosts.least == hosts.nodes:
        return resolve_layout(prepared.config, nproc * hosts.nodes, hosts.nodes), ()
    name = render_layout(prepared.config.layout)
    try:
        seats = seat_workers(prepared.config, [nproc] * hosts.nodes)
    except LayoutError as error:
        raise LayoutError(f"--nodes {hosts.words} with {nproc} worker(s) a host: {error}") from error
    training = sum(map(bool, seats))
    if training < hosts.least:
        raise LayoutError(
            f"--nodes {hosts.words} with {nproc} worker(s) a host: layout {name} and train.global_batch="
            f"{prepared.config.train.global_batch} never take more than {sum(seats)} workers, on {training} host(s): "
            f"say --nodes {training}:{hosts.nodes}, or name one axis with `*`"
        )
    layout = resolve_layout(prepared.config, sum(seats), training)
    told = []
    if sum(seats) < nproc * hosts.nodes:
        what = f"of {nproc * hosts.nodes} workers on {hosts.nodes} hosts {sum(seats)} train, and the others are spares"
        told.append(Decision(what, f"layout {name} and the global batch take no more"))
    fewest = next(nodes for nodes in range(1, training + 1) if _fits(prepared, [nproc] * nodes))
    if fewest > hosts.least:
        told.append(Decision(f"{fewest} hosts at least", f"layout {name} takes no fewer"))
    return layout, tuple(told)


def _fits(prepared: "Prepared", workers: list[int]) -> bool:
    from allranks.training.seats import seat_workers

    try:
        seat_workers(prepared.config, workers)
    except LayoutError:
        return False
    return True


def check_all_sizes(prepared: "Prepared", nproc: int, hosts: HostsRequest) -> None:
    """See that the layout takes all workers of every number of hosts that the run may have. Raises LayoutError."""
    from allranks.training.prepare import resolve_layout

    for nodes in range(hosts.least, hosts.nodes):
        try:
            resolve_layout(prepared.config, nproc * nodes, nodes)
        except AllranksError as error:
            raise LayoutError(f"--nodes {hosts.words}: with {nodes} of them, {error}") from error


def plan_for_hosts(
    prepared: "Prepared", request: TrainRequest, hosts: HostsRequest, nproc: int
) -> tuple["Prepared", tuple[Decision, ...]]:
    """With the layout that a plan decides for all hosts together, if it fits every number of them; else ddp.

    Nobody has named a layout that would leave workers over. Raises LayoutError as `layout_of_hosts`.
    """
    from allranks.surviving.aside import call_aside
    from allranks.training.planned_layout import decide_layout, settle, unplanned

    found = decide_layout(prepared, request, nproc * hosts.nodes, call_aside, hosts.nodes)
    try:
        check_all_sizes(settle(prepared, found), nproc, hosts)
    except LayoutError as error:
        found = unplanned(str(error))
    settled = settle(prepared, found)
    _, told = layout_of_hosts(settled, nproc, hosts)
    return settled, (*found.decisions, *told)
