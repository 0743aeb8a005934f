"""What happens to jobs on a cluster, and how they have to end."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from functools import partial
from types import FunctionType

from tests.slurm.run import BIN, HOLD, ROOT, Run

Row = Callable[[Run], None]
STEP_DAEMON = r"slurmstepd: \[\d+\.\d+\]"
LAUNCHER = r"^\S*python\S* -m megatron_ft\.launcher"


def undisturbed(run: Run) -> None:
    """Two nodes, nothing happens."""
    run.submit()
    run.end()
    run.expect("finished", restarts=0)


def _lost(act: Callable[[Run, int], None], run: Run, *, is_named: bool = True) -> None:
    """A spare takes the place of the second node."""
    run.hold(nodes=3, spares=1)
    host = run.host(1)
    assert host != 1, "the batch script's node"
    act(run, host)
    run.finish("finished", restarts=1, faults=[(f"node{host}", "lost")] if is_named else [])


def killed_rendezvous_host(run: Run) -> None:
    """The first node's launcher, with its coordinator; srun and the batch script, which run there, too, are left.

    Without etcd nobody else leads: the launchers ask to be started again, in the same allocation.
    """
    run.hold(nodes=4, spares=1)
    run.cluster.kill(1, LAUNCHER)
    run.finish("lost", "finished")


def power_loss_of_the_first_node(run: Run) -> None:
    """The batch script's node, and the coordinator's: a launcher requeues the job once Slurm has noticed."""
    run.hold(nodes=4, spares=1)
    run.cluster.power_off(1)
    run.wait(lambda: run.cluster.job(run.job).get("JobState") == "PENDING", "the job is requeued", 150)
    run.cluster.boot_what_is_off()
    run.wait_life(2)
    run.finish("lost", "finished")


def scancel(run: Run) -> None:
    """For good."""
    run.hold()
    run.scancel()
    run.end()
    run.expect("stopped", code=None, state="CANCELLED", weights=False)


def _stopped(run: Run, *options: str) -> None:
    """SIGTERM for the launchers, for the batch script, or for everybody, srun too."""
    run.hold()
    run.scancel(*options, "--signal=TERM")
    run.wait_life(2)
    run.finish("stopped", "finished")


def time_limit(run: Run) -> None:
    """A signal before it, as in the README."""
    run.submit("--hold", HOLD, sbatch="--time=1 --signal=TERM@20")
    run.wait_life(2)
    run.finish("stopped", "finished")


def _preempted(partition: str, run: Run) -> None:
    """Slurm requeues the job; without grace time SIGKILL comes at once, or after KillWait, in which ranks save."""
    run.hold(sbatch=f"--partition={partition}")
    words = ["sbatch", "--parsable", "--partition=high", f"--nodes={run.cluster.count}", "--exclusive"]
    run.cluster.command(*words, f"--output={run.directory}/high.txt", "--wrap=sleep 2")
    run.wait_life(2)
    run.finish("stopped", "finished")


def dependent_jobs(run: Run) -> None:
    """Where nothing may be requeued each job is a life, and the next one starts only if that one didn't finish."""
    fixed = "--exclusive --no-requeue --kill-on-invalid-dep=yes"
    jobs: list[str] = []
    for _ in range(3):
        after = f"--dependency=afternotok:{jobs[-1]}" if jobs else ""
        run.submit("--hold", HOLD, sbatch=f"{fixed} {after}", launcher=f"--ft-log-dir={run.directory}/ft-logs")
        jobs.append(run.job)
    run.job = jobs[0]
    run.wait_at(HOLD)
    run.scancel("--signal=TERM")
    run.end()
    run.go(HOLD)
    run.job = jobs[1]
    run.end()
    run.expect("stopped", "finished", restarts=0)
    run.job = jobs[2]
    run.end()
    run.expect("stopped", "finished", code=None, state="CANCELLED")


