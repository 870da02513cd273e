"""A folder of programs that verify is scored on: wrong ones of a known kind, `Sxx_name.py`, and clean ones.

Each file says in its docstring what it is and how it is verified, one `key: value` a line:

    '''S10: the training step calls model.module, so that DDP never hears of the backward.

    twin: classifier.py             the clean program that it is but for its mistake
    verify: --nproc 2               as after `allranks verify FILE`; several lines are several runs
    '''

`refused: WORDS` beside `verify:` says that verify refuses the program for its mistake, and names it with these words:
such a refusal counts as caught, and no other does. `unseen: REASON` in place of `verify:` is a program of which one
machine cannot show that it is wrong. A clean program has no number in its name, and no twin. Other files of the folder
are no programs where they have neither line.
"""

import ast
import re
import shlex
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from allranks.errors import ConfigError
from allranks.request import TrainRequest
from allranks.verifying.findings import KINDS, OTHER

DEFAULT_STEPS = 4
CLEAN = "clean"
_NUMBERED = re.compile(r"S(\d\d)_\w+")
_KEY = re.compile(r"(twin|verify|refused|unseen): (.+)")
_OPTIONS = ("--layout", "--nproc", "--steps")


@final
@dataclass(frozen=True)
class Entry:
    """One program of the folder.

    Attributes:
        path: its file.
        kind: "S1" to "S40", or "clean".
        what: the first line of its docstring, without the kind.
        twin: the file of the clean program beside it; "" of a clean one.
        runs: how it is verified, each as words after `allranks verify FILE`.
        unseen: why one machine cannot show it; "" where it can.
        refused: words with which verify refuses it for its mistake; "" where it does not.
    """

    path: Path
    kind: str
    what: str
    twin: str = ""
    runs: tuple[str, ...] = ()
    unseen: str = ""
    refused: str = ""

    @property
    def name(self) -> str:
        """The file's name without its ending."""
        return self.path.stem

    @property
    def clean(self) -> bool:
        """Whether nothing is wrong with it."""
        return self.kind == CLEAN


def read_corpus(folder: Path, kinds: Collection[str] = ()) -> list[Entry]:
    """The programs of a folder, sorted by name; of `kinds` only, where some are given ("clean" is one).

    Raises:
        ConfigError: no such folder, no program in it, or one whose docstring says what nobody understands.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder of programs: give one, such as corpus/ of the source")
    found = [
        entry for path in sorted(folder.glob("*.py")) if path.is_file() and (entry := read_entry(path)) is not None
    ]
    chosen = [entry for entry in found if not kinds or entry.kind in kinds]
    if not chosen:
        what = f"of {', '.join(sorted(kinds))} " if kinds and found else ""
        raise ConfigError(f"{folder} holds no program {what}with a line `verify:` in its docstring")
    return chosen


def read_entry(path: Path) -> Entry | None:
    """What a file says of itself, None where it is no program. Raises ConfigError for a docstring that contradicts."""
    try:
        lines = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").splitlines()
    except (SyntaxError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path.name} is not Python: {error}") from None
    said = [match.groups() for line in lines if (match := _KEY.fullmatch(line.strip()))]
    values = {key: [value for name, value in said if name == key] for key in ("twin", "verify", "refused", "unseen")}
    if not values["verify"] and not values["unseen"]:
        return None
    numbered = _NUMBERED.fullmatch(path.stem)
    kind = f"S{int(numbered[1])}" if numbered else CLEAN
    if kind != CLEAN and kind not in KINDS:
        raise ConfigError(f"{path.name}: {kind} is none of the {len(KINDS) - 1} kinds")
    entry = Entry(path, kind, lines[0].partition(": ")[2] or lines[0], "".join(values["twin"][:1]),
                  tuple(values["verify"]), "".join(values["unseen"][:1]),
                  "".join(values["refused"][:1]))  # fmt: skip
    if problem := _contradiction(entry):
        raise ConfigError(f"{path.name}: {problem}")
    for words in entry.runs:
        read_run(entry, words)
    return entry


def _contradiction(entry: Entry) -> str:
    if entry.runs and entry.unseen:
        return "`verify:` and `unseen:` exclude each other"
    if entry.refused and not entry.runs:
        return "`refused:` says how `verify:` ends, which is not there"
    if entry.clean:
        others = entry.twin or entry.unseen or entry.refused
        return "a clean program has no `twin:`, and is never `unseen:` or `refused:`" if others else ""
    if not entry.twin or not (entry.path.parent / entry.twin).is_file():
        return f"its `twin:` has to name a clean program beside it, and is '{entry.twin}'"
    return ""


def read_run(entry: Entry, words: str) -> tuple[TrainRequest, int]:
    """(request, steps) of one `verify:` line. Raises ConfigError for words that `allranks verify` does not take."""
    options: dict[str, str] = {}
    overrides = []
    try:
        rest = iter(shlex.split(words))
    except ValueError as error:
        raise ConfigError(f"{entry.path.name}: verify: {words}: {str(error).lower()}") from None
    for word in rest:
        if word in _OPTIONS:
            options[word] = next(rest, "")
        elif "=" in word and not word.startswith("-"):
            overrides.append(word)
        else:
            raise ConfigError(f"{entry.path.name}: verify: {word}: expected {', '.join(_OPTIONS)} or key=value")
    try:
        nproc = int(options["--nproc"]) if "--nproc" in options else None
        steps = int(options.get("--steps", DEFAULT_STEPS))
    except ValueError:
        raise ConfigError(f"{entry.path.name}: verify: {words}: expected a number") from None
    if nproc is not None and nproc < 1:
        raise ConfigError(f"{entry.path.name}: verify: --nproc {nproc}: give at least 1")
    spec, layout = str(entry.path), options.get("--layout")
    return TrainRequest(spec, overrides=tuple(overrides), layout=layout, nproc=nproc, device="cpu"), steps


def read_kinds(text: str) -> frozenset[str]:
    """`S05,S12,clean` -> {"S5", "S12", "clean"}. Raises ConfigError for what is no kind."""
    found = set()
    for word in filter(None, (word.strip() for word in text.split(","))):
        kind = f"S{int(word[1:])}" if word[:1] in "sS" and word[1:].isdecimal() else word.lower()
        if kind != CLEAN and (kind not in KINDS or kind == OTHER):
            raise ConfigError(f"--kinds {text}: {word} is no kind: give S1 to S40, or clean")
        found.add(kind)
    return frozenset(found)


def part_of(entries: Sequence[Entry], text: str) -> list[Entry]:
    """Every n-th entry from the i-th on, for `i/n`. Raises ConfigError for anything that is no part of a whole."""
    part, _, count = text.partition("/")
    if not (part.isdecimal() and count.isdecimal() and 1 <= int(part) <= int(count)):
        raise ConfigError(f"--part {text}: give i/n with 1 <= i <= n, e.g. 2/4")
    return list(_every(entries, int(part), int(count)))


def _every(entries: Sequence[Entry], part: int, count: int) -> Iterator[Entry]:
    yield from entries[part - 1 :: count]
