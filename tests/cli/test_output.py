"""Errors as one line and one document; tables that nothing is cut from."""

import json
import os
import subprocess
import sys

import pytest

from allranks.cli.output import print_error, print_json, print_table, stdout_kept_free, write_printed
from allranks.errors import RunError
from allranks.printable import printable


def test_an_error_is_one_line_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_error(RunError("runs/x is no run"), json=False) == 78
    assert capsys.readouterr() == ("", "allranks: error: runs/x is no run\n")


def test_an_error_with_anybodys_words_moves_no_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(RunError("x.toml: \x1b[2J\x1b]0;mine\x07\n\tthe next line"), json=False)
    assert capsys.readouterr().err == "allranks: error: x.toml: \\x1b[2J\\x1b]0;mine\\x07\n\tthe next line\n"


def test_with_json_an_error_is_also_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(RunError("runs/x is no run"), json=True)
    out, err = capsys.readouterr()
    assert json.loads(out) == {"error": "runs/x is no run", "kind": "RunError", "exit_code": 78}
    assert err == "allranks: error: runs/x is no run\n"


def test_json_is_strict() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        print_json({"loss": float("nan")})


def test_standard_output_is_kept_free_for_a_document(capfd: pytest.CaptureFixture[str]) -> None:
    """From Python, from below it, and from child processes."""
    with stdout_kept_free(True):
        print("from python")
        os.write(1, b"from below\n")
        subprocess.run([sys.executable, "-c", "print('from a child')"], check=True)
    print_json({})
    out, err = capfd.readouterr()
    assert (out, err) == ("{}\n", "from python\nfrom below\nfrom a child\n")
    with stdout_kept_free(False):
        print("as ever")
    assert capfd.readouterr().out == "as ever\n"


def test_it_is_kept_free_also_where_another_stream_stands_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    with stdout_kept_free(True):
        print("aside")
    assert capsys.readouterr() == ("", "aside\n")


def test_what_a_terminal_would_obey_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    assert printable("größe a\\b 模型") == "größe a\\b 模型"
    assert printable("\x1b[2J\x9b\r\n\u202e\udc80") == r"\x1b[2J\x9b\r\n\u202e\udc80"
    print_table(("na\tme", "n"), [("\x1b[31m", "1")])
    assert capsys.readouterr().out.splitlines() == [r"na\tme    n", r"\x1b[31m  1"]


def test_a_table_lines_up_and_cuts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("name", "n"), [("a" * 300, "1"), ("b", "")])
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["name" + " " * 298 + "n", "a" * 300 + "  1", "b"]


def test_what_is_printed_already_gets_no_second_document(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> None:
        raise RunError("a.html cannot be written")

    assert write_printed(lambda: None) == 0 and capsys.readouterr() == ("", "")
    assert write_printed(refuse) == 78
    assert capsys.readouterr() == ("", "allranks: error: a.html cannot be written\n")
