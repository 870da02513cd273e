"""Every second matrix product is kept, from the first on."""

from allranks.kept_products import keeps_product


def test_every_second_product_is_kept_from_the_first_on() -> None:
    assert [keeps_product(number) for number in range(1, 6)] == [True, False, True, False, True]
