"""``make programs PROGRAMS_ARGS="--python VENV/bin/python --sources DIR"``: programs of others under ft_launcher.

Each trains under torchrun undisturbed, then under ft_launcher with a rank killed: it must end with the same exit code,
weights or losses, and leave no process and no temporary file behind that torchrun does not. DIR holds checkouts named
OWNER+REPOSITORY; libraries are those of the interpreter. What is not there is a failure.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from megatron_ft.link.linux.processes import ProcessStat, all_processes, carries, children, kill_matching

HERE = Path(__file__).parent
LONGEST_S = 500.0
EXAMPLES = "{sources}/pytorch+examples"
ON_CPU = str(HERE / "on_cpu.py")
PICTURES = """\
import os, numpy, PIL.Image
for at in range(32):
    os.makedirs(folder := f"data/{('train', 'val')[at // 24]}/class{at % 2}", exist_ok=True)
    pixels = numpy.random.default_rng(at).integers(0, 256, (32, 32, 3), numpy.uint8)
    PIL.Image.fromarray(pixels).save(f"{folder}/{at}.png")
"""
TOKENS = """\
import numpy, os, shutil
shutil.copy(os.environ["SOURCES"] + "/karpathy+nanoGPT/configurator.py", ".")
os.makedirs("data/tiny")
for name in ("train", "val"):
    numpy.random.default_rng(1).integers(0, 64, 4000).astype(numpy.uint16).tofile(f"data/tiny/{name}.bin")
"""
TEXT = "open('input.txt', 'w').write(''.join(chr(97 + at * at % 23) for at in range(4000)) + 'O God, O God!')"
DIGEST = """\
import hashlib, sys, torch
from torch.utils._pytree import tree_leaves
for path in sys.argv[1:]:
    state = torch.load(path, weights_only=False)
    state = state.get("model", state.get("state_dict", state))
    tensors = [leaf.detach().contiguous() for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)]
    print(len(tensors), hashlib.sha256(b"".join(each.view(-1).numpy().tobytes() for each in tensors)).hexdigest())
