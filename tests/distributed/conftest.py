"""For every test here."""

import importlib

import pytest


@pytest.fixture(scope="session", autouse=True)
def dynamo() -> None:
    """torch imports it in the first optimizer step or meta tensor, which sets an environment variable: do so first."""
    importlib.import_module("torch._dynamo")
