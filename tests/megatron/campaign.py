"""``make megatron MEGATRON_ARGS="CHECKOUT ..."``: unmodified Megatron-LM under our launcher, on the CPU, with faults.

Each checkout's own ``pretrain_gpt.py`` trains with ``--enable-ft-package``. Not a byte of it is changed: git, or a
digest of its files, says so at the end. Each run but the first loses a rank, and must end with the weights of the
undisturbed one, and name the rank. A checkout needs what Megatron-LM imports (six, regex, einops, pydantic): a folder
with those goes into PYTHONPATH. A run that can't be made is a failure; nothing is skipped.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_ft.link.linux.processes import carries, kill_matching
from tests.support.campaigns import launcher_records, run_job

ON_CPU = Path(__file__).with_name("on_cpu.py")
OPTIONS = (
    *("--max-restarts=3", "--ft-rank_section_timeouts=setup:120,step:6,checkpointing:60"),
    "--ft-rank_out_of_section_timeout=60",
)
MODEL = (
    *("--num-layers=2", "--hidden-size=32", "--num-attention-heads=2", "--seq-length=32"),
    *("--max-position-embeddings=32", "--micro-batch-size=1", "--global-batch-size=4", "--train-iters=24"),
    *("--lr=1e-3", "--min-lr=1e-4", "--lr-decay-iters=24", "--mock-data", "--tokenizer-type=NullTokenizer"),
    *("--vocab-size=127", "--transformer-impl=local", "--distributed-backend=gloo", "--no-persist-layer-norm"),
    *("--no-bias-gelu-fusion", "--no-bias-dropout-fusion", "--no-masked-softmax-fusion", "--no-rope-fusion"),
    *("--no-gradient-accumulation-fusion", "--use-cpu-initialization", "--position-embedding-type=learned_absolute"),
    *("--attention-backend=unfused", "--log-interval=4", "--eval-iters=1", "--eval-interval=100"),
    *("--attention-dropout=0", "--hidden-dropout=0"),  # the stand-in for CUDA has one state of random numbers, not two
    *("--save-interval=8", "--ckpt-format=torch_dist", "--num-workers=0"),
    *("--enable-ft-package", "--calc-ft-timeouts"),
)
LONGEST_S = 170.0


@dataclass(frozen=True)
class Case:
    """One run.

    Args:
        ends: rank and kind of what must end cycle 0, as the event log has them.
        after: iterations after which it may end.
        code: the launcher's exit code; a run that doesn't end with 0 has neither weights nor learned timeouts.
        says: what must be among the output.
        restores: one of these iterations is restored from memory; empty: none is.
        nodes: launchers on this machine, with a rank each, and a spare one; 1: one launcher with two ranks.
        loses: everything of this node is killed once iteration 20 is logged.
        needs: file of a checkout without which the run isn't asked for: older ones have no such feature.
    """

    name: str
    ends: tuple[int, str] | None = None
    after: tuple[int, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    flags: tuple[str, ...] = ()
    code: int = 0
    says: tuple[str, ...] = ()
    restores: tuple[int, ...] = ()
    nodes: int = 1
    loses: int | None = None
    needs: str = ""


def fault(text: str) -> tuple[tuple[str, str], ...]:
    return (("ON_CPU_FAULT", text),)


ASYNC = ("--async-save",)
LOCAL = ("--non-persistent-ckpt-type=local", "--non-persistent-save-interval=1", "--rerun-mode=disabled")
ATOMIC, PARALLEL = ((*LOCAL, f"--non-persistent-local-ckpt-algo={algo}") for algo in ("atomic", "fully_parallel"))
IN_MEMORY = ("FT: local checkpoints are kept in the nodes' memory, not in files",)
ON_THREE = (*ATOMIC, "--global-batch-size=6")
CONCLUDES = (
    "asks to re-run from the checkpoint on another GPU (Megatron exit code 16)",
    "ranks are rotated by one within each node",
    "on another GPU (Megatron exit code 17)",
    "not restarting",
)


def local(name: str, rank: int, flags: tuple[str, ...]) -> Case:
    """A rank is killed whose checkpoints are in memory."""
    restores = (18, 19, 20, 21, 22)
    return Case(name, (rank, "signal"), (21, 22), fault(f"SIGKILL;{rank};21"), flags, says=IN_MEMORY, restores=restores)


def injected(name: str, kind: str, said: str) -> Case:
    """Megatron-LM's rerun state machine asks for another GPU, and concludes."""
    flags = ("--error-injection-rate=1", f"--error-injection-type={kind}")
    return Case(name, flags=flags, code=93, says=(*CONCLUDES, said))