def excluded_node(run: Run) -> None:
    """Under NeMo-Run's options of srun the first launcher that ends would end all, 60 s later."""
    script = run.quick("--excluded-at", 8, "--hold", 20)
    run.submit_script(
        "#!/bin/bash\n"
        "#SBATCH --nodes=3 --ntasks-per-node=1 --exclusive --open-mode=append\n"
        f"srun --wait=60 --kill-on-bad-exit=1 ft_launcher --nnodes 2 --nproc-per-node 1 --max-restarts 3 "
        f"--ft-log-dir={run.directory}/ft-logs {script}\n"
    )
    run.wait_at(20)
    time.sleep(65)
    run.go(20)
    run.end()
    run.expect("finished", restarts=0, told=["its disk is broken"])


def _two_jobs(launcher: str, run: Run) -> None:
    """On one port the second one is refused, and the first one isn't disturbed; else each has a port of its own."""
    other = Run(run.cluster, run.directory / "other", run.undisturbed)
    run.hold(sbatch="--nodelist=node1,node2", launcher=launcher)
    other.submit("--hold", HOLD, sbatch="--nodelist=node1,node2", launcher=launcher)
    if launcher:
        other.end()
        other.expect(code=2, state="FAILED", weights=False, told=["another job|other job"])
    else:
        other.wait_at(HOLD)
        other.finish("finished")
    run.problems += [f"the other job: {problem}" for problem in other.problems]
    run.finish("finished")


def rehearsal_beside_another_job(run: Run) -> None:
    """A kill and a hang, as in docs/before-the-night-run.md; another job of the user on the same nodes is untouched."""
    other = Run(run.cluster, run.directory / "other", run.undisturbed)
    for each, timeouts in ((other, ""), (run, "--ft-rank-section-timeouts step:30")):
        each.submit("--hold", HOLD, sbatch="--nodelist=node1,node2", launcher=timeouts)
        each.wait_at(HOLD)
    on_its_node = f"srun --jobid {run.job} --overlap -N1 -n1 -w node{run.host(1)} {BIN}/megatron-ft"
    refused = run.cluster.command(*f"{on_its_node} kill --rank 1".split(), check=False)
    (run.save / f"at-{HOLD}").unlink()
    done = [run.cluster.command(*f"{on_its_node} kill --rank 1 --job {run.job}.0.0".split())]
    run.wait_at(HOLD)
    done.append(run.cluster.command(*f"{on_its_node} kill --rank 1 --job {run.job}.0.0 --signal STOP".split()))
    if refused or not all("to rank 1" in each for each in done):
        run.problems.append(f"without a job's name: {refused!r}; with it: {done}")
    for each in (run, other):
        each.go(HOLD)
        each.end()
    run.expect("finished", restarts=2, told=["rank 1 killed by SIGKILL", r"rank 1 .*hung in 'step' .*process stopped"])
    other.expect("finished", restarts=0)
    run.problems += [f"the other job: {problem}" for problem in other.problems]


def fails_for_ever(run: Run) -> None:
    """Each life goes on counting where the one before has ended."""
    run.submit("--fails-at", 17, launcher="--max-restarts 1")
    run.end()
    run.expect(
        "failed", "failed", "no_progress", code=93, state="FAILED", weights=False, told=["this batch can't be read"]
    )
    said = len(re.findall(r"^\[ft_launcher\] .*: cycle \d+ ended: ", run.output, re.MULTILINE))
    if said != (cycles := sum(int(str(life["cycles"])) for life in run.lives)):
        run.problems.append(f"why a cycle has ended was said {said} times, of {cycles} cycles")


