"""Who may write into a directory is told; a user's own group is nobody else."""

import grp
import os
import pwd
from pathlib import Path

import pytest

from allranks.checkpointing.writers import tell_writers


def test_what_everybody_may_write_is_told_with_its_mode(tmp_path: Path) -> None:
    closed, first, second = (tmp_path / name for name in ("closed", "first", "second"))
    for path, mode in ((closed, 0o755), (first, 0o1777), (second, 0o777)):
        path.mkdir()
        path.chmod(mode)
    (line,) = tell_writers((closed, first, second))
    assert line.startswith(f"{first} may be written by everybody (mode 1777): ") and f"`chmod -R go-w {first}`" in line
    assert tell_writers((closed, tmp_path / "absent")) == []


@pytest.mark.parametrize(
    ("group", "members", "told"),
    [
        ("me", (), None),
        ("me", ("me",), None),
        ("me", ("me", "you"), "group me"),
        ("lab", (), "group lab"),
        ("", (), f"group {os.getgid()}"),
    ],
)
def test_a_group_is_told_unless_it_is_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str, members: tuple[str, ...], told: str | None
) -> None:
    def named(gid: int) -> grp.struct_group:
        if not group:
            raise KeyError(gid)
        return grp.struct_group((group, "x", gid, [*members]))

    monkeypatch.setattr(pwd, "getpwuid", lambda uid: pwd.struct_passwd(("me", "x", uid, 7, "", "/", "/bin/sh")))
    monkeypatch.setattr(grp, "getgrgid", named)
    os.chown(tmp_path, -1, os.getgid())
    tmp_path.chmod(0o755)
    assert tell_writers((tmp_path,)) == []
    tmp_path.chmod(0o775)
    found = tell_writers((tmp_path,))
    assert found == [] if told is None else f"may be written by {told} (mode 0775)" in found[0]
