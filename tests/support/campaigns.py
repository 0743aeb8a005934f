"""What campaigns share: a job of one launcher to its end, records of event logs, reports of pytest."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests import ROOT

__all__ = ["launcher_records", "read_records", "run_job", "run_pytest"]


def run_job(
    arguments: Sequence[str], logs: Path, timeout_s: float, env: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Run a launcher of one node; return its exit code and all that it and its ranks have written.

    Raises:
        subprocess.TimeoutExpired: it didn't end in time.
    """
    command = [sys.executable, "-m", "megatron_ft.launcher", "--standalone", f"--ft-log-dir={logs}", *arguments]
    ended = subprocess.run(
        command,
        cwd=ROOT,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    return ended.returncode, ended.stdout


def launcher_records(logs: Path) -> list[dict[str, Any]]:
    """Return the records of the launchers that wrote their event logs there, which have those of monitors, too."""
    return [record for path in sorted(logs.glob("launcher-*.jsonl")) for record in read_records(path)]


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file of JSON lines."""
    for line in path.read_text().splitlines():
        with contextlib.suppress(ValueError):  # cut off, by a kill
            yield json.loads(line)


def run_pytest(
    words: Sequence[str],
    report: Path,
    *,
    cwd: Path,
    env: Mapping[str, str],
    timeout_s: float,
    prefix: Sequence[str] = (),
) -> dict[str, str]:
    """Run pytest; return by test how it failed or why it was skipped, empty if it passed. Empty: no test was run."""
    command = [sys.executable, *prefix, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *words]
    try:
        ended = subprocess.run(
            command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return {"all": f"took longer than {timeout_s:g} s"}
    if not report.exists():
        sys.stderr.write(ended.stdout[-3000:] + ended.stderr[-3000:])
        return {}
    problems = {}
    for case in ElementTree.parse(report).iter("testcase"):
        found = next((part for part in case if part.tag in ("failure", "error", "skipped")), None)
        message = "" if found is None else " ".join(found.get("message", "").split())
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        problems[name] = "" if found is None else f"{found.tag}: {message[:300]}"
    return problems