def batch_script_of_the_readme(run: Run) -> None:
    """It trains examples/train_gpt.py to its end across a killed node and two requeues."""
    text = re.search(r"^    #!/bin/bash\n(?:    .*\n)+", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert text is not None
    plan = run.directory / "slow.yaml"
    slow = [f"  - {{cycle: {cycle}, rank: 0, iteration: {at}, type: slow, seconds: {s}}}" for cycle, at, s in SLOW]
    plan.write_text("\n".join(["faults:", *slow, ""]))
    train = f"{ROOT}/examples/train_gpt.py --save {run.save} --hash-file {run.save}/weights {SMALL}"
    undisturbed = run.directory / "undisturbed"
    run.cluster.command(
        *(f"{BIN}/ft_launcher", "--scheduler=none", "--nproc-per-node=2", f"--ft-log-dir={undisturbed}/logs"),
        *train.replace(str(run.save), str(undisturbed)).split(),
        bound_s=300,
    )
    run.undisturbed = (undisturbed / "weights").read_text().strip()
    script = re.sub("^    ", "", text[0], flags=re.MULTILINE)
    script = script.replace("--nodes=17", "--nodes=3").replace("--nproc-per-node 8", "--nproc-per-node 1")
    script = script.replace(" --gpus-per-node=8", "")  # the testbed has none
    run.submit_script(script.replace("train.py", f"{train} --fault-plan {plan}"))
    standby = r"1 node on standby for the next restart: node(\d)"  # the one that has come last
    run.wait_told(standby)
    (spare,) = re.findall(standby, run.output)
    host = 5 - int(spare)
    assert host in (2, 3), "the batch script's node stands by"
    run.wait_told(r"iteration +10/")
    run.cluster.power_off(host)
    run.wait(lambda: int(str(run.lives[0]["cycles"])) > 1, "cycle 1 trains")
    run.wait_told(r"iteration +20/")
    run.scancel("--signal=TERM")
    run.wait_life(2)
    run.wait_told(r"iteration +35/")
    run.scancel("--signal=TERM")
    run.end()
    run.expect("stopped", "stopped", "finished", restarts=1, faults=[(f"node{host}", "lost")])


def two_steps_of_a_job(run: Run) -> None:
    """Each has its own log directory, and status asks all nodes."""
    step = "srun -N1 -n1 --exact ft_launcher --nproc-per-node 1 {} > {}.txt 2>&1 &\n"
    script = run.directory / "waits.py"
    script.write_text("import os, time\nwhile not os.path.exists('go'): time.sleep(0.1)\n")
    steps = "".join(step.format(script, name) for name in "ab")
    run.submit_script(f"#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=1 --exclusive\n{steps}wait %1 && wait %2\n")
    texts = [run.directory / f"{name}.txt" for name in "ab"]
    run.wait(lambda: all(text.exists() and "cycle 0" in text.read_text() for text in texts), "both steps train")
    status = run.cluster.command(f"{BIN}/megatron-ft", "status", "--slurm", run.job, check=False)
    (run.directory / "go").touch()
    run.end()
    run.expect(weights=False)
    logs = {match for text in texts for match in re.findall("logs: (.*)", text.read_text())}
    if sorted(path.rpartition("/")[2] for path in logs) != [f"slurm-{run.job}.{number}" for number in range(2)]:
        run.problems.append(f"log directories: {logs}")
    if status.count("1 of 1 restart") + status.count("0 of 0 restarts") != 2:
        run.problems.append(f"status: {status}")


SMALL = "--hidden-size=32 --seq-length=16 --vocab-size=32 --train-iters=60"
SLOW = [(cycle, at, 0.3) for cycle in (0, 1) for at in range(60)]

ROWS: dict[str, Row] = {
    **{name.replace("_", " "): row for name, row in vars().items() if isinstance(row, FunctionType) and name[0] != "_"},
    "killed launcher": partial(_lost, lambda run, host: run.cluster.kill(host, LAUNCHER)),
    # the launcher and its ranks are nobody's any more
    "killed slurmstepd": partial(_lost, lambda run, host: run.cluster.kill(host, STEP_DAEMON), is_named=False),
    # no packet, no end of a connection
    "power loss with a spare": partial(_lost, lambda run, host: run.cluster.power_off(host)),
    "scancel signal": _stopped,
    "scancel batch": lambda run: _stopped(run, "--batch"),
    "scancel full": lambda run: _stopped(run, "--full"),
    "preempted with grace time": partial(_preempted, "main"),
    "preempted without grace time": partial(_preempted, "graceless"),
    "two jobs on one port": partial(_two_jobs, "--rdzv-backend=c10d --rdzv-endpoint=node1:29777"),
    "two jobs on the same nodes": partial(_two_jobs, ""),
}
"""Each function here without an underscore is one, and the others with an argument."""
