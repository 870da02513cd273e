"""What a number of tokens takes: time, money and energy; and whether that is within the limits."""

import math

from allranks.cluster import Cluster
from allranks.errors import ConfigError
from allranks.plan import Bill, Estimate, Span
from allranks.planning.question import Question
from allranks.units import format_count, format_seconds

HOUR = 3600.0


def bill_of(found: Estimate, tokens: float, tokens_per_sample: int, cluster: Cluster) -> Bill:
    """What it takes to train on `tokens` at this step time, without failures.

    Arithmetic: steps times seconds; devices and hours times the price and the watts that somebody gave.
    """
    steps = math.ceil(tokens / (found.choice.global_batch * max(1, tokens_per_sample)))
    seconds = found.step_seconds
    whole = Span(steps * seconds.low, steps * seconds.expected, steps * seconds.high)
    hours = whole.expected / HOUR * cluster.num_devices
    price, watts = cluster.device_hour_price, cluster.device_watts
    missing = [noun for noun, known in (("price", price), ("watts", watts)) if known is None]
    because = f"from {cluster.price_source}" if cluster.price_source else "as given"
    if missing:
        keys = {"price": "price_per_device_hour", "watts": "watts_per_device"}
        because = (
            f"no {' and no '.join(missing)}: give {' and '.join(keys[noun] for noun in missing)} in a cluster file"
        )
        because += ", or --price" if "price" in missing else ""
    return Bill(
        tokens=tokens,
        steps=steps,
        seconds=whole,
        device_hours=hours,
        money=None if price is None else _times(whole, cluster.num_devices / HOUR * price),
        currency=cluster.currency,
        kilowatt_hours=None if watts is None else _times(whole, cluster.num_devices / HOUR * watts / 1000),
        because=because,
    )


def _times(span: Span, factor: float) -> Span:
    """Arithmetic: of a product with a known factor all three are multiplied."""
    return Span(factor * span.low, factor * span.expected, factor * span.high)


def check_limits(question: Question) -> None:
    """Raises ConfigError for a limit that cannot be computed."""
    for limit, name in ((question.limit_seconds, "--deadline"), (question.limit_money, "--budget")):
        if limit is not None and question.tokens is None:
            raise ConfigError(f"{name} needs --tokens: how many are trained on by then, e.g. --tokens 15T")
    if question.limit_money is not None and question.cluster.device_hour_price is None:
        raise ConfigError(
            f"--budget needs a price: add --price for a device and hour, or price_per_device_hour to a cluster file"
            f" ({question.cluster.name} has none, because prices belong to a user)"
        )


def unmet_limits(bill: Bill | None, question: Question) -> tuple[str, ...]:
    """The limits that a bill does not keep, one line each with what is closest."""
    if bill is None:
        return ()
    found = []
    if question.limit_seconds is not None and bill.seconds.expected > question.limit_seconds:
        found.append(
            f"{format_seconds(bill.seconds.expected)} for {format_count(bill.tokens)} tokens on"
            f" {question.cluster.num_devices} devices, more than the deadline of"
            f" {format_seconds(question.limit_seconds)}"
        )
    if question.limit_money is not None and bill.money is not None and bill.money.expected > question.limit_money:
        found.append(
            f"{bill.money.expected:,.0f} {bill.currency} for {format_count(bill.tokens)} tokens on"
            f" {question.cluster.num_devices} devices, more than the budget of"
            f" {question.limit_money:,.0f} {bill.currency}"
        )
    return tuple(found)
