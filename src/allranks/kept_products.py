"""Which matrix products of a block recompute=selective keeps: the rule by which the engine runs and a plan counts."""


def keeps_product(number: int) -> bool:
    """Whether the result of a block's `number`th matrix product, counted from 1 in the order of its forward, is kept.

    Every second one, from the first on. Source: TorchTitan's policy for single operations (arXiv 2410.06511).
    """
    return number % 2 == 1
