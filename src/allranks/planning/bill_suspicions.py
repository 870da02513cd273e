"""Prices and watts that a device could have, and that are more probably those of something else: said in a plan."""

from collections.abc import Iterator

from allranks.cluster import Cluster
from allranks.planning.cluster_limits import FEW_WATTS, is_fast

LIKE_A_DOLLAR = ("USD", "EUR", "GBP", "CHF", "CAD", "AUD", "NZD", "SGD")
"""Currencies whose unit buys about as much; of another one no price is suspected."""
MOST_PRICE, LEAST_PRICE = 25, 0.01  # of a device's hour: clouds ask 0.1 to 15
BOUGHT_PRICE = 1000  # what a whole node costs for an hour is less, and what a card costs to buy is more
MOST_USUAL_WATTS = 3000  # the hungriest device of the catalog takes 1400
LEAST_WATTS = 1  # of one process's share of a processor
SECONDS_OF_AN_HOUR = 3600


def suspect_price(cluster: Cluster, key: str) -> Iterator[str]:
    """The cluster's price of a device and hour, which `key` gave: a note where it is that of something else."""
    price, per_node = cluster.device_hour_price, cluster.devices_per_node
    if price is None or cluster.currency.upper() not in LIKE_A_DOLLAR:
        return
    given = f"{key} = {price:.12g} is {{}} than any device costs for an hour; "
    if price > MOST_PRICE:
        many = f"is it that of a node? Over {per_node} devices it is {price / per_node:.3g}"
        yield given.format("more") + (
            "is it what a device costs to buy? A plan takes its price for one hour"
            if price >= BOUGHT_PRICE or per_node == 1
            else many
        )
    if price < LEAST_PRICE and is_fast(cluster.device.peak_flops):
        hour = price * SECONDS_OF_AN_HOUR
        yield given.format("less") + f"is it that of a second? For an hour it is {hour:.3g}"


def suspect_watts(cluster: Cluster, key: str) -> Iterator[str]:
    """The cluster's watts of a device, which `key` gave: a note where they are kilowatts, or those of a node."""
    watts, per_node = cluster.device_watts, cluster.devices_per_node
    if watts is None:
        return
    if watts < (FEW_WATTS if is_fast(cluster.device.peak_flops) else LEAST_WATTS):
        yield (
            f"{key} = {watts:.12g} is less than {cluster.device.name} takes under load; did you mean"
            f" {watts:.12g} kW = {watts * 1000:.12g} W?"
        )
    if watts > MOST_USUAL_WATTS and per_node > 1:
        yield (
            f"{key} = {watts:.12g} is more than any device of today takes; is it that of a node? Over {per_node}"
            f" devices it is {watts / per_node:.4g}"
        )
