"""A dry run as text and as a picture: the verdict first, and nothing wider than the terminal."""

from dataclasses import replace
from xml.etree import ElementTree

from allranks.rehearsal import Finding, Remedy
from allranks.rehearsed_messages import Collective, Transfer
from allranks.reporting.rehearsal_text import draw_moments, render_moments, render_rehearsal, render_verdict
from tests.test_rehearsal import rank, rehearsal


def test_the_verdict() -> None:
    assert render_verdict(rehearsal()) == "fits: 600 B of 1.0 kB at the peak, 300 B free beside a margin of 100 B"
    full = rehearsal(rank(0, 950))
    assert render_verdict(full) == ("does not fit: 950 B of 1.0 kB at the peak, 50 B too much beside a margin of 100 B")
    fatal = replace(rehearsal(), findings=(Finding("hang", "ranks 0 and 3 part", "let them not", fails=True),))
    assert render_verdict(fatal).startswith("would fail: see Found")


def test_what_waits_on_the_host_and_what_crosses() -> None:
    assert "host's memory" not in render_rehearsal(rehearsal())
    waits = replace(
        rank(),
        host_peak_bytes=5000,
        host_by_category={"weights": 2000, "optimizer": 3000},
        transfers=(Transfer("parameters", "device", 4000, 6),),
    )
    told = replace(rehearsal(waits), host_bandwidth=2e4)
    text = render_rehearsal(told)
    for part in (
        *("What waits in the host's memory for rank 0: 5.0 kB at most", "optimizer  3.0 kB"),
        *(
            "in a step, over a link of 20.0 kB/s in each direction",
            "parameters  device      6  4.0 kB               0.2 s",
        ),
    ):
        assert part in text
    assert render_verdict(replace(told, host_capacity_bytes=4000.0)) == (
        "does not fit: 5.0 kB would wait in the host's memory, of which a process has 4.0 kB (600 B of 1.0 kB at the "
        "peak)"
    )


def test_all_of_it() -> None:
    told = replace(
        rehearsal(rank(0, 600, Finding("unsharded", "w lies whole", "cut it")), rank(63)),
        remedies=(
            Remedy("layout.recompute=full", 250, slower=0.301, by="estimate", margin_bytes=90.0, fits=True),
            Remedy("task.chunk=1024", 700, slower=0.02, by="FLOPs", margin_bytes=340.0, fits=False),
            Remedy("layout.sharding=full", None, "there is nobody"),
        ),
        decisions=("4 of 10 blocks were traced, because blocks of one kind do the same",),
        unrehearsed=("kernels of CUDA",),
    )
    lines = render_rehearsal(told).splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[1].startswith("fits: 600 B")
    text = "\n".join(lines)
    for part in (
        *("What fills rank 0 at its peak (backward of layers.3)", "activations  500 B    83%"),
        *("task.py:3 forward", "rank 0: w lies whole; cut it"),
        "layout.recompute=full  250 B   350 B    90 B   yes  +30% (estimate)",
        "task.chunk=1024        700 B  -100 B   340 B    no  +2% FLOPs",
        "layout.sharding=full       -       -       -     -  there is nobody",
        *("kernels of CUDA", "4 of 10 blocks were traced"),
    ):
        assert part in text


def test_collectives_that_are_not_shown_are_counted() -> None:
    many = tuple(Collective("tp", "all-reduce", 100 - n, 2, 4, f"task.py:{n} forward") for n in range(27))
    text = render_rehearsal(rehearsal(replace(rank(), collectives=many)))
    assert "task.py:23 forward" in text and "task.py:24" not in text
    (line,) = [line.split() for line in text.splitlines() if " more " in line]
    assert line == ["3", "more", "6", "225", "B", "all", "of", "them:", "--json"]
    assert "more" not in render_rehearsal(rehearsal(replace(rank(), collectives=many[:24])))


def test_the_next_move_comes_last() -> None:
    assert render_rehearsal(rehearsal(rank(0, 950))).splitlines()[-1].startswith("Next: --remedies rehearses changes")
    assert "Next: " not in render_rehearsal(rehearsal())


def test_moments_as_text_and_picture() -> None:
    text = render_moments(rank())
    assert "layers.1 x 7" in text and "600 B" in text
    assert "wwww" + "a" * 16 + "----" in text  # 100 and 400 of 600 bytes, at most all of them, in 24 cells
    assert text.splitlines()[-1].strip() == "in use after: w weights, a activations, - at most"
    picture = ElementTree.fromstring(draw_moments(rank()))
    assert picture.tag.endswith("svg")
    words = "".join(picture.itertext()).replace("\xa0", " ")
    for part in ("layers.1 x 7", "one step of rank 0", "500 B", "600 B", "compute", "a activations"):
        assert part in words


def test_a_row_of_moments_is_one_line() -> None:
    """What experts exchange in blocks that stand for others has a long name, and its bar is whole."""
    one = rank()
    longest = replace(
        one.moments[-1], what="reduce-scatter", unit="encoder.layers.30 over ep", times=29, num_bytes=146_900_000
    )
    text = render_moments(replace(one, moments=(*one.moments, longest)))
    assert len(text.splitlines()) == len(one.moments) + 4, "a title, headings, the rows, the letters"
    assert "encoder.layers.30 over ep x 29" in text
