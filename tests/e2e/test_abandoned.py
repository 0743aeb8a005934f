"""A launcher whose output nobody reads any more ends its ranks and leaves the job: no restart would mend that."""

from __future__ import annotations

import json

from tests.support.launching import Launcher

PRINTS = """
while CYCLE == 0:
    say("still here")
    time.sleep(0.05)
"""
UNREAD = ["bash", "-c", '"$@" 2>&1 | grep -m 1 "still here" >/dev/null; exit "${PIPESTATUS[0]}"', "bash"]
"""Who reads the output leaves when the ranks run."""


def test_abandoned_launcher_alone_exits_with_94_and_uses_no_restart(fresh_launcher: Launcher) -> None:
    launched = fresh_launcher.start(PRINTS, "--nproc-per-node=2", "--max-restarts=3", prefix=UNREAD)
    assert launched.wait().code == 94
    assert len(launched.events("abandoned")) == 1
    (ended,) = launched.events("cycle_ended")
    assert (ended["cause"]["kind"], ended["restarts_left"]) == ("membership", 3)
    (life,) = json.loads((launched.log_dir / "result.json").read_text())["lives"]
    assert (life["outcome"], life["exit_code"], life["restarts"]) == ("lost", 94, 0)
