"""What holds for every section, and how lengths and degrees complete each other."""

import pytest
from pydantic import ValidationError

from allranks.config_keys import SECTIONS
from allranks.config_sections import LayoutConfig, Section, TrainConfig


def test_naming_one_degree_makes_the_others_one_and_naming_none_leaves_the_choice() -> None:
    assert not LayoutConfig().chosen
    named = LayoutConfig(tp=2)
    assert named.chosen
    assert (named.dp_replicate, named.dp_shard, named.tp, named.ep) == (1, 1, 2, 1)


@pytest.mark.parametrize("section", SECTIONS.values(), ids=lambda section: section.__name__)
def test_a_section_is_made_of_defaults_is_frozen_and_takes_no_other_key(section: type[Section]) -> None:
    made = section()
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        section.model_validate({"qqqq": 1})
    for name in section.model_fields:
        with pytest.raises(ValidationError, match="frozen"):
            setattr(made, name, None)


def test_a_length_is_steps_or_epochs_and_one_epoch_where_neither_is_given() -> None:
    assert (TrainConfig().steps, TrainConfig().epochs) == (None, 1)
    assert (TrainConfig(steps=4).steps, TrainConfig(steps=4).epochs) == (4, None)
    assert TrainConfig(epochs=3).epochs == 3


def test_only_one_degree_takes_what_is_left() -> None:
    with pytest.raises(ValidationError, match="dp_replicate and pp both take what is left"):
        LayoutConfig(dp_replicate="*", pp="*")
    assert LayoutConfig(dp_replicate="nodes", dp_shard="*").dp_replicate == "nodes"
