"""A Question into a Plan: search, the plain families, what-ifs, the bill; and how many devices or positions do."""

import math
from collections.abc import Mapping
from dataclasses import replace

from allranks.errors import LayoutError
from allranks.plan import Checked, Estimate, Plan, Ranked, Refusal
from allranks.planning.bills import bill_of, check_limits, unmet_limits
from allranks.planning.changes import usual_changes, what_if
from allranks.planning.checking import front_of, search_checked
from allranks.planning.choices import Space
from allranks.planning.families import plain_families
from allranks.planning.host_traffic import vendors_host
from allranks.planning.least import least_over
from allranks.planning.offloaded import with_parameters_on_host
from allranks.planning.question import Question
from allranks.planning.reasons import refused_by_host, why_first, why_not, why_unfit
from allranks.planning.room import shared_with_host
from allranks.planning.scale import cluster_of, fewest_nodes, largest, sizes_of, step_of
from allranks.planning.search import Found, Search
from allranks.planning.upkeep_cost import left_out

SHOWN = 6
"""Runners-up of the Pareto front that a plan keeps."""

LOOKED_BEYOND = 2
"""Numbers of devices behind the closest, each further from a limit, before a search ends."""

UNFIT = 1e30
"""Further from a limit than any plan that fits."""

BELOW_RATE = "they cannot keep the limit at the full rate of their products"

SEQ_STEP, SEQ_MOST = 1024, 2**24


def make_plan(question: Question) -> Plan:
    """The plan that answers `question`.

    Raises:
        LayoutError: the layout that the user wrote does not fit the cluster.
        ConfigError: a limit or a what-if that cannot be computed.
    """
    check_limits(question)
    search, checked = search_checked(question)
    space = search.space
    families, refused = plain_families(search)
    found = search.found
    profile = next(iter(space.profiles.values()))
    first = found.best or found.nearest
    # What was counted of one is not known of its changes: they are compared with what was planned of it.
    before = next((one.planned for one in checked if first and one.planned.choice == first.choice), first)
    bill = None
    if question.tokens is not None and found.best is not None:
        bill = bill_of(found.best, question.tokens, profile.tokens, question.cluster)
    changes = () if first is None else (*usual_changes(first, question), *question.what_ifs)
    offloaded, by_host = _on_host(space, found, question)
    return Plan(
        model=profile.name,
        cluster=question.cluster.name,
        machine=question.cluster.machine,
        searched=found.num_choices,
        best=_best(found),
        others=_others(found, families, checked),
        refusals=_refusals(found, [*by_host, *refused]),
        closest=_nearest(found, checked),
        notes=(
            *(*question.notes, *question.cluster.notes, *_of_hosts(first, offloaded, question)),
            *_of_no_dry_run(found, checked, question),
            *left_out(question.cluster, question.upkeep),
        ),
        num_devices=question.cluster.num_devices,
        nodes=question.cluster.nodes,
        parameters=profile.parameters,
        seq=profile.seq,
        what_ifs=tuple(what_if(change, before, question) for change in dict.fromkeys(changes)) if before else (),
        bill=bill,
        unmet=unmet_limits(bill, question),
        checked=checked,
        offloaded=offloaded,
    )


def _on_host(space: Space, found: Found, question: Question) -> tuple[Ranked | None, list[Refusal]]:
    """Where nothing fits: what does with parameters in the hosts' memory, and what that memory is too small for."""
    if found.best is not None or found.nearest is None:
        return None, []
    offloaded = with_parameters_on_host(space, found.nearest, checked=question.rehearse is not None)
    refused = [refusal for refusal in (refused_by_host(found.nearest), offloaded) if isinstance(refusal, Refusal)]
    return (offloaded if isinstance(offloaded, Ranked) else None), refused


def _nearest(found: Found, checked: tuple[Checked, ...]) -> Ranked | None:
    """Where nothing fits, what comes nearest, and whether a dry run says so."""
    if found.best is not None or found.nearest is None:
        return None
    counted = any(one.corrected is found.nearest and not found.nearest.fault for one in checked)
    return Ranked(found.nearest, why_unfit(found.nearest) + ("; a dry run has counted that" if counted else ""))


