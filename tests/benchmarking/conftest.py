"""What tests of the benchmark share."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def inductor_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch sets it when its compiler is imported, which some loops by hand do on their way."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
