"""The reduced plotly.js that our pages carry with them: kept once, with its version, digest and licence."""

from importlib.resources import files

VERSION = "4.1.1"
SHA256 = "99784e3abfb07b142a15e521a439e6d9addceadb3f79553fd24c72774f0649ba"
"""Of plotly-basic.min.js in npm's plotly.js-basic-dist-min 4.1.1 (MIT): scatter, bar and pie, 1.2 MB instead of 5."""

SCRIPT, LICENSE = "plotly-basic.min.js", "plotly-LICENSE.txt"


def read_asset(name: str) -> str:
    """The text of a file of `reporting/assets`, wherever the package is installed."""
    return files("allranks.reporting").joinpath("assets", name).read_text(encoding="utf-8")
