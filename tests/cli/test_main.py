"""How the program answers as a whole: help, version, usage errors, exit codes; and what it never imports."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

import allranks
from allranks.cli import main as program
from allranks.cli.main import main
from allranks.errors import CheckpointError

HEAVY = ("torch", "numpy", "pydantic", "rich", "tensorboard")


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["checkpoint", "verify", "--help"], ["--version"]])
def test_help_and_version_import_nothing_heavy(words: list[str]) -> None:
    code = f"""if True:
        import sys
        from allranks.cli.main import main
        assert main({words!r}) == 0
        print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # typer itself takes pydantic to convert values.
    assert done.stderr in ("[]\n", "['pydantic']\n")
    assert done.stdout


def test_the_command_waits_for_nothing_once_it_has_its_exit_code() -> None:
    """Nor for destructors: those of torch's libraries take seconds, and hung once."""
    code = """if True:
        import atexit, sys, threading
        from allranks.cli.main import command
        atexit.register(print, "closed")
        threading.Thread(target=threading.Event().wait).start()
        sys.argv = ["allranks", "nonsense"]
        command()
    """
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "closed\n"), done.stderr


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_help_names_every_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert [line.split()[0] for line in out.partition("Commands:\n")[2].splitlines()] == [
        "train",
        "plan",
        "verify",
        "chaos",
        "dryrun",
        "simulate",
        "new",
        "doctor",
        "report",
        "explain",
        "checkpoint",
        "bench",
    ]


def test_a_group_without_a_command_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint"]) == 0
    assert "verify  Read every byte" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"allranks {allranks.__version__}\n"


USAGE = [
    (["trian"], "no such command 'trian'. Did you mean 'train'?"),
    (["qqqq"], "no such command 'qqqq'. `allranks --help` lists the commands."),
    (["checkpoint", "verfy"], "no such command 'verfy'. Did you mean 'verify'?"),
    (["mine.py", "train.steps=3"], "no such command 'mine.py'; did you mean 'allranks train mine.py train.steps=3'?"),
    (["train", "--layuot", "ddp"], "no such option: --layuot (Possible options: --layout)"),
    (["train", "--nproc", "0"], "invalid value for '--nproc': Input should be greater than or equal to 1"),
    (["train", "--nproc"], "option '--nproc' requires an argument."),
    (["train", "--device", "tpu"], "invalid value for '--device': 'tpu' is not one of 'auto', 'cpu', 'cuda'."),
    (["report"], "missing argument 'RUN [RUN ...]'."),
]


@pytest.mark.parametrize(("words", "message"), USAGE, ids=[" ".join(words) for words, _ in USAGE])
def test_a_usage_error_is_one_line_and_exit_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert capsys.readouterr() == ("", f"allranks: error: {message}\n")


def test_a_usage_error_with_json_is_a_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--json", "--layuot"]) == 2
    out, err = capsys.readouterr()
    assert json.loads(out)["error"] == "no such option: --layuot (Possible options: --layout)"
    assert len(err.splitlines()) == 1


def test_an_error_of_ours_becomes_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def raise_error(**_: object) -> int:
        raise CheckpointError("step-3 is torn; the one before is whole")

    monkeypatch.setattr(program, "app", raise_error)
    assert main(["train"]) == 78
    assert capsys.readouterr().err == "allranks: error: step-3 is torn; the one before is whole\n"


def test_ctrl_c_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(**_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(program, "app", interrupt)
    assert main(["train"]) == 130


@pytest.mark.timeout(method="thread")  # its other method takes SIGALRM
def test_ctrl_c_is_130_where_a_module_that_is_imported_swallows_it(tmp_path: Path) -> None:
    """As torch's do while they look for numpy."""
    (tmp_path / "task.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException:\n    pass\n"
    )
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    try:
        assert main(["train", str(tmp_path / "task.py"), "--show"]) == 130
    finally:
        signal.signal(signal.SIGINT, before)


def test_what_is_nobodys_fault_but_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(program, "app", fail)
    with pytest.raises(ZeroDivisionError):
        main(["train"])


@pytest.mark.parametrize("words", [["report"], ["explain"], ["checkpoint", "list"], ["plan", "--cluster"]])
def test_a_path_at_which_nobody_may_look_is_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Too long a name is refused to root, too."""
    name = "x" * 300 + ".toml"
    assert main([*words, name, *(["gpt2"] if words[0] == "plan" else [])]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("allranks: error: ") and err.count("\n") == 1
    assert name in err and "File name too long" in err


def test_what_the_system_refuses_is_told_with_the_next_move(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "app", lambda **_: os.stat("/proc/self/mem/a\x1bb"))
    monkeypatch.setattr(program, "user_place", lambda _: "")  # the line above is no user's
    assert main(["report", "--json"]) == 2
    out, err = capsys.readouterr()
    message = r"/proc/self/mem/a\x1bb: Not a directory; name another path, or see to who may look there"
    assert json.loads(out) == {"error": message, "kind": "ConfigError", "exit_code": 2}
    assert err == f"allranks: error: {message}\n"


def test_no_room_for_temporary_files_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "none")])
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(program, "app", lambda **_: tempfile.gettempdir())
    monkeypatch.setattr(program, "user_place", lambda _: "")
    assert main(["verify"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("allranks: error: no usable temporary directory found in [") and "set TMPDIR to one" in told


def test_what_the_system_refuses_to_the_users_own_code_keeps_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("import os\ndef look(**_):\n    os.stat('/no/such')\n")
    found: dict[str, Any] = {}
    exec(compile(mine.read_text(), str(mine), "exec"), found)
    monkeypatch.setattr(program, "app", found["look"])
    with pytest.raises(FileNotFoundError):
        main(["train"])


@pytest.mark.parametrize("error", [SystemExit(0), EOFError("EOF when reading a line")])
def test_users_code_that_ends_the_command_is_refused(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its code would be taken for an answer: 0 for "equal" or "it fits"."""

    def end(*_: object) -> None:
        raise error

    monkeypatch.setattr("allranks.cli.new.write_template", end)
    assert main(["new", "mine.py"]) == 2
    told = capsys.readouterr().err.strip()
    assert told.startswith("allranks: error: the user's code ended the command:\n") and "raise error" in told
    assert told.endswith(f"{type(error).__name__}: {error}")