"""


@dataclass(frozen=True)
class Program:
    """`kill_at`: pattern of the output at which rank 1 is killed.

    `result`: file of weights, or pattern with a group of what each of the two ranks prints last.
    """

    name: str
    command: str
    kill_at: str
    result: str = "weights.pt"
    prepare: str = ""
    loses: bool = False
    """Compare with a torchrun that loses rank 1, too: the program goes on in another way than undisturbed, or leaves
    temporary files of a killed rank."""


def library(name: str, script: str, kill_at: str = r"step 25\b", loses: bool = False) -> Program:
    return Program(name, str(HERE / script), kill_at, loses=loses)


PROGRAMS = (
    library("HF Trainer", "hf_trainer.py", r"25/60"),
    library("TRL and PEFT", "trl_sft.py", r"25/60", loses=True),  # a killed rank leaves its temporary files
    library("accelerate", "accelerate_loop.py"),
    library("Lightning", "lightning_fit.py", r"step 45\b"),
    library("litgpt", "litgpt_fabric.py"),
    library("PyTorch-Ignite", "ignite_loop.py"),
    library("DeepSpeed ZeRO", "deepspeed_zero.py"),
    Program(
        "timm train.py",
        f"{ON_CPU} {{sources}}/huggingface+pytorch-image-models/train.py data --model resnet10t --num-classes 2 "
        "--device cpu -b 4 -j 1 --epochs 6 --img-size 32 --experiment run --output out --log-interval 1 "
        "--sched step --val-split val",
        r"Train: 2 ",
        "out/run/last.pth.tar",
        PICTURES,
        loses=True,
    ),
    Program(
        "imagenet",
        EXAMPLES + "/imagenet/main.py data -a shufflenet_v2_x0_5 --epochs 4 -b 8 -j 0 --seed 1 --no-accel "
        "--dist-url env:// --dist-backend gloo -p 1",
        r"Epoch: \[2\]",
        r"Epoch: \[3\]\[2/2\].*?Loss (\S+)",  # both ranks write the same file of weights
        PICTURES,
    ),
    Program("DDP example", f"{ON_CPU} {EXAMPLES}/distributed/ddp/example.py", "Initializing", "(training completed)"),
    Program(
        "FSDP2 example",
        f"{ON_CPU} {EXAMPLES}/distributed/FSDP2/example.py --dcp-api",
        "FSDP",
        "checkpoints/dcp_api/*/model_state_dict.pt",
    ),
    Program(
        "DDP tutorial",
        f"{ON_CPU} {EXAMPLES}/distributed/ddp-tutorial-series/multigpu_torchrun.py 40 50",
        r"Epoch 20 ",
        "snapshot.pt",
        loses=True,
    ),
    Program(
        "minGPT-ddp",
        f"{ON_CPU} {EXAMPLES}/distributed/minGPT-ddp/mingpt/main.py hydra.run.dir=. data_config.path=input.txt "
        "data_config.block_size=16 data_config.truncate=1 trainer_config.data_loader_workers=0 gpt_config.n_layer=1 "
        "gpt_config.n_head=2 gpt_config.n_embd=16 trainer_config.max_epochs=8 trainer_config.save_every=2 "
        "trainer_config.use_amp=False trainer_config.batch_size=32",
        r"Epoch 4 ",
        "gpt_snapshot.pt",
        TEXT,
        loses=True,
    ),
    Program(
        "nanoGPT",
        f"{ON_CPU} {{sources}}/karpathy+nanoGPT/train.py --dataset=tiny --compile=False --backend=gloo --dtype=float32 "
        "--n_layer=2 --n_head=2 --n_embd=32 --block_size=16 --batch_size=4 --gradient_accumulation_steps=2 "
        "--max_iters=60 --eval_interval=20 --eval_iters=2 --log_interval=1 --always_save_checkpoint=True",
        r"iter 30:",
        "out/ckpt.pt",
        TOKENS,
    ),
    Program(
        "minGPT adder",
        "{sources}/karpathy+minGPT/projects/adder/adder.py --model.model_type=gpt-nano --trainer.max_iters=120 "
        "--trainer.batch_size=4 --trainer.num_workers=0",
        r"iter 40:",
        r"iter 1[12]\d: train loss ([\d.]+)",
    ),
    Program(
        "minGPT chargpt",
        "{sources}/karpathy+minGPT/projects/chargpt/chargpt.py --model.model_type=gpt-nano --trainer.max_iters=120 "
        "--trainer.batch_size=4 --data.block_size=16 --trainer.num_workers=0",
        r"iter 40:",
        r"iter 1[12]\d: train loss ([\d.]+)",
        TEXT,
    ),
)


def train(
    program: Program, launcher: str, python: str, sources: Path, work: Path
) -> tuple[int, list[str], set[str], str]:
    """Return the exit code, the weights or losses, what is left behind, and the output."""
    (work / "tmp").mkdir(parents=True)
    mark = uuid.uuid4().hex
    env = os.environ | {"FT_PROGRAMS": mark, "SOURCES": str(sources), "TMPDIR": str(work / "tmp")}
    env |= {"HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{HERE.parents[1]}:{sources}/karpathy+minGPT"}
    env |= {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else torchrun's next ranks use old addresses

    def is_ours(stat: ProcessStat) -> bool:
        return carries(stat.pid, mark.encode())

    subprocess.run([python, "-c", program.prepare], cwd=work, env=env, check=True)
    command = [python, *launcher.split(), *program.command.format(sources=sources).split()]
    job = subprocess.Popen(command, cwd=work, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert job.stdout is not None
    bound = threading.Timer(LONGEST_S, kill_matching, (is_ours, 10.0))
    bound.start()
    text, is_done, is_torchrun = "", False, "megatron_ft" not in launcher
    while chunk := os.read(job.stdout.fileno(), 65536):
        text += chunk.decode(errors="replace")
        if not is_done and re.search(program.kill_at, text):
            kill = [python, "-m", "megatron_ft", "kill", "--rank", "1", "--pid", str(job.pid)]
            if not is_torchrun:
                is_done = subprocess.run(kill, env=env, cwd=work, stdout=subprocess.DEVNULL).returncode == 0
            elif program.loses:
                rank = [each for each in children(job.pid) if carries(each, b"\0RANK=1\0")]
                os.kill(*rank, signal.SIGKILL)
                is_done = True
    code = job.wait()
    bound.cancel()
    left = {"a process" for stat in all_processes() if is_ours(stat)}
    kill_matching(is_ours, timeout_s=10.0)
    left |= {re.sub(r"\w{8,}", "*", path.name) for path in (work / "tmp").iterdir()}
    results = re.findall(program.result, text)[-2:] if "(" in program.result else map(str, work.glob(program.result))
    return code, sorted(results), left, text


def main() -> int:
    """0 if every program held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", required=True, help="an interpreter that has the libraries")
    parser.add_argument("--sources", required=True, type=Path, help="a folder of checkouts")
    parser.add_argument("--only", default="", help="programs whose name holds this")
    args = parser.parse_args()
    failed = 0
    for program in PROGRAMS:
        if args.only not in program.name:
            continue
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="ft_programs_") as directory:
            work, same = Path(directory), (args.python, args.sources.resolve())
            torchrun = "-m torch.distributed.run --standalone --nproc-per-node=2 --max-restarts=3"
            ours = f"-m megatron_ft launch --nproc-per-node=2 --max-restarts=3 --ft-log-dir={work}/logs"
            code, wanted, usual, said = train(program, torchrun, *same, work / "torchrun")
            our_code, result, left, text = train(program, ours, *same, work / "ours")
            if "(" not in program.result:  # files
                digest = [args.python, "-c", DIGEST, *wanted, *result]
                found = subprocess.run(digest, capture_output=True, text=True, check=False).stdout.splitlines()
                wanted, result = found[: len(wanted)], found[len(wanted) :]
        problems = [] if code == 0 else [f"torchrun ended with {code}"]
        problems += [] if our_code == code else [f"ft_launcher ended with {our_code}, torchrun with {code}"]
        problems += [] if result == wanted and wanted else [f"result {result!r}, not {wanted!r}"]
        problems += [] if left <= usual else [f"left behind: {sorted(left - usual)}"]
        problems += [] if "rank 1 killed by SIGKILL" in text else ["rank 1 was not killed"]
        if problems:
            failed += 1
            Path(f"{tempfile.gettempdir()}/ft_programs_{program.name}.txt").write_text(f"{said}\n==== ours\n{text}")
        print(f"{program.name}: {'; '.join(problems) or 'held'} ({time.monotonic() - began:.0f} s)", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