def _of_no_dry_run(found: Found, checked: tuple[Checked, ...], question: Question) -> list[str]:
    """That nothing was rehearsed, where it was asked for."""
    if question.rehearse is None or checked:
        return []
    refused = "every layout is refused"
    late = "its time was up, or what it had met before speaks against every dry run"
    return [f"--check has rehearsed nothing, because {refused if found.nearest is None else late}"]


def _of_hosts(first: Estimate | None, offloaded: Ranked | None, question: Question) -> list[str]:
    """How much of its memory a processor gives; that hosts are the vendor's, where something is to wait there."""
    moved = first is not None and first.host_bytes > 0
    asked = any(change.startswith("offload=") for change in question.what_ifs)
    words = vendors_host(question.cluster) if moved or asked or offloaded is not None else ""
    return [line for line in (shared_with_host(question.cluster), words) if line]


def plan_gpus(question: Question) -> Plan:
    """The plan on the fewest devices, of those tried, that fit and keep the limits; on the closest where none does.

    Numbers that cannot keep a limit at the full rate of their products are not searched (`least_over`); where none can,
    the closest is looked for from the end that is nearer to the limit.
    """
    check_limits(question)
    refused, closest = dict[int, str](), None
    sizes = list(sizes_of(question.cluster))
    possible = [number for number in sizes if _keeps_rate(_with_devices(question, number))]
    for number in possible:
        why = _why_not_enough(_with_devices(question, number))
        if why is None:
            return _plan_fewest(question, sizes[: sizes.index(number)], number, refused)
        if why[0] is not None and (closest is None or why[0] < closest[0]):
            closest = (why[0], number, why[1])
        refused[number] = why[1]
    if not possible:
        closest = _closest(question, sizes)
    number = question.cluster.num_devices if closest is None else closest[1]
    last = _do_not_do(refused) if refused else "none keeps the limit at the full rate of its products"
    none = f"no number of devices does{_unchecked(question)}"
    note = f"{none}; {number} come closest: {last if closest is None else closest[2]}"
    return make_plan(replace(_with_devices(question, number), notes=(*question.notes, note)))


def _plan_fewest(question: Question, smaller: list[int], found: int, refused: dict[int, str]) -> Plan:
    """The plan on the fewest devices between the last of `smaller`, which does not do, and `found`, which does."""

    def does(number: int) -> bool:
        there = _with_devices(question, number)
        why = _why_not_enough(there) if _keeps_rate(there) else (None, BELOW_RATE)
        if why is not None:
            refused[number] = why[1]
        return why is None

    number = fewest_nodes(does, max(smaller, default=0), found, step_of(question.cluster))
    refused = {tried: why for tried, why in (dict.fromkeys(smaller, BELOW_RATE) | refused).items() if tried < number}
    told = f"{number} devices are the fewest"
    if len(refused) < number - 1:
        told += " of the numbers tried"
    if refused:
        told += f", because {_do_not_do(refused)}"
    return make_plan(replace(_with_devices(question, number), notes=(*question.notes, told)))


def _do_not_do(refused: Mapping[int, str]) -> str:
    last = max(refused)
    return f"{last} do not do: {refused[last]}"


def _keeps_rate(question: Question) -> bool:
    """Whether the limits could be kept at the full rate of every product."""
    return least_over(question) <= 1.0


def _with_devices(question: Question, number: int) -> Question:
    return question.on(cluster_of(question.cluster, number))


def _closest(question: Question, sizes: list[int]) -> tuple[float, int, str] | None:
    """Of numbers that all miss a limit: the one that misses it by the least, until two in a row are further from it.

    More devices take less time, until the batch leaves them idle; fewer cost less, until they do not hold the model.
    """
    late = question.limit_seconds is not None and least_over(
        replace(_with_devices(question, sizes[-1]), limit_money=None)
    )
    best, worse = None, 0
    for number in sizes[::-1] if late and late > 1.0 else sizes:
        why = _why_not_enough(_with_devices(question, number))
        if why is None or why[0] is None:
            continue
        if best is None or why[0] < best[0]:
            best, worse = (why[0], number, why[1]), 0
        else:
            worse += 1
        if worse == LOOKED_BEYOND and best[0] < UNFIT:
            break
    return best


