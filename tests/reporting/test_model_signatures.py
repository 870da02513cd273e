"""Of what is said of models the likelier cause comes first, and each is told from the others."""

from allranks.reporting.model_signatures import OF_MODELS


def test_of_two_devices_the_likelier_remedy_comes_first() -> None:
    """Mostly a forward makes a tensor on the processor, or one was not moved; few spread a model by device_map."""
    (e22,) = (one for one in OF_MODELS if one.name == "E22")
    assert e22.regex.search("Tensor on device cuda:0 is not on the expected device: found two different devices meta")
    assert 0 <= e22.next.find("device=x.device") < e22.next.find(".to(x.device)") < e22.next.find("device_map")


def test_types_of_targets_are_told_from_those_of_mixed_precision() -> None:
    """A remedy for buffers helps nobody whose labels are floats."""
    first = {}
    for line in ("expected scalar type Long but found Float", "expected scalar type Half but found Float"):
        first[line] = next(one for one in OF_MODELS if one.regex.search(line))
    targets, buffers = first.values()
    assert (targets.name, buffers.name) == ("E24b", "E24")
    assert ".long()" in targets.next and "buffer" in buffers.next
