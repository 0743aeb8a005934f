"""A rank that holds the others back, in a real job: who is told, and that nothing is done about it."""

from __future__ import annotations

import json
import subprocess
import sys
import time

from tests.e2e.test_telemetry import metrics_of
from tests.support.launching import ROOT, Launcher

IMPORTED_BEFORE = ()  # torch is enough

PACE = {"seed": 1, "step_s": 0.1, "jitter": 0.05, "slow": 1, "factor": 2.0, "seconds": 75.0}
LINE = (
    r"rank 1 on \S+ holds the others back: it spends \d+% of its time in collectives, the others \d+% \(reported only\)"
)


def test_slow_rank_is_named_by_line_log_status_metric_and_report_and_the_job_goes_on(launcher: Launcher) -> None:
    script = str(ROOT / "tests" / "verdicts" / "paced.py")
    options = ["--nproc-per-node=3", "--max-restarts=1", "--ft-metrics-port=127.0.0.1:0"]
    launched = launcher.start([*options, script, json.dumps(PACE)])
    port = int(launched.wait_for(r"metrics: http://\S+:(\d+)/metrics")[0])
    launched.wait_for(LINE, timeout_s=120)
    status = json.loads(tool("status", "--json", "--pid", str(launched.process.pid)))
    (slow,) = status["jobs"][0]["slow_ranks"]
    assert slow["rank"] == 1
    assert 0.3 < slow["lag"] < 0.6
    lags: dict[str, float] = {}
    until_s = time.monotonic() + 20
    while not lags and time.monotonic() < until_s:
        lags = {name.split('rank="')[1][0]: lag for name, lag in metrics_of(port).items() if "_lag_ratio{" in name}
        time.sleep(0.2)
    assert max(lags, key=lambda rank: lags[rank]) == "1"
    (launched.directory / "end").touch()
    finished = launched.wait(120)
    assert finished.code == 0
    assert {each["rank"] for each in launched.events("slow_rank")} == {1}
    assert len(launched.events("cycle_started")) == 1
    assert "ranks that held the others back" in tool("report", str(launched.log_dir))
    (summary,) = json.loads(tool("report", "--json", str(launched.log_dir)))
    assert [(each["rank"], each["cycle"]) for each in summary["slow_ranks"]] == [(1, 0)]
    launched.assert_nothing_left()


def tool(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "megatron_ft", *words], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout
