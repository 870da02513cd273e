"""A Simulation for the tests of its renderers."""

from allranks.simulation import CAUSES, DAY, FailureModel, Interval, Operation, Outcome, Scope, Simulation, Tier


def outcome(
    goodput: float = 0.9, *, spares: int = 2, every: float = 600.0, restart: float = 300.0, error: float = 0.0002
) -> Outcome:
    """Of 10 nodes in 10 days: what is not training waits for nodes."""
    shares = {**dict.fromkeys(CAUSES, 0.0), "productive": goodput, "waiting": 1 - goodput}
    operation = Operation(10, spares, 10 * DAY, (Tier("storage", Scope.RACK, every),), restart_seconds=restart)
    goodputs = Interval(goodput - 0.01, goodput, goodput + 0.01)
    errors = dict.fromkeys(CAUSES, error)
    return Outcome(operation, goodputs, Interval(20, 24, 30), shares, errors, 50, goodput - 0.9, error / 2)


def simulation(**changes: object) -> Simulation:
    """Of a model with a tag in its name."""
    values: dict[str, object] = {
        "model": "<b>tiny</b>",
        "cluster": "10x8:h100",
        "failures": FailureModel("x", (), source="somebody's log"),
        "devices_per_node": 8,
        "chosen": outcome(),
        "formula": 0.91,
        "formula_because": "somebody",
        "intervals": (outcome(0.92, every=300.0), outcome()),
        "best_every_seconds": 300.0,
        "young_seconds": 310.0,
        "daly_seconds": 305.0,
        "spares": (outcome(0.5, spares=0), outcome(), outcome(0.901, spares=9)),
        "best_spares": 2,
        "faster": outcome(0.915, restart=150.0),
        "notes": ("a note, because of something",),
    }
    return Simulation(**{**values, **changes})  # type: ignore[arg-type]
