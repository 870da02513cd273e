"""For every test here."""

import importlib

import pytest


@pytest.fixture(scope="session", autouse=True)
def dynamo() -> None:
    """torch imports this at the first optimizer step or meta tensor, which sets an environment variable: before tests."""
    importlib.import_module("torch._dynamo")
