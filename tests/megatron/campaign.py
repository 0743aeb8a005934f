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
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

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
    needs: str = ""


def fault(text: str) -> tuple[tuple[str, str], ...]:
    return (("ON_CPU_FAULT", text),)


ASYNC = ("--async-save",)
LOCAL = ("--non-persistent-ckpt-type=local", "--non-persistent-save-interval=1", "--rerun-mode=disabled")
ATOMIC, PARALLEL = ((*LOCAL, f"--non-persistent-local-ckpt-algo={algo}") for algo in ("atomic", "fully_parallel"))
IN_MEMORY = ("FT: local checkpoints are kept in the nodes' memory, not in files",)
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
        before, expected = digest(checkout), list[str]()
        for case in CASES:
            if (expected and args.only not in case.name) or not (checkout / case.needs).exists():
                continue
            with tempfile.TemporaryDirectory(prefix="ft_megatron") as directory:
                began = time.monotonic()
                found, weights = run(checkout, case, Path(directory), args.longest)
                took_s = time.monotonic() - began
            expected = expected or weights
            if case.code == 0 and weights != expected:
                found.append(f"ended with other weights: {weights}, not {expected}")
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
