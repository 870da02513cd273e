"""`python -m allranks` is the command."""

import subprocess
import sys

import allranks


def test_python_m_allranks_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "allranks", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"allranks {allranks.__version__}\n"


def test_its_exit_code_is_the_commands() -> None:
    done = subprocess.run([sys.executable, "-m", "allranks", "trian"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "allranks: error: no such command 'trian'. Did you mean 'train'?\n"