CASES = (
    Case("undisturbed"),
    Case("SIGKILL", (1, "signal"), (18, 19), fault("SIGKILL;1;18")),
    Case("SIGSTOP", (1, "hang"), (18, 19), fault("SIGSTOP;1;18")),
    Case("FT_SIM_FAULT_DESC", (0, "signal"), env=(("FT_SIM_FAULT_DESC", "rank_killed;0;0.8"),)),
    Case(
        "its own fault injector",
        (1, "signal"),
        flags=(
            *("--fault-injector-ranks=1", "--fault-injector-fault-types=SIGKILL", "--fault-injector-fault-delay=1"),
            "--fault-injector-delay-start-iteration=15",
        ),
        needs="megatron/core/fault_injector.py",
    ),
    Case("SIGKILL in a save", (1, "signal"), env=fault("SIGKILL;1;16;save")),
    Case("asynchronous saves", flags=ASYNC),
    Case("SIGKILL in an asynchronous save", (0, "signal"), env=fault("SIGKILL;0;16;save"), flags=ASYNC),
    local("SIGKILL with local checkpoints", 1, ATOMIC),
    local("SIGKILL with parallel local checkpoints", 0, PARALLEL),
    local("SIGKILL with asynchronous local checkpoints", 1, (*ATOMIC, *ASYNC)),
    Case("undisturbed on three nodes", flags=ON_THREE, nodes=3),
    Case(
        "lost node with local checkpoints",
        flags=ON_THREE,
        says=("(1 rank from other nodes)",),
        restores=tuple(range(16, 24)),
        nodes=3,
        loses=2,
    ),
    Case(
        "NaN in a local checkpoint",
        env=fault("NaN;1;20"),
        flags=ATOMIC,
        says=("restores nothing from memory",),
        restores=(20,),
    ),
    injected("a persistent error", "persistent_error", "Possible persistent error!"),
    injected("a result that is correct", "correct_result", "Correct result"),
)


