"""What `make demo` runs: a real GPT training loses a rank twice and ends with the weights of an undisturbed run.

    python examples/demo.py [--out DIR] [--nproc-per-node N] [arguments for train_gpt.py ...]

First the job runs undisturbed. Then the same job runs with a fault plan: a rank is killed, the job restarts; a rank
hangs, the job restarts; it finishes. Exit code 0 only if all of that happened and the final weights are equal.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_ft.cli.analysis.analysis import analyze
from megatron_ft.cli.logs.read import EventLogFile, read_directory
from megatron_ft.cli.logs.runs import Run, split_runs
from megatron_ft.cli.render.report_tables import print_report
from megatron_ft.errors import ConfigError
from megatron_ft.link.facts.rank import FaultInjected
from megatron_ft.link.linux.process_setup import die_with_parent
from megatron_ft.rank.faults.plan import PlannedFault, read_fault_plan

HERE = Path(__file__).resolve().parent
FAULT_PLAN = HERE.parent / "megatron_ft" / "configs" / "faults" / "kill-then-hang.yaml"
TIMEOUTS = [
    "--ft-rank-section-timeouts=setup:120,step:3,checkpointing:60",
    "--ft-rank-out-of-section-timeout=60",
]
TRAINING = [
    *("--train-iters=60", "--save-interval=10", "--log-interval=10", "--memory-checkpoint-interval=1"),
    # Steps of 100 ms or so, as in a real job.
    *("--micro-batch-size=16", "--global-batch-size=64"),
    # As with Megatron-LM, unless it is told otherwise: SIGTERM ends a rank, also one that waits for a dead peer.
    "--no-exit-signal-handler",
]
# megatron-core makes 28 process groups, and gloo connects them all at once, unless it is told to connect on first use.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_GLOO_LAZY_INIT": "1", "PYTHONUNBUFFERED": "1"}
# How a launcher's fault shows in the event log, by the type of the fault.
EXPECTED_KIND = {"rank_killed": "signal", "rank_hung": "hang", "sleep": "hang", "spin": "hang"}
_TRACEBACK = re.compile(rb"\[rank(\d+)\]:")
_GRACE_S = 30.0


def main() -> int:
    """Run the demo; returns the exit code."""
    args, training_args = parse_args()
    out = Path(args.out) if args.out else Path(tempfile.mkdtemp(prefix="megatron-ft-demo-"))
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        print(f"demo: {out} isn't empty: choose another --out", file=sys.stderr)
        return 2
    # A plain kill of this process ends the job, too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        problems = run_both(out, args.nproc_per_node, training_args)
    except ConfigError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\ndemo: interrupted; output and logs are in {out}", file=sys.stderr)
        return 130
    for problem in problems:
        print(f"demo: FAILED: {problem}", file=sys.stderr)
    if not problems and not args.out:
        for checkpoints in out.glob("*/checkpoints"):
            shutil.rmtree(checkpoints)
    print(f"output and event logs: {out}")
    return 1 if problems else 0


def parse_args() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description="Train undisturbed, then with a killed and a hung rank, and compare the final weights.",
        epilog="Other arguments go to train_gpt.py: --tensor-model-parallel-size 2, --async-save ...",
        allow_abbrev=False,
    )
    parser.add_argument("--out", metavar="DIR", help="keep everything here; default: a new temporary directory")
    parser.add_argument("--nproc-per-node", type=int, default=2, metavar="N", help="ranks (default: 2)")
    return parser.parse_known_args()


def run_both(out: Path, ranks: int, training_args: Sequence[str]) -> list[str]:
    """Run the job without and with faults; returns what isn't as it should be.

    Raises:
        ConfigError: the fault plan doesn't fit.
    """
    faults = read_fault_plan(FAULT_PLAN, ranks)
    headline("1 of 2: the job without a fault")
    code = run_job(out / "undisturbed", ranks, training_args)
    if code != 0:
        return [f"the undisturbed job ended with exit code {code}: see {out / 'undisturbed' / 'output.log'}"]
    headline("2 of 2: the same job, in which " + ", and ".join(fault.describe() for fault in faults))
    started = time.monotonic()
    code = run_job(out / "disturbed", ranks, [f"--fault-plan={os.path.relpath(FAULT_PLAN)}", *training_args])
    headline(f"what happened in these {time.monotonic() - started:.0f} s")
    logs = read_directory(out / "disturbed" / "logs")
    runs = split_runs(logs)
    if len(runs) != 1:
        return [f"the event logs tell of {len(runs)} runs, not of 1"]
    print_report(analyze(runs[0]))
    weights = [read_hash(out / name / "weights.sha256") for name in ("undisturbed", "disturbed")]
    verdict = "equal" if weights[0] == weights[1] and weights[0] is not None else "DIFFERENT"
    print(f"final weights, sha256: {verdict}\n  without a fault   {weights[0]}\n  with the faults   {weights[1]}")
    problems = find_problems(runs[0], faults, logs)
    if code != 0:
        problems.append(f"the job with the faults ended with exit code {code}")
    if verdict != "equal":
        problems.append("the final weights aren't equal")
    return problems


def find_problems(run: Run, faults: Sequence[PlannedFault], logs: Sequence[EventLogFile]) -> list[str]:
    """Whether each fault happened, ended its cycle, and was put down to its rank."""
    fired = [entry.record for log in logs for entry in log.entries if isinstance(entry.record, FaultInjected)]
    seen = {(record.cycle, record.rank, record.iteration, record.type) for record in fired}
    happened = {fault: (fault.cycle, fault.rank, fault.iteration, fault.type) in seen for fault in faults}
    problems = [f"this fault never happened: {fault.describe()}" for fault in faults if not happened[fault]]
    if run.restarts != len(faults):
        problems.append(f"there were {run.restarts} restarts, not {len(faults)}")
    by_number = {cycle.cycle: cycle for cycle in run.cycles}
    for fault in faults:
        cycle = by_number.get(fault.cycle)
        cause = None if cycle is None else cycle.cause
        expected = EXPECTED_KIND.get(fault.type, "crash"), fault.rank
        if cycle is not None and (cause is None or (cause.kind.value, cause.rank) != expected):
            problems.append(
                f"cycle {fault.cycle} ended otherwise than planned: {cause.text if cause else cycle.outcome}"
            )
    if run.cycles and run.cycles[-1].outcome != "succeeded":
        problems.append(f"the last cycle {run.cycles[-1].outcome}")
    return problems


def run_job(directory: Path, ranks: int, training_args: Sequence[str]) -> int:
    """Run the job under ft_launcher, show its output, keep all of it; returns the exit code.

    Ctrl-C reaches this process only, which asks the launcher to stop; a second one kills the launcher. However this
    process ends, the launcher ends with it, and with the launcher its ranks.
    """
    directory.mkdir()
    launch = [sys.executable, "-m", "megatron_ft.launcher", f"--nproc-per-node={ranks}", "--max-restarts=3"]
    launch += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", f"--ft-log-dir={directory / 'logs'}", *TIMEOUTS]
    script = [os.path.relpath(HERE / "train_gpt.py"), f"--save={directory / 'checkpoints'}"]
    script += [f"--hash-file={directory / 'weights.sha256'}", *TRAINING, *training_args]
    print(f"$ ft_launcher {shlex.join([*launch[3:], *script])}", flush=True)
    process = subprocess.Popen(
        [*launch, *script],
        env={**os.environ, **ENVIRONMENT},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )
    try:
        show_output(process, directory / "output.log")
        return process.wait()
    finally:
        stop(process)


def show_output(process: subprocess.Popen[bytes], log: Path) -> None:
    """Copy the output to the log, and to the terminal without tracebacks: ranks that lost a peer have long ones."""
    assert process.stdout is not None
    tracebacks_of: set[bytes] = set()
    with log.open("wb") as copy:
        for line in process.stdout:
            copy.write(line)
            copy.flush()
            traceback = _TRACEBACK.match(line)
            if traceback is None:
                tracebacks_of.clear()
                sys.stdout.buffer.write(line)
            elif traceback[1] not in tracebacks_of:
                tracebacks_of.add(traceback[1])
                sys.stdout.buffer.write(b"[rank%s]: (a traceback: see %s)\n" % (traceback[1], bytes(log)))
            sys.stdout.buffer.flush()


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the launcher if it still runs; it ends its ranks."""
    try:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(_GRACE_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.kill()
        process.wait()
    finally:
        assert process.stdout is not None
        process.stdout.close()


def read_hash(path: Path) -> str | None:
    return path.read_text().strip() if path.exists() else None


def headline(text: str) -> None:
    print(f"\n== {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
