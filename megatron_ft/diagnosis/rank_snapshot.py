"""Snapshot of one rank of a job that hangs: short enough to be sent to the launcher that decides. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from msgspec.structs import force_setattr, replace

from megatron_ft.diagnosis.collectives import Collective
from megatron_ft.diagnosis.stacks import Frame
from megatron_ft.link.base.codec import Count, Finite, Int, LocalRank, Message, Rank, Seconds
from megatron_ft.link.base.signal_rules import signal_name

EVIDENCE_S = 2.0
"""Most seconds for collecting evidence; the monitor that found the hang and the launcher must agree."""
_NEAR = 10
"""Number of innermost calls of a stack searched for what the thread waits in."""
_MOST_CHARACTERS = 1000
_C10D = "torch/distributed/distributed_c10d.py"
_INSTALLED = r"/(?:site|dist)-packages/"
_SOURCES = (
    r"/torch/(?:_ops|_tensor|_utils|_compile|serialization|functional)\.py",
    r"/torch/(?:autograd|optim)/(?:__init__|graph|function|optimizer)\.py",
    r"/torch/(?:_dynamo|_inductor|_functorch|_C|nn/modules|nn/parallel|utils/data/_utils)/",
    r"/torch/(?:nn/functional|utils/_contextlib|utils/checkpoint|utils/data/dataloader)\.py",
    r"/torch/distributed/(?:distributed_c10d|c10d_logger|device_mesh|rendezvous)\.py",
    r"/torch/distributed/(?:_composable|_functional_collectives|_shard|algorithms|checkpoint|fsdp|nn)\b",
    r"/torch/distributed/(?:pipelining|rpc|tensor)\b",
    r"/megatron/core/(?:datasets|dist_checkpointing|distributed|export|extensions|fusions|inference|models|optimizer"
    r"|pipeline_parallel|post_training|quantization|resharding|ssm|tensor_parallel|tokenizers|transformer)/",
    r"/megatron/core/(?:optimizer_param_scheduler|parallel_state|process_groups_config|rerun_state_machine|timers|utils"
    r"|jit|num_microbatches_calculator|hyper_comm_grid|full_cuda_graph|nccl_allocator|msc_utils|safe_globals)\.py",
    r"/megatron/training/(?:tokenizer|datasets|config|models|utils|distillation)/",
    r"/megatron/training/(?:arguments|argument_utils|async_utils|checkpointing|dist_signal_handler|ft_integration"
    r"|global_vars|initialize|inprocess_restart|log_handler|theoretical_memory_usage|training|utils|yaml_arguments"
    r"|one_logger_utils|wandb_utils|dgrad_logging)\.py",
    r"/megatron/(?:legacy|post_training|inference|rl|bridge)/(?:data|fp16_deprecated|fused_kernels|indexer|model|mpu"
    r"|models|training|recipes|peft|checkpointing|arguments|utils|text_generation|inference)\b",
)
"""Files of torch and of Megatron run from their sources. Others in a directory of that name are the user's."""
_MEGATRON = re.compile(r".*/megatron/(?=(?:core|training|legacy|post_training|inference|rl|bridge|elastification)/)")
_TORCH_OR_MEGATRON = re.compile("|".join((rf"{_INSTALLED}(?:torch|megatron)/", *_SOURCES)))
_PROCESSES = re.compile(
    r"/python3[^/]*/(?:multiprocessing/|concurrent/futures/process\.py|subprocess\.py)|/torch/multiprocessing/"
)
_CHECKPOINTS = re.compile(r"/megatron/core/dist_checkpointing/|/torch/distributed/checkpoint/")


class RankSnapshot(Message, frozen=True, kw_only=True):
    """Evidence on one rank, at the moment at which a rank was found hung.

    Args:
        section: outermost open section; open_s: its age, or the time since none is open.
        quiet_s: seconds since the last section event.
        left_s: seconds until the first of its timeouts is over, negative if one is; None if none runs.
        found_hung: its own monitor found it overdue.
        state: state of its process as in /proc: "R", "S", "D", "T"; empty if unknown.
        is_busy: its main thread used its processor while evidence was collected.
        has_stack: a stack was collected; frame and inner are of its main thread.
        frame: innermost call in the user's code, "loader.py:88 next_batch"; inner: innermost call of all.
        seen_s: age of ``frame``, if the rank itself had noted it before; None if that is unknown.
        waits_in: collective shown by its stack, empty if none.
        has_collectives: it reported its collectives; a rank that holds the GIL can't.
        is_in_library: its innermost call is in torch or Megatron, where it may wait in C.
        timeout_s: timeout of the outermost open section, or out of section; None is none.
        enqueued: "backend/group" -> number of the last entered collective.
        closing: it had ended its monitoring; gone: its process had ended; exitcode: its exit code, None if unknown.
        raised: exception by which it ends, "type: message", the first 1,000 characters; ending may take for ever.
        raised_s: seconds since then.
        handling: exception that its main thread is handling, "type: message, in FILE:LINE FUNCTION", perhaps harmless.
        lost: its processes that have failed, in the form of ``lost_process``, and threads that have died.
        waits_for_process: its stack is where Python waits for a process, or for data of one.
        own_rank: its number in its default process group, if it differs (after a restart within the process); groups of
        its collectives use such numbers.
        collective_s: for a script without hooks: seconds since a collective was seen to begin or complete.
        progress: what it did while evidence was collected, in words; empty if nothing, or where nobody asked.
    """

    rank: Rank
    local_rank: LocalRank = 0
    host: str = ""
    pid: Count = 0
    iteration: Int | None = None
    section: str | None = None
    open_s: Seconds = 0.0
    quiet_s: Seconds = 0.0
    found_hung: bool = False
    state: str = ""
    is_busy: bool = False
    has_stack: bool = False
    frame: str = ""
    seen_s: Seconds | None = 0.0
    inner: str = ""
    waits_in: str = ""
    is_saving: bool = False
    is_in_library: bool = False
    timeout_s: Seconds | None = None
    has_collectives: bool = False
    in_flight: tuple[Collective, ...] = ()
    enqueued: Mapping[str, Count] = {}
    closing: bool = False
    gone: bool = False
    raised: str = ""
    raised_s: Seconds = 0.0
    handling: str = ""
    left_s: Finite | None = None
    lost: tuple[str, ...] = ()
    waits_for_process: bool = False
    collective_s: Seconds | None = None
    exitcode: Int | None = None
    own_rank: Count | None = None
    progress: str = ""

    def __post_init__(self) -> None:
        if len(self.raised) > _MOST_CHARACTERS:  # a message has room for a MiB, and some exceptions are longer
            force_setattr(self, "raised", self.raised[:_MOST_CHARACTERS])

    @property
    def is_stopped(self) -> bool:
        """True if stopped by a signal or a debugger."""
        return self.state in ("T", "t")

    @property
    def seems_to_wait(self) -> bool:
        """True if the stack is in a collective, or idle in torch or Megatron, as in `request.wait()` of a pipeline.

        Gloo's point-to-point operations aren't in torch's flight recorder.
        """
        return bool(self.waits_in) or (self.is_in_library and not (self.is_busy or self.is_saving))

    @property
    def is_stuck_in_kernel(self) -> bool:
        """True in uninterruptible sleep: a dead file server, a driver."""
        return self.state == "D"


