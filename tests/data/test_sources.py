import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import default_collate

from allranks.data.cut import Cut
from allranks.data.loader import Loader
from allranks.data.sources import ByteWindows, standard_library_text, text_files
from allranks.data.stream import DataStream
from allranks.errors import ConfigError, DataError


def write(directory: Path, count: int, size: int = 100) -> list[Path]:
    """Files in two folders, every one of other bytes."""
    paths = [directory / f"part{number % 2}" / f"{number}.txt" for number in range(count)]
    for number, path in enumerate(paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(hashlib.shake_256(str(number).encode()).digest(size))
    return paths


def test_a_window_is_the_text_and_its_next_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(100)))
    windows = ByteWindows([tmp_path / "a.txt"], seq=8)
    assert windows.text.tolist() == list(range(90))
    assert len(windows) == 11  # 11 * 8 + 1 <= 90
    for index in range(len(windows)):
        item = windows[index]
        assert item["x"].dtype == item["y"].dtype == torch.int64
        assert item["x"].tolist() == list(range(8 * index, 8 * index + 8))
        assert item["y"].tolist() == list(range(8 * index + 1, 8 * index + 9))
    with pytest.raises(IndexError):
        windows[11]


def test_several_items_at_once_are_the_items(tmp_path: Path) -> None:
    windows = ByteWindows(write(tmp_path, 3), seq=8)
    for item, index in zip(windows.__getitems__([5, 0, 5]), [5, 0, 5], strict=True):
        assert torch.equal(item["x"], windows[index]["x"]) and torch.equal(item["y"], windows[index]["y"])
    assert default_collate(windows.__getitems__([1, 2]))["x"].shape == (2, 8)


@pytest.mark.parametrize(
    ("count", "rule"), [(1, "last 10% of the text"), (5, "last 10% of the text"), (40, "40 files")]
)
def test_train_and_validation_are_all_of_the_text_and_share_none(tmp_path: Path, count: int, rule: str) -> None:
    paths = write(tmp_path, count, size=1000)
    train, validation = (ByteWindows(paths, split=split, seq=8) for split in ("train", "validation"))
    assert rule in train.rule and train.rule == validation.rule
    assert len(train.text) + len(validation.text) == 1000 * count
    assert 0.02 < len(validation.text) / (1000 * count) < 0.3
    parts = [bytes(windows.text) for windows in (train, validation)]
    if count >= 20:
        assert all(any(path.read_bytes() in part for part in parts) for path in paths)
    else:
        assert b"".join(parts) == b"".join(path.read_bytes() for path in sorted(paths))
    blocks = [{part[place : place + 16] for place in range(len(part) - 15)} for part in parts]
    assert not blocks[0] & blocks[1]


def test_nothing_depends_on_the_order_of_the_files_or_on_where_they_lie(tmp_path: Path) -> None:
    here, there = write(tmp_path / "here", 30), write(tmp_path / "there" / "deeper", 30)
    digests = {
        ByteWindows(files, split=split, seq=8, max_bytes=2000).digest
        for files in (here, here[::-1], there, [*here, *here])
        for split in ("train",)
    }
    assert len(digests) == 1


@pytest.mark.parametrize("count", [3, 40])
def test_max_bytes_caps_both_splits_together(tmp_path: Path, count: int) -> None:
    paths = write(tmp_path, count, size=1000)
    size = 800 * count + 1
    parts = [ByteWindows(paths, split=split, seq=8, max_bytes=size) for split in ("train", "validation")]
    assert sum(len(part.text) for part in parts) == size
    assert len(ByteWindows(paths, seq=8, max_bytes=10**9).text) == len(ByteWindows(paths, seq=8).text)


def test_the_cap_chooses_all_over_the_text(tmp_path: Path) -> None:
    paths = write(tmp_path, 60)
    text = bytes(ByteWindows(paths, seq=8, max_bytes=3000).text)
    chosen = [place for place, path in enumerate(sorted(paths)) if path.read_bytes()[:50] in text]
    assert min(chosen) < 20 and max(chosen) >= 40


def test_the_digest_notices_a_changed_byte(tmp_path: Path) -> None:
    paths = write(tmp_path, 3)
    before = ByteWindows(paths, seq=8)
    assert before.digest == hashlib.sha256(bytes(before.text)).hexdigest()
    paths[0].write_bytes(b"\0" + paths[0].read_bytes()[1:])
    assert ByteWindows(paths, seq=8).digest != before.digest


def test_empty_files_do_no_harm(tmp_path: Path) -> None:
    paths = write(tmp_path, 3)
    digest = ByteWindows(paths, seq=8).digest
    empty = tmp_path / "part0" / "nothing.txt"
    empty.touch()
    assert ByteWindows([*paths, empty], seq=8).digest == digest


def test_too_little_text_is_refused_with_the_numbers(tmp_path: Path) -> None:
    paths = write(tmp_path, 1)
    with pytest.raises(DataError, match=r"the validation text has 10 bytes, fewer than one window of seq\(32\) \+ 1"):
        ByteWindows(paths, split="validation", seq=32)
    with pytest.raises(DataError, match="no text file was given"):
        ByteWindows([])


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read .*gone.txt: No such file"):
        ByteWindows([tmp_path / "gone.txt"])


@pytest.mark.parametrize(
    "options", [{"seq": 0}, {"held_out": 0.0}, {"held_out": 1.0}, {"max_bytes": 0}, {"split": "test"}]
)
def test_arguments_out_of_range_are_refused(tmp_path: Path, options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        ByteWindows(write(tmp_path, 1), **options)  # type: ignore[arg-type]


def test_a_glob_gives_sorted_files(tmp_path: Path) -> None:
    paths = write(tmp_path, 5)
    assert text_files(f"{tmp_path}/**/*.txt") == tuple(sorted(paths))
    assert text_files(f"{tmp_path}/**") == tuple(sorted(paths))


def test_a_glob_without_a_match_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"data.text='\*.txt' matches no file \(seen from .*"):
        text_files("*.txt")


def test_the_standard_library_is_real_text_without_tests_and_packages() -> None:
    files = standard_library_text()
    assert len(files) > 300 and list(files) == sorted(files)
    assert any(path.name == "argparse.py" for path in files)
    assert not {part for path in files for part in path.parts[-3:-1]} & {
        "test",
        "tests",
        "site-packages",
        "__pycache__",
    }


def test_the_standard_library_is_the_same_text_in_another_process() -> None:
    code = (
        "from allranks.data.sources import ByteWindows, standard_library_text as text\n"
        "print(ByteWindows(text(), max_bytes=300_000).digest)"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == ByteWindows(standard_library_text(), max_bytes=300_000).digest


def test_a_python_without_its_library_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError, match=r"bring your own text with data.text=GLOB"):
        standard_library_text()


def test_windows_feed_a_loader(tmp_path: Path) -> None:
    windows = ByteWindows(write(tmp_path, 3), seq=8)
    with Loader(DataStream(windows, cut=Cut(4), epochs=1), draws=windows.draws) as loader:
        for step in loader:
            (micro,) = step.micro_steps
            for row, sample in zip(micro.batch["x"], micro.samples.tolist(), strict=True):
                assert torch.equal(row, windows[sample]["x"])
