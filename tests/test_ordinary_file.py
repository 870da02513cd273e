"""Files that are none, in a file's place."""

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from allranks.ordinary_file import MOST_BYTES, check_small, open_ordinary, read_ordinary, read_record, read_small


@dataclass(frozen=True)
class Held:
    """A record."""

    host: str
    since: float


@pytest.mark.parametrize("what", ["missing", "folder", "pipe", "zeros", "loop"])
def test_what_is_no_ordinary_file_is_not_read(tmp_path: Path, what: str) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zeros").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for read in (open_ordinary, read_ordinary, check_small, read_small):
        with pytest.raises(OSError):
            read(tmp_path / what)
    with pytest.raises(OSError):
        read_record(tmp_path / what, Held)


def test_a_link_is_followed_unless_it_must_not_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"0123456789")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert read_ordinary(tmp_path / "link") == read_small(tmp_path / "link") == b"0123456789"
    assert read_ordinary(tmp_path / "link", 4) == b"6789" and read_ordinary(tmp_path / "file", 40) == b"0123456789"
    with pytest.raises(OSError):
        open_ordinary(tmp_path / "link", follow=False)


def test_what_is_kept_as_one_text_has_a_limit(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    os.truncate(tmp_path / "file", MOST_BYTES + 1)
    with pytest.raises(OSError, match="larger than 64 MB"):
        read_small(tmp_path / "file")
    assert len(read_ordinary(tmp_path / "file")) == MOST_BYTES + 1


@pytest.mark.parametrize(
    "text", ["", "[1]", '{"host": "a"}', '{"host": 3, "since": 1}', '{"host": "a", "since": "1"}', "[" * 200_000]
)
def test_a_record_has_its_types_or_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "record").write_text(text)
    with pytest.raises(ValueError):
        read_record(tmp_path / "record", Held)
    (tmp_path / "record").write_text('{"host": "a", "since": 1}')
    assert read_record(tmp_path / "record", Held) == Held("a", 1.0)