def is_in_library(frames: Sequence[Frame]) -> bool:
    """Return True if the innermost call of a stack is torch's or Megatron's, which may wait in C.

    A directory's name alone tells nothing: users have a ``megatron/`` and a ``torch/`` of their own.
    """
    if not frames:
        return False
    file, script = frames[0].file, frames[-1].file
    # other packages installed below a directory of that name are neither
    installed = list(re.finditer(_INSTALLED, file))
    if _TORCH_OR_MEGATRON.search(file, installed[-1].start() if installed else 0) is not None:
        return True
    package = _MEGATRON.match(file)  # one that the script, elsewhere, has imported
    return package is not None and not installed and script.startswith("/") and not script.startswith(package[0])


def stack_wait(frames: Sequence[Frame]) -> str:
    """Return the collective that a stack (innermost call first) is in: "all_reduce"; empty if none."""
    for frame in frames[:_NEAR]:
        if frame.file.endswith(_C10D) and not frame.function.startswith("_"):
            return frame.function
    return ""


def is_past_its_script(frames: Sequence[Frame]) -> bool:
    """Return True if a main thread's stack is where Python waits for other threads, at the end of the process."""
    return any(frame.function == "_shutdown" and frame.file.endswith("/threading.py") for frame in frames)


def is_waiting_for_process(frames: Sequence[Frame]) -> bool:
    """Return True if a stack (innermost call first) is where Python waits for another process, or for its data."""
    return any(_PROCESSES.search(frame.file) for frame in frames[:_NEAR])


def lost_process(pid: int, name: str, exitcode: int) -> str:
    """Return a process that failed, in words; ``exitcode`` as in ``subprocess``."""
    how = f"exited with code {exitcode}" if exitcode >= 0 else f"was killed by {signal_name(-exitcode)}"
    return f"process {pid} ({name}), which {how}"


def is_in_checkpoint_write(frames: Sequence[Frame]) -> bool:
    """Return True if a stack is in one of torch's or Megatron's checkpoint writers."""
    return any(
        _CHECKPOINTS.search(frame.file) is not None
        or (frame.file.endswith("torch/serialization.py") and frame.function == "save")
        for frame in frames
    )


def place(note: RankSnapshot) -> str:
    """Return a rank's place in words: "in loader.py:88 next_batch", and the processes it has lost."""
    if note.handling and not note.raised:
        waits = "waits " if note.in_flight or note.waits_in else ""
        return f"raised {note.handling}, then {waits}{place(replace(note, handling=''))}"
    if not note.lost or note.gone:
        return _place(note)
    more = f", and {len(note.lost) - 1} more" if len(note.lost) > 1 else ""
    return _joined(f"{'waits for' if note.waits_for_process else 'has lost'} its {note.lost[0]}{more}", _place(note))


def _place(note: RankSnapshot) -> str:
    inner = note.inner if note.inner != note.frame else ""
    where = f"in {note.frame}" if note.frame else ""
    if note.raised and not note.gone:
        return _joined(where, "has not exited" + (f" (now in {inner})" if inner else ""))
    if note.gone:
        return (note.raised and where) or (
            "has exited with 0" if note.exitcode == 0 and not note.raised else "has ended"
        )
    if where and note.seen_s != 0:
        where = f"last seen {'' if note.seen_s is None else f'{note.seen_s:.0f} s ago '}{where}"
    where = f"{where} ({inner})" if inner else where
    if note.is_stopped:
        return where or "its process is stopped"
    state = f", process state {note.state}" if note.state else ""
    what = (
        "in uninterruptible sleep" if note.is_stuck_in_kernel else "",
        f"in {note.in_flight[0].name}" if note.in_flight else "",
        f"in {note.waits_in}" if note.waits_in else "",
        "in a checkpoint write" if note.is_saving else "",
        "has ended its monitoring" if note.closing else "",
        "" if note.has_stack else f"does not answer (no stack could be collected{state})",
    )
    if known := next(filter(None, what), ""):
        return _joined(known, where)
    return _joined(where, "holding the GIL" if not note.has_collectives else "computing" if note.is_busy else "")


def _joined(*parts: str) -> str:
    return ", ".join(part for part in parts if part)
