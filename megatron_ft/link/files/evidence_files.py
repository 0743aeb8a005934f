"""Evidence on disk: a JSON file and a text for each rank that hung or died, in ``<log dir>/evidence/cycle<N>``."""

from __future__ import annotations

import json
import os
import socket

from megatron_ft.diagnosis.evidence import RankEvidence, evidence_text
from megatron_ft.link.facts.shared import Evidence
from megatron_ft.link.files.atomic_write import replace
from megatron_ft.link.files.own_files import open_own_folder

DIRECTORY = "evidence"
LIBRARIES = (os.path.dirname(os.__file__), os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
"""Directories of Python's and this package's frames, which are shown last because they rarely are the cause."""


def write_evidence(log_dir: str, evidence: RankEvidence, *, suffix: str = "") -> Evidence:
    """Write both files, readable for their owner only, replacing those of the same rank, cycle and process.

    Args:
        suffix: distinguishes files of the same process.

    Returns:
        The record for the event log.

    Raises:
        OSError: the files can't be written.
    """
    host = socket.gethostname()
    stem = f"rank{evidence.note.rank}-cycle{evidence.cycle}-{host}-{evidence.note.pid}{suffix}"
    name = f"cycle{evidence.cycle}"
    outer = open_own_folder(os.path.join(log_dir, DIRECTORY))
    try:
        folder = open_own_folder(f"/proc/self/fd/{outer}/{name}")
    finally:
        os.close(outer)
    try:
        packed = json.dumps(evidence.packed(), indent=1) + "\n"
        for name_of_file, text in ((f"{stem}.json", packed), (f"{stem}.txt", evidence_text(evidence))):
            replace(folder, name_of_file, text.encode(errors="replace"), mode=0o600, fsync=False)
    finally:
        os.close(folder)
    rank, cycle, file = evidence.note.rank, evidence.cycle, f"{DIRECTORY}/{name}/{stem}.txt"
    return Evidence(rank=rank, cycle=cycle, file=file, summary=evidence.summary, took_s=evidence.took_s)
