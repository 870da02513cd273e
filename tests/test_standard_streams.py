"""What cannot be printed is lost, and nothing else is."""

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from allranks.standard_streams import SteadyStream, steady_streams

PROGRAM = """
import sys
from allranks.standard_streams import steady_streams
from rich.console import Console
with steady_streams():
    for number in range(20_000):
        print("line", number, flush=True)
    Console().print("rich")
    print("to stderr", file=sys.stderr, flush=True)
    kept = open(sys.argv[1], "w")
    kept.write(f"done {kept.fileno()}")
    kept.close()
sys.exit(7)
"""


def run(path: Path, **streams: Any) -> int:
    return subprocess.run([sys.executable, "-c", PROGRAM, str(path)], timeout=60, check=False, **streams).returncode


def test_a_reader_that_goes_away_ends_nothing(tmp_path: Path) -> None:
    """As `| head -1` does: the program comes to its end, with its own exit code, and says nothing of pipes."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "kept")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "line 0\n"
        process.stdout.close()
        assert process.stderr.read() == "to stderr\n"
        assert process.wait(60) == 7
    assert (tmp_path / "kept").read_text().startswith("done")


def test_closed_streams_lead_nowhere_and_no_file_gets_their_numbers(tmp_path: Path) -> None:
    def close() -> None:
        for descriptor in (0, 1, 2):
            os.close(descriptor)

    assert run(tmp_path / "kept", preexec_fn=close) == 7
    assert int((tmp_path / "kept").read_text().removeprefix("done ")) > 2


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_ends_nothing(tmp_path: Path, unbuffered: str) -> None:
    """Whether Python keeps what the disk does not take, to write it at its end, or not."""
    with open("/dev/full", "w") as full:
        environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
        assert run(tmp_path / "kept", stdout=full, stderr=full, env=environment) == 7
    assert (tmp_path / "kept").exists()


def test_there_again_when_the_disk_has_room() -> None:
    class Full(io.StringIO):
        full = True

        def write(self, text: str) -> int:
            if self.full:
                raise OSError(28, "No space left on device")
            return super().write(text)

    disk = Full()
    stream = SteadyStream(disk)
    assert stream.write("lost") == 4
    disk.full = False
    stream.write("kept")
    assert disk.getvalue() == "kept"


CLOSED = """
import os, sys
from allranks.standard_streams import steady_streams
with steady_streams():
    os.close(int(sys.argv[2]))
    print("lost", flush=True, file=sys.stdout if sys.argv[2] == "1" else sys.stderr)
    kept = open(sys.argv[1], "w")
    kept.write(str(kept.fileno()))
    kept.flush()
    print("lost", flush=True)
    print("lost", flush=True, file=sys.stderr)
    os.system("echo lost; echo lost >&2")
"""


@pytest.mark.parametrize("descriptor", ["1", "2"])
def test_no_file_gets_the_number_of_a_stream_that_the_user_closed(tmp_path: Path, descriptor: str) -> None:
    """A journal would hold what is printed; child processes find a stream there, too."""
    command = [sys.executable, "-c", CLOSED, str(tmp_path / "kept"), descriptor]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert int((tmp_path / "kept").read_text()) > 2
    seen = ["", done.stdout, done.stderr]
    assert (seen[int(descriptor)], seen[3 - int(descriptor)].split()) == ("", ["lost", "lost"])


def test_it_is_set_as_the_other_stream_is() -> None:
    under = io.TextIOWrapper(io.BytesIO(), encoding="latin-1", errors="strict")
    stream = SteadyStream(SteadyStream(under))
    stream.reconfigure(encoding="utf-8", errors="replace", line_buffering=True)
    assert (stream.encoding, stream.errors, stream.line_buffering) == ("utf-8", "replace", True)
    stream.write("\u20ac\n")
    assert stream.buffer.getvalue() == "\u20ac\n".encode()
    found: Any = SteadyStream(open(os.devnull, "w"))  # noqa: SIM115
    with found.stream:
        assert (found.name, found.mode) == (os.devnull, "w")
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = found.no_such_thing
    assert not hasattr(SteadyStream.__new__(SteadyStream), "name")


def test_other_errors_are_the_writers() -> None:
    stream = io.StringIO()
    stream.close()
    with pytest.raises(ValueError, match="closed"):
        SteadyStream(stream).write("x")


def test_it_is_the_other_stream_for_who_asks(capfd: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout, sys.stderr
    with steady_streams():
        found: Any = sys.stdout
        assert (found.isatty(), found.encoding, found.errors) == (False, before[0].encoding, before[0].errors)
        assert found.fileno() == before[0].fileno() and found.buffer is before[0].buffer and found.writable()
        print("seen")
    assert (sys.stdout, sys.stderr) == before
    assert capfd.readouterr().out == "seen\n"


@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "utf-8"])
def test_what_cannot_be_encoded_is_escaped(encoding: str) -> None:
    """A closing's bars in a Latin locale, a path whose bytes are no UTF-8: nobody loses a training over them."""
    under = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict")
    with contextlib.redirect_stdout(under), steady_streams():
        print("plain \u2588 caf\udce9", flush=True)
    bar = "\u2588" if encoding == "utf-8" else "\\u2588"
    assert under.buffer.getvalue().decode(encoding) == f"plain {bar} caf\\udce9\n"


def test_what_becomes_of_the_other_stream_is_nothing_to_it() -> None:
    """Python 3.13 tells of what goes wrong while a stream is forgotten, earlier ones do in their development mode."""
    program = """
import io
from allranks.standard_streams import SteadyStream
other = io.BytesIO()
text = io.TextIOWrapper(other)
steady = SteadyStream(text)
del steady
assert not text.closed
steady = SteadyStream(text)
text.close()
"""
    words = [sys.executable, "-X", "dev", "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert "closed file" not in done.stderr
