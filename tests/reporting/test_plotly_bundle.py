"""The script that pages carry is the one whose version and digest the source names, and it comes with its licence."""

import hashlib
from importlib.resources import files
from pathlib import Path

import plotly

from allranks.reporting import plotly_bundle
from allranks.reporting.plotly_bundle import LICENSE, SCRIPT, SHA256, VERSION, read_asset


def test_the_bundle_is_what_its_digest_says() -> None:
    data = files("allranks.reporting").joinpath("assets", SCRIPT).read_bytes()
    assert hashlib.sha256(data).hexdigest() == SHA256
    assert f"plotly.js (basic - minified) v{VERSION}" in data[:200].decode()
    assert b"</script" not in data.lower()


def test_its_licence_stands_beside_it() -> None:
    text = read_asset(LICENSE)
    assert text.startswith("MIT License") and "Plotly Technologies" in text


def test_the_version_is_that_of_the_python_package() -> None:
    package = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
    with package.open(encoding="utf-8") as file:
        head = file.read(200)
    ours, theirs = VERSION.split(".")[0], head.split("plotly.js v")[1].split(".")[0]
    assert ours == theirs, f"python plotly draws for plotly.js {theirs}: put that version's bundle into assets"


def test_every_asset_is_named_in_their_list() -> None:
    folder = Path(plotly_bundle.__file__).parent / "assets"
    listed = (folder / "README.md").read_text()
    missing = [path.name for path in folder.iterdir() if path.name != "README.md" and f"`{path.name}`" not in listed]
    assert missing == []
