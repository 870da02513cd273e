"""For every test here."""

import importlib

import pytest


@pytest.fixture(scope="session", autouse=True)
def dynamo() -> None:
    """torch imports this at the first optimizer step, which sets an environment variable: before any test looks."""
    importlib.import_module("torch._dynamo")
