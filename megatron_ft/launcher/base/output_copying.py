"""The end of the copying of the ranks' output files to the launcher's output: their directory may not answer."""

from __future__ import annotations

from megatron_ft.link.file_queue import FileQueue

ENDS = FileQueue()
COPY_S = 0.5
"""Longest wait for a copy in progress; torch copies every 0.1 s."""
LAST_COPY_S = 5.0
"""The same at the launcher's end."""
