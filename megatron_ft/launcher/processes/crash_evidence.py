"""Evidence on a rank that ended by itself: its exit, its place, and its last output."""

from __future__ import annotations

import functools
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from megatron_ft.diagnosis.attribution import telling_kernel_lines
from megatron_ft.diagnosis.evidence import RankEvidence, open_sections, with_board
from megatron_ft.diagnosis.exceptions import (
    CrashOutput,
    is_peer_loss,
    last_words,
    terminated_by,
    words_of_error_file,
)
from megatron_ft.diagnosis.exits import describe_exit
from megatron_ft.diagnosis.rank_snapshot import RankSnapshot
from megatron_ft.link.base.layout import BoardSnapshot
from megatron_ft.link.facts.launcher import RankExited
from megatron_ft.link.file_queue import bounded_call
from megatron_ft.link.files.evidence_files import LIBRARIES, write_evidence
from megatron_ft.link.linux.kernel_facts import gpu_addresses, kernel_log
from megatron_ft.records.event_log import EventLog

_LAST_LINES = 40
_MAX_BYTES = 16_384


def read_last_words(reported: str, error_file: str, stderr: str = "") -> CrashOutput:
    """Return the last exception of a rank, from its report to its monitor (``reported``), torch's error file, and the
    file of its standard error, if it has one."""
    words = last_words(reported, library=LIBRARIES)
    content = bounded_call(lambda: _content(error_file), None)
    told = words_of_error_file(
        content or "",
        wall_offset_ns=time.time_ns() - time.monotonic_ns(),
        library=LIBRARIES,
    )
    return words._replace(
        error=words.error if is_peer_loss(words.error) else told.error or words.error,
        where=words.where or told.where,
        exception=words.exception or told.exception,
        raised_at_ns=words.raised_at_ns or told.raised_at_ns,
        unread=content is None and not words.error,
        terminated_by=terminated_by(bounded_call(lambda: _last_lines(stderr), "")) if stderr else "",
    )


def kernel_lines_about(
    local_rank: int, pid: int, started_ns: int, ended_ns: int, environ: Mapping[str, str] = os.environ
) -> tuple[str, ...]:
    """Return the kernel's last lines about a rank's GPU or process; nothing where this user may not read them."""
    none: list[str] = []
    addresses, records = bounded_call(gpu_addresses, none), bounded_call(kernel_log, none)
    gpu = gpu_of(addresses, environ.get("CUDA_VISIBLE_DEVICES"), local_rank)
    return telling_kernel_lines(records, since_us=started_ns // 1000, until_us=ended_ns // 1000, pid=pid, gpu=gpu)


def gpu_of(addresses: Sequence[str], visible: str | None, local_rank: int) -> str:
    """Return the PCI address of a rank's GPU, as the launcher's ``CUDA_VISIBLE_DEVICES`` says; empty if unknown."""
    numbers = [str(number) for number in range(len(addresses))] if visible is None else visible.split(",")
    number = numbers[local_rank].strip() if local_rank < len(numbers) else ""
    return addresses[int(number)] if number.isdecimal() and int(number) < len(addresses) else ""


def keep_evidence(
    rank_exit: RankExited,
    words: CrashOutput,
    *,
    board: BoardSnapshot | None,
    stderr: str,
    log: EventLog,
    log_dir: str | None,
    say: Callable[[str], None],
) -> None:
    """Write the evidence on a rank that ended by itself; ``log_dir`` None: no logs.

    Args:
        board: None if unreadable.
        stderr: file of its standard error; empty if that is the launcher's.
    """
    now_ns = time.monotonic_ns()
    note = RankSnapshot(
        rank=rank_exit.rank,
        local_rank=rank_exit.local_rank,
        host=socket.gethostname(),
        pid=rank_exit.pid or 0,
        gone=True,
        exitcode=rank_exit.exitcode,
        raised=rank_exit.error or "",
    )
    evidence = RankEvidence(
        summary=describe_exit(rank_exit) + (f", in {rank_exit.where}" if rank_exit.where else ""),
        note=replace(with_board(note, board, rank_exit.at_ns), iteration=rank_exit.iteration),
        cycle=rank_exit.cycle,
        open_sections=open_sections(board, rank_exit.at_ns),
        exception="" if rank_exit.error is None else words.exception,
        fatal_error=words.fatal_error,
        stderr=bounded_call(lambda: _last_lines(stderr), ""),
        missing=() if stderr else ("standard error: it isn't written to a file (--redirects, --tee)",),
        took_s=round((time.monotonic_ns() - now_ns) / 1e9, 4),
    )

    def write(log_dir: str) -> None:
        try:
            log.write(write_evidence(log_dir, evidence, suffix="-end"))
        except OSError as error:
            say(f"could not write the evidence on rank {evidence.note.rank}: {error.strerror}")

    if log_dir is not None:
        log.do(functools.partial(write, log_dir))


def _content(path: str) -> str | None:
    """Return the content of a file, empty if there is none; None if it can't be read."""
    try:
        with open(path, errors="replace") as file:
            return file.read()
    except FileNotFoundError:
        return ""
    except OSError:
        return None


def _last_lines(path: str) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _MAX_BYTES))
            text = file.read(_MAX_BYTES).decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-_LAST_LINES:])
