"""The seal: what it lets through, and what not."""

import pytest

from allranks.surviving.hosts.seal import Seal, SealError

SEAL = Seal(b"0123456789abcdef")
VALUE = {"b": [1, None, "ä"], "a": {"x": 0.5}}


def test_what_was_sealed_comes_back() -> None:
    assert SEAL.open("key", SEAL.close("key", VALUE)) == VALUE


def test_every_other_character_is_refused() -> None:
    sealed = SEAL.close("key", VALUE)
    for at, letter in enumerate(sealed):
        changed = sealed[:at] + ("0" if letter != "0" else "1") + sealed[at + 1 :]
        with pytest.raises(SealError, match="what stands under key is not signed"):
            SEAL.open("key", changed)


def test_another_key_another_secret_and_garbage_are_refused() -> None:
    sealed = SEAL.close("key", VALUE)
    for seal, key, text in (
        (SEAL, "other", sealed),
        (Seal(b"another secret 16"), "key", sealed),
        (SEAL, "key", ""),
        (SEAL, "key", "\ufffd" * 64 + ' {"a":1}'),
        (SEAL, "key", sealed.partition(" ")[2]),
    ):
        with pytest.raises(SealError):
            seal.open(key, text)


def test_a_word_of_one_meeting_is_none_of_another() -> None:
    here, there = (Seal(b"0123456789abcdef", scope) for scope in ("run/1", "run/2"))
    sealed = here.close("key", VALUE)
    assert here.open("key", sealed) == VALUE
    for seal in (there, SEAL):
        with pytest.raises(SealError):
            seal.open("key", sealed)
    with pytest.raises(SealError):
        here.open("key", SEAL.close("key", VALUE))
