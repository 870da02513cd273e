"""Where the secret may come from."""

from pathlib import Path

import pytest

from allranks.errors import ConfigError
from allranks.surviving.hosts.secret import take_secret

WORD = "0123456789abcdef"


def private(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / f"secret-{len(text)}"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_from_a_file_that_only_its_owner_reads(tmp_path: Path) -> None:
    assert take_secret(private(tmp_path, WORD + "\n"), {}) == WORD.encode()
    assert take_secret(private(tmp_path, WORD, 0o400), {}) == WORD.encode()


def test_from_the_environment_where_nobody_finds_it_afterwards() -> None:
    environ = {"ALLRANKS_SECRET": WORD, "OTHER": "x"}
    assert take_secret(None, environ) == WORD.encode()
    assert environ == {"OTHER": "x"}


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o601])
def test_a_file_that_others_can_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = private(tmp_path, WORD, mode)
    with pytest.raises(ConfigError, match=f"has mode {mode:04o}.*chmod 600"):
        take_secret(path, {})


def test_the_other_refusals(tmp_path: Path) -> None:
    for file, environ, said in (
        (None, {}, "several hosts need a secret"),
        (private(tmp_path, WORD), {"ALLRANKS_SECRET": WORD}, "give one of them"),
        (private(tmp_path, "short"), {}, "too short"),
        (None, {"ALLRANKS_SECRET": "short"}, "ALLRANKS_SECRET is too short"),
        (tmp_path / "none", {}, "cannot be read"),
        (tmp_path, {}, "is no file"),
    ):
        with pytest.raises(ConfigError, match=said) as caught:
            take_secret(file, dict(environ))
        assert WORD not in str(caught.value)