def _why_not_enough(question: Question) -> tuple[float | None, str] | None:
    """None where the cluster does; else how far it is from that (bytes, seconds or money, less is closer) and why."""
    try:
        space = question.space()
    except LayoutError as error:
        return None, str(error)
    found = Search(space).run()
    if found.best is None:
        if found.nearest is None:
            return None, _first_refusal(found)
        return UNFIT + found.nearest.peak_bytes.high, why_unfit(found.nearest)
    if question.tokens is None:
        return None
    profile = next(iter(space.profiles.values()))
    bill = bill_of(found.best, question.tokens, profile.tokens, question.cluster)
    unmet = unmet_limits(bill, question)
    over = bill.seconds.expected / question.limit_seconds if question.limit_seconds else 0.0
    if question.limit_money and bill.money is not None:
        over = max(over, bill.money.expected / question.limit_money)
    return (over, unmet[0]) if unmet else None


def plan_seq(question: Question) -> Plan:
    """The plan of the longest samples that fit, in steps of 1024 positions, or of as many times that as the written
    layout can cut; of the shortest where none does.

    Raises LayoutError where the written layout does not fit the cluster.
    """
    step = math.lcm(SEQ_STEP, question.parts_of_sequence())
    longest = largest(lambda length: _fits(question.of_length(length)), step, SEQ_MOST)
    if longest == 0:
        shortest = question.of_length(step)
        return make_plan(replace(shortest, notes=(*shortest.notes, _why_not_even(shortest, step))))
    note = f"{longest} positions are the most (in steps of {step}), because {_why_no_longer(question, longest, step)}"
    found = question.of_length(longest)
    return make_plan(replace(found, notes=(*found.notes, note)))


def _why_not_even(shortest: Question, step: int) -> str:
    found = Search(shortest.space()).run()
    if found.nearest is None:
        return f"samples of {step} positions are refused, and no longer ones are looked at: {_first_refusal(found)}"
    return f"samples of {step} positions do not fit{_unchecked(shortest)}, and no longer ones"


def _why_no_longer(question: Question, longest: int, step: int) -> str:
    beyond = longest + step
    if beyond > SEQ_MOST:
        return "no longer ones are looked at"
    found = Search(question.of_length(beyond).space()).run()
    if found.nearest is not None:
        return f"at {beyond} it {why_unfit(found.nearest)}"
    return f"{beyond} are refused: {_first_refusal(found)}"


def _first_refusal(found: Found) -> str:
    refusal = next(iter(found.refusals.values()), None)
    return "every layout is refused" if refusal is None else refusal.because


def _unchecked(question: Question) -> str:
    """Said of what was searched without dry runs, where they may say otherwise."""
    return "" if question.rehearse is None else " as planned"


def _fits(question: Question) -> bool:
    return Search(question.space()).run().best is not None


def _best(found: Found) -> Ranked | None:
    if found.best is None:
        return None
    return Ranked(found.best, why_first(found.best, sum(one.fits for one in found.estimates.values())))


def _others(found: Found, families: list[Ranked], checked: tuple[Checked, ...]) -> tuple[Ranked, ...]:
    """The Pareto front behind the best, what dry runs let drop, then the best of each plain family."""
    runners = front_of(found, {one.planned.choice: one for one in checked})
    taken = {found.best.choice} if found.best is not None else set()
    others: list[Ranked] = []
    for one in runners:
        if one.choice not in taken and len(others) < SHOWN:
            taken.add(one.choice)
            others.append(Ranked(one, why_not(one, found.best)))
    first = found.best or found.nearest
    dropped = [
        Ranked(one.corrected, one.because)
        for one in checked
        if one.corrected and one.outcome == "dropped" and first and one.planned.choice != first.choice
    ]
    return (*others, *dropped, *families)


def _refusals(found: Found, first: list[Refusal]) -> tuple[Refusal, ...]:
    """What the families were refused for first, then the rest; every rule and layout once."""
    every = {(refusal.rule, refusal.layout): refusal for refusal in (*first, *found.refusals.values())}
    return tuple(every.values())
