"""The DDP examples, started with the command that each documents: undisturbed, and with a killed and a hung rank."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import torch

from tests.support.launching import ROOT, Finished, Launched, Launcher

EXAMPLES = ("ddp_heartbeats", "ddp_sections")
CONFIGURED_S = {"ddp_heartbeats": 600.0, "ddp_sections": 60.0}
# Steps of 50 ms would teach timeouts of 250 ms, and a busy machine stands still for longer than that now and then.
QUICK = ("--ft-safety-factor=40", "--ft-learned-floor=5")
QUICK_SCRIPT = ("--iterations", "50", "--step-time", "0.05")


def documented_command(name: str) -> list[str]:
    """The words after ``ft_launcher`` in the example's docstring; paths in the repository made absolute."""
    text = (ROOT / "examples" / f"{name}.py").read_text()
    block = re.search(r"^    ft_launcher (.*?)\n\n", text, re.MULTILINE | re.DOTALL)
    assert block is not None
    words = shlex.split(block[1].replace("\\\n", " "))
    return [str(ROOT / word) if (ROOT / word).exists() else word for word in words]


def start(launcher: Launcher, name: str, save: Path, *more: str) -> Launched:
    command = documented_command(name)
    where = command.index("--save") + 1
    command[where] = str(save)
    # torch makes this directory when an optimizer is made; by default in TMPDIR, where nothing may be left
    env = {"TORCHINDUCTOR_CACHE_DIR": str(save.parent / "inductor")}
    return launcher.start([*QUICK, *command, *QUICK_SCRIPT, *more], env=env)


def result(finished: Finished) -> str:
    assert finished.code == 0, finished.err
    (line,) = re.findall(r"^finished at iteration 50, the weights sum up to (\S+)$", finished.out, re.MULTILINE)
    return str(line)


def step_timeouts(launched: Launched, name: str, cycle: int) -> list[float]:
    """The timeouts of a step that were in force on rank 0 in one cycle, in their order, without repetitions."""
    records = [e for e in launched.events("timeouts", role="monitor") if (e["rank"], e["cycle"]) == (0, cycle)]
    values = [record["heartbeat"] if name == "ddp_heartbeats" else record["sections"]["step"] for record in records]
    return list(dict.fromkeys(values))


def test_killed_then_hung_then_finished_with_the_same_weights(launcher: Launcher, tmp_path: Path) -> None:
    """Both examples train the same model."""
    faults = ("--fault-plan", str(ROOT / "megatron_ft/configs/faults/kill-then-hang.yaml"))
    undisturbed = start(launcher, EXAMPLES[0], tmp_path / "undisturbed")
    disturbed = {name: start(launcher, name, tmp_path / name, *faults) for name in EXAMPLES}
    ended = undisturbed.wait(100)
    weights = result(ended)
    assert len(ended.lines) == 2, "a cycle starts, and all ranks finish"
    for name, launched in disturbed.items():
        assert result(launched.wait(100)) == weights
        killed, hung, succeeded = launched.events("cycle_ended")
        assert (killed["cause"]["rank"], killed["cause"]["kind"]) == (1, "signal")
        assert launched.exits(killed["cycle"])[1] == (-9, False)
        assert hung["cause"]["rank"] == 0
        assert "process stopped" in hung["cause"]["text"]
        assert succeeded["outcome"] == "succeeded"
        # each life began where the last checkpoint was, and went on with the timeouts that were kept in it
        firsts = launched.events("first_iteration", role="monitor")
        assert {e["cycle"]: e["iteration"] for e in firsts if e["rank"] == 0} == {0: 0, 1: 20, 2: 30}
        in_force = [step_timeouts(launched, name, cycle) for cycle in range(3)]
        assert [timeouts[0] for timeouts in in_force] == [CONFIGURED_S[name]] * 3
        assert in_force[1][1] == in_force[0][-1] < CONFIGURED_S[name]
        verdict = launched.events("verdict", role="monitor")[0]  # the other rank has waited for as long
        # one real hang doubles no calculated timeout
        assert in_force[2][1] == verdict["timeout_s"] < CONFIGURED_S[name]
        checkpoint = torch.load(tmp_path / name / f"{name.removeprefix('ddp_')}.pt", weights_only=True)
        timeouts = checkpoint["timeouts"]["current_timeouts"]
        if name == "ddp_heartbeats":
            assert timeouts["heartbeat"]["were_calculated"] is True
            assert verdict["kind"] == "heartbeat"
        else:
            assert set(timeouts["section"]["calculated_sections"]) == {"init", "step"}
            assert verdict["section"] == "step"
