"""A plan's page in a browser: on a telephone and on a screen nothing has to be scrolled sideways."""

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from allranks.reporting.plan_page import render_plan_page
from tests.reporting import plans

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WIDTHS = (400, 1280)
SECONDS = 120  # for all pages, on a machine that others use
PLANS = (plans.pipelined, plans.single, plans.nothing_fits, plans.refused, plans.huge)

# A browser's window is 500 pixels wide at least: each page is shown in a frame of its own, and tells its width.
TELL = """<script>addEventListener("load", () => setTimeout(() => {
  const page = document.documentElement
  parent.postMessage([name, innerWidth, page.scrollWidth, document.body.innerText.length], "*")
}, 300))</script></body>"""
FRAMES = """<!doctype html><body><script>
const told = {}
addEventListener("message", ({data}) => {
  told[data[0]] = data.slice(1)
  document.body.dataset.told = JSON.stringify(told)
})
</script>%s</body>"""


def widths(pages: Mapping[str, str], folder: Path) -> dict[str, list[int]]:
    """Name of a page and width of its frame -> [width of its window, width of what is in it, letters on it]."""
    assert BROWSER is not None
    frames = ""
    for name, page in pages.items():
        assert page.count("</body>") == 1
        (folder / f"{name}.html").write_text(page.replace("</body>", TELL))
        frames += "".join(
            f'<iframe name="{name} {width}" src="{name}.html" width="{width}" height="900" style="border:0"></iframe>'
            for width in WIDTHS
        )
    (folder / "frames.html").write_text(FRAMES % frames)
    options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--dump-dom")
    command = [BROWSER, *options, f"--user-data-dir={folder / 'profile'}", (folder / "frames.html").as_uri()]
    running = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    )
    try:
        shown, _ = running.communicate(timeout=SECONDS)
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()
    told = re.search(r'data-told="([^"]*)"', shown)
    assert told is not None, shown[-500:]
    found: dict[str, list[int]] = json.loads(told[1].replace("&quot;", '"'))
    return found


@pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine: nobody looks at the page's width")
def test_nothing_of_a_page_has_to_be_scrolled_sideways(tmp_path: Path) -> None:
    pages = {make.__name__: render_plan_page(make(), "allranks plan " + "task.py " * 40) for make in PLANS}
    wide = pages["single"].replace("<header>", '<header><div style="width: 2000px">wider than all</div>', 1)
    found = widths({**pages, "wide": wide}, tmp_path)
    assert set(found) == {f"{name} {width}" for name in (*pages, "wide") for width in WIDTHS}
    for name, (window, content, letters) in found.items():
        assert window == int(name.split()[1]) and letters > 100, name
        if name.startswith("wide "):
            assert content > 2000, "what is too wide is seen"
        else:
            assert content <= window, name
