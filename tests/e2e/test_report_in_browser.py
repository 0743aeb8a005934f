"""A browser draws the page of the report, and shows what belongs to a failure when it is clicked."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.generated_logs import Fault, GeneratedJob, evidence_file
from tests.unit.cli.render.test_report_page import HANG, NASTY, Elements, write

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)


CLICK_THE_SECOND_BUTTON = "document.querySelectorAll('#buttons button')[1].click()"


def when_ready(script: str) -> str:
    """A script element that does this once when the page is drawn."""
    act = f"if (document.body.dataset.ready) {{ observer.disconnect(); {script} }}"
    observer = f"const observer = new MutationObserver(() => {{ {act} }});"
    return f"<script>{observer} observer.observe(document.body, {{attributes: true}});</script>"


def browse(path: Path, profile: Path, *options: str) -> str:
    quiet = (
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
        *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    )
    arguments = [CHROMIUM, *quiet, f"--user-data-dir={profile}", "--virtual-time-budget=10000", *options]
    ended = subprocess.run([*arguments, path.as_uri()], capture_output=True, text=True, timeout=90, check=True)
    return ended.stdout


@pytest.mark.skipif(not CHROMIUM, reason="no chromium on PATH: whether the page is drawn can't be seen")
def test_a_browser_draws_the_page(tmp_path: Path) -> None:
    path = write(tmp_path, GeneratedJob(ranks=4, steps=60, faults=(HANG,), sections=NASTY))
    picture = tmp_path / "out.png"
    dom = browse(path, tmp_path / "profile", "--dump-dom")
    elements = Elements(dom[dom.index("<body") :])
    assert ("body", {"data-ready": "yes"}) in elements.tags  # the script came to its end
    for tag, attributes in elements.tags:
        for name in ("src", "href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith(("data:", "#")), (tag, attributes)
    # the failure's evidence is shown at once, as text
    assert "rank 2 is stopped" in dom
    assert "next_batch &lt;b&gt;&amp;&lt;/b&gt;" in dom
    assert 'id="planted"' not in dom
    assert "<title>job generated: 4 ranks on 1 node" in dom
    browse(path, tmp_path / "profile", f"--screenshot={picture}", "--window-size=1400,1600", "--hide-scrollbars")
    from matplotlib import image

    pixels = image.imread(picture)[:, :, :3]
    assert pixels.std() > 0.05
    red = (pixels[:, :, 0] > 0.7) & (pixels[:, :, 1] < 0.12) & (pixels[:, :, 2] < 0.2)
    assert red.sum() > 500  # the hung rank


@pytest.mark.skipif(not CHROMIUM, reason="no chromium on PATH: whether a click shows the evidence can't be seen")
def test_a_click_shows_the_failure_closely_and_its_evidence(tmp_path: Path) -> None:
    job = GeneratedJob(ranks=4, steps=60, faults=(HANG, Fault(cycle=1, rank=0, iteration=50)))
    path = write(tmp_path, job)
    text = path.read_text()
    path.write_text(text.replace("</body>", f"{when_ready(CLICK_THE_SECOND_BUTTON)}</body>"))
    before = browse(write_again(path, text), tmp_path / "p1", "--dump-dom")
    assert evidence_file(job, job.faults[1]) in before
    dom = browse(path, tmp_path / "p2", "--dump-dom")
    shown = dom[dom.index('<div id="evidence">') :]
    shown = shown[: shown.index("<script")]
    assert evidence_file(job, HANG) in shown
    assert evidence_file(job, job.faults[1]) not in shown
    (whole_run, around) = (re.search(r'data-view="(\S+) (\S+) 0.000 4.000"', each) for each in (before, dom))
    assert whole_run is not None
    assert around is not None
    assert float(whole_run[1]) == 0
    assert 0 < float(around[1]) < float(around[2]) < float(whole_run[2])


def write_again(path: Path, text: str) -> Path:
    other = path.with_name("other.html")
    other.write_text(text)
    return other
