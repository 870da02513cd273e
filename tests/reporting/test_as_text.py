"""What rich draws, as plain text."""

from rich.table import Table
from rich.text import Text

from allranks.reporting.as_text import as_text, breakable


def test_parts_stand_below_each_other_without_colours_and_without_spaces_at_the_ends() -> None:
    table = Table("name", "bytes", box=None)
    table.add_row("weights", "12")
    drawn = as_text([Text("first", style="bold red"), table], 40)
    assert [line.split() for line in drawn.splitlines()] == [["first"], ["name", "bytes"], ["weights", "12"]]
    assert "\x1b" not in drawn and all(line == line.rstrip() for line in drawn.splitlines())


def test_no_line_is_wider() -> None:
    assert max(map(len, as_text([Text("a word and another " * 9)], 30).splitlines())) <= 30


def test_lines_may_end_behind_the_commas_of_a_layout_and_nowhere_inside_its_words() -> None:
    layout = "dp_replicate=2,dp_shard=8,recompute=full"
    assert as_text([breakable(f"so {layout} has 1,000 of them")], 22).splitlines() == [
        *("so dp_replicate=2,", "dp_shard=8,", "recompute=full has", "1,000 of them")
    ]
    assert as_text([breakable(layout)], 80) == layout
