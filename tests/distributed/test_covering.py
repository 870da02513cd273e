"""The rule by which `make test` takes few cases of a large table."""

from itertools import product

from tests.distributed.covering import covering_sample, pairs


def test_every_pair_is_covered_by_few() -> None:
    table = list(product("abcdef", range(4), "xy", "pqr", (True, False)))
    chosen = covering_sample(table)
    assert set().union(*map(pairs, chosen)) == set().union(*map(pairs, table))
    # 6 * 4 pairs of the two largest columns need 24 cases; greed may take a few more.
    assert 24 <= len(chosen) <= 30


def test_pairs_that_no_case_holds_are_not_missed() -> None:
    table = [case for case in product("abc", range(3), "xy") if case[0] != "a" or case[1] == 0]
    chosen = covering_sample(table)
    assert set().union(*map(pairs, chosen)) == set().union(*map(pairs, table))
    assert set(chosen) <= set(table)


def test_the_choice_is_fixed_and_in_order() -> None:
    table = list(product("abc", "de", "fg"))
    chosen = covering_sample(table)
    assert chosen == covering_sample(table)
    assert chosen == sorted(chosen)
    assert chosen[0] == table[0]


def test_a_column_of_one_value_costs_nothing() -> None:
    assert len(covering_sample(list(product("a", "b", "cd")))) == 2
    assert covering_sample([]) == []