def main() -> int:
    """0 if every run held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", nargs="+", type=Path)
    parser.add_argument("--longest", type=float, default=LONGEST_S, help="seconds for one run (%(default)s)")
    parser.add_argument("--only", default="", help="cases whose name holds this, beside the undisturbed one")
    args = parser.parse_args()
    problems = []
    for checkout in args.checkout:
        before, expected = digest(checkout), dict[int, list[str]]()
        for case in CASES:
            if (case.nodes in expected and args.only not in case.name) or not (checkout / case.needs).exists():
                continue
            with tempfile.TemporaryDirectory(prefix="ft_megatron") as directory:
                began = time.monotonic()
                found, weights = run(checkout, case, Path(directory), args.longest)
                took_s = time.monotonic() - began
            of_all = expected.setdefault(case.nodes, weights)
            if case.code == 0 and weights != of_all:
                found.append(f"ended with other weights: {weights}, not {of_all}")
            print(f"{checkout.name}: {case.name}: {'; '.join(found) or 'held'} ({took_s:.0f} s)", flush=True)
            problems += found
        if digest(checkout) != before:
            problems.append("changed")
            print(f"{checkout.name}: its files were changed")
    return 1 if problems else 0


def wrong_end(case: Case, ended: dict[str, Any]) -> Iterator[str]:
    """What is wrong with the record of the end of cycle 0."""
    cause = ended.get("cause") or {}
    if (cause.get("rank"), cause.get("kind")) != case.ends:
        yield f"cycle 0: {cause}, not {case.ends}"
    if case.after and ended.get("iteration") not in case.after:
        yield f"cycle 0 ended after iteration {ended.get('iteration')}, not {case.after}"


def unlearned(save: Path) -> Iterator[str]:
    """What is wrong with the timeouts that a run has learned."""
    try:
        learned = json.loads((save / "ft_state.json").read_text())
        if "step" not in learned["current_timeouts"]["section"]["calculated_sections"]:
            yield "no timeout of step was learned"
    except (OSError, ValueError, KeyError) as error:
        yield f"ft_state.json: {error!r}"


def run(checkout: Path, case: Case, directory: Path, longest_s: float) -> tuple[list[str], list[str]]:
    """What is wrong with one run, and the weights it ended with."""
    save, logs, files = (directory / name for name in ("checkpoints", "logs", "files"))
    env = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONDONTWRITEBYTECODE": "1", **dict(case.env)}
    env["PYTHONPATH"] = os.pathsep.join([str(checkout.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])])
    flags = [*case.flags, *(["--async-strategy=mcore"] if case.flags and has_strategies(checkout) else [])]
    if "--non-persistent-ckpt-type=local" in flags:
        flags.append(f"--non-persistent-local-ckpt-dir={files}")
    script = [str(ON_CPU), str(checkout.resolve() / "pretrain_gpt.py"), *MODEL, *flags]
    script += [f"--save={save}", f"--load={save}"]
    if case.nodes > 1:
        code, text = on_nodes(case, [*OPTIONS, f"--ft-log-dir={logs}"], script, env, directory, longest_s)
    else:
        try:
            code, text = run_job(["--nproc-per-node=2", *OPTIONS, *script], logs, longest_s, env)
        except subprocess.TimeoutExpired as error:
            code, text = -1, str(error.output)
    found = []
    if code != case.code:
        kept = Path(tempfile.gettempdir()) / f"ft_megatron_{checkout.name}_{case.name.replace(' ', '_')}.txt"
        kept.write_text(text)
        found.append(f"ended with {code}, see {kept}")
    found += [f"doesn't say {words!r}" for words in case.says if words not in text]
    if "imports of nvidia_resiliency_ext.fault_tolerance get megatron_ft" not in text:
        found.append("its client isn't ours")
    if case.ends is not None:
        found += wrong_end(case, next((each for each in launcher_records(logs) if each["ev"] == "cycle_ended"), {}))
    if case.code == 0:
        found += unlearned(save)
    restored = {int(number) for number in re.findall(r"restored iteration (\d+) from memory", text)}
    if len(restored) != bool(case.restores) or not restored <= {*case.restores}:
        found.append(f"restores {restored or 'nothing'} from memory, not one of {case.restores}")
    if files.exists():
        found.append(f"has made {files}")
    return found, sorted(re.findall(r"weights of (rank \d+: 1 \w+)", text))


def on_nodes(
    case: Case, options: list[str], script: list[str], env: dict[str, str], directory: Path, longest_s: float
) -> tuple[int, str]:
    """Run one job on several launchers and a spare one; return the worst exit code of those left, and all output."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
    place = [f"--nnodes={case.nodes}:{case.nodes}", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=megatron"]
    place += [f"--rdzv-endpoint={endpoint}", "--local-addr=127.0.0.1"]
    mark, until_s = f"FT_MEGATRON_NODE={directory.name}-", time.monotonic() + longest_s
    nodes, logs = list[subprocess.Popen[bytes]](), [directory / f"node-{at}.txt" for at in range(case.nodes + 1)]
    for at, log in enumerate(logs):
        own = {"FT_SECRET": "the secret of a campaign", "FT_MEGATRON_NODE": f"{directory.name}-{at}"}
        with log.open("wb") as out:
            command = [sys.executable, "-m", "megatron_ft.launcher", *options, *place, f"--node-rank={at}", *script]
            nodes.append(subprocess.Popen(command, env={**env, **own}, stdout=out, stderr=out))
        while at == case.nodes - 1 and time.monotonic() < until_s and not says(logs, "cycle 0 started"):
            time.sleep(0.2)  # the spare one comes when the others have met
    left = set(range(len(nodes))) - ({case.loses} if case.loses is not None else set())
    has_lost = case.loses is None
    while time.monotonic() < until_s and any(nodes[at].poll() is None for at in left):
        if not has_lost and says(logs, " 20/"):
            has_lost = True
            end(f"{mark}{case.loses}\0")
        time.sleep(0.05)
    end(mark)
    codes = [nodes[at].wait() for at in left]
    return max(codes, key=abs), "".join(log.read_text(errors="replace") for log in logs)


def end(mark: str) -> None:
    """Kill everything that has this in its environment."""
    kill_matching(lambda stat: carries(stat.pid, mark.encode()), timeout_s=10.0)


def says(logs: list[Path], words: str) -> bool:
    """Whether that is among the output so far."""
    return any(log.exists() and words in log.read_text(errors="replace") for log in logs)


def has_strategies(checkout: Path) -> bool:
    """Whether asynchronous saves are nvidia-resiliency-ext's unless Megatron-LM's own are asked for."""
    return any("async_strategy" in path.read_text() for path in (checkout / "megatron" / "training").rglob("*.py"))


def digest(checkout: Path) -> str:
    """Of all its files but compiled ones."""
    files = (path for path in sorted(checkout.rglob("*")) if path.is_file() and path.suffix not in (".pyc", ".so"))
    found = hashlib.sha256()
    for path in files:
        found.update(str(path.relative_to(checkout)).encode() + path.read_bytes())
    return found.hexdigest()


if __name__ == "__main__":
    sys.exit(main())
