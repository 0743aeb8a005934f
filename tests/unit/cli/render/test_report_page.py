"""The page: it loads nothing, and what comes from logs can do no harm in it."""

from __future__ import annotations

import base64
import html.parser
import json
import re
import zlib
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.cli.render import html_page
from megatron_ft.cli.render.html_page import read_evidence, write_page
from megatron_ft.link.facts.all_kinds import Timed
from megatron_ft.link.facts.shared import Evidence
from tests.support.generated_logs import Fault, GeneratedJob, write_job
from tests.unit.cli.analysis.test_report_timeline import only

HANG = Fault(cycle=0, rank=2, iteration=33)
NASTY = (
    "setup",
    "</script ><b id='planted'>step</b><script>document.title='harmed'</script>",
    "<img src=https://evil.example/x onerror=\"document.title='harmed'\">",
    "<a href='https://evil.example/'>@@data@@ &lt;i&gt;</a>",
)


class Elements(html.parser.HTMLParser):
    """The tags of a page, and the text of its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def write(directory: Path, job: GeneratedJob) -> Path:
    logs = directory / "logs"
    logs.mkdir()
    write_job(logs, job)
    path = directory / "out.html"
    write_page(only(logs), [str(logs)], str(path))
    return path


@pytest.mark.parametrize("names", [("setup", "step", "checkpointing", "write shards"), NASTY])
def test_the_page_loads_nothing_and_holds_no_foreign_element(tmp_path: Path, names: tuple[str, ...]) -> None:
    path = write(tmp_path, GeneratedJob(ranks=4, steps=60, faults=(HANG,), sections=names))
    elements = Elements(path.read_text())
    assert {"script", "table", "div"} <= {tag for tag, _ in elements.tags}
    for tag, attributes in elements.tags:
        assert not {"src", "href", "srcset", "action", "onerror"} & set(attributes), (tag, attributes)
        assert tag not in ("img", "a", "link", "iframe", "b", "object")
    policies = [attributes["content"] for _, attributes in elements.tags if "http-equiv" in attributes]
    assert policies == [
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
    ]


def data_of(path: Path) -> dict[str, object]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', path.read_text(), re.DOTALL)
    assert found is not None
    document = json.loads(found[1])
    assert isinstance(document, dict)
    return {**document, "evidence": json.loads(zlib.decompress(base64.b64decode(document["packed"])))}


def evidence_of(directory: Path, *names: str) -> list[dict[str, Any]]:
    found = [Timed(n, 0, "a", Evidence(cycle=0, rank=n, file=name)) for n, name in enumerate(names)]
    return read_evidence([str(directory)], found)


def test_the_evidence_on_the_culprit_is_never_what_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the other ranks left some, after it."""
    monkeypatch.setattr(html_page, "MOST_BYTES_IN_ALL", 3000)
    write_job(tmp_path, GeneratedJob(ranks=8, steps=60, faults=(HANG,)))
    launcher = next(tmp_path.glob("launcher-*"))
    last = json.loads(launcher.read_text().splitlines()[-1])["t"]
    with launcher.open("a") as file:
        for rank in (0, 1, 3, 4, 5, 6, 7):
            (tmp_path / "evidence" / str(rank)).write_text("x" * 1000)
            fields = {"rank": rank, "cycle": 0, "file": f"evidence/{rank}", "summary": ""}
            file.write(json.dumps({"t": last + rank, "ev": "evidence", **fields}) + "\n")
    path = tmp_path / "out.html"
    assert "pieces of evidence are cut or missing" in write_page(only(tmp_path), [str(tmp_path)], str(path))
    told = [(each["rank"], bool(each["note"])) for each in data_of(path)["evidence"]]  # type: ignore[attr-defined]
    assert told[:4] == [(2, False), (7, False), (6, False), (5, True)]


def test_page_contains_files_of_the_log_directory_only(tmp_path: Path) -> None:
    """A log may name any file; the page is handed around."""
    logs = tmp_path / "logs"
    logs.mkdir()
    (tmp_path / "secret").write_text("secret")
    (logs / "link").symlink_to(tmp_path / "secret")
    (logs / "bytes").write_bytes(b"\xff\xfe")
    names = ("../secret", str(tmp_path / "secret"), "link", ".", "none", "a\0b", "bytes")
    read = evidence_of(logs, *names)
    assert [each["text"] for each in read] == ["\ufffd\ufffd", *[""] * 6]
    assert [bool(each["note"]) for each in read] == [False, *[True] * 6]


def test_tables_hold_no_tag_from_a_log(tmp_path: Path) -> None:
    path = write(tmp_path, GeneratedJob(ranks=4, steps=60, faults=(HANG,), sections=NASTY))
    table = path.read_text().split('<table id="timeouts">')[1].split("</table>")[0]
    assert {tag for tag, _ in Elements(table).tags} == {"thead", "tbody", "tr", "th", "td"}
    assert "&lt;img src=https://evil.example" in table


def test_page_of_a_thousand_ranks_with_evidence_is_below_200_kilobytes(tmp_path: Path) -> None:
    faults = tuple(Fault(cycle=cycle, rank=3 * cycle, iteration=50 + 10 * cycle) for cycle in range(6))
    path = write(tmp_path, GeneratedJob(ranks=256, steps=120, faults=faults))
    assert path.stat().st_size < 200_000


def test_classes_of_the_jobs_time_are_a_bar_whose_parts_add_up(tmp_path: Path) -> None:
    path = write(tmp_path, GeneratedJob(ranks=4, steps=60, faults=(HANG,)))
    shares = re.findall(r'style="flex-grow:([\d.]+);', path.read_text())
    goodput = only(tmp_path / "logs").run.accounting.goodput
    assert goodput is not None
    assert sum(map(float, shares)) == pytest.approx(goodput.total_s, rel=0.001)


def test_page_fits_a_phone_and_the_dark(tmp_path: Path) -> None:
    text = write(tmp_path, GeneratedJob(ranks=2, steps=30)).read_text()
    assert '<meta name="viewport" content="width=device-width' in text
    assert "@media (prefers-color-scheme: dark)" in text
    assert text.count("<table") == text.count('<div class="wide"><table') == 2
