"""Metrics and notifications of real jobs, one of them scraped by a real Prometheus."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_ft.link.linux.processes import read_stat
from megatron_ft.link.reactor import Reactor
from megatron_ft.records.launcher import event_command
from megatron_ft.records.launcher.event_command import EventCommand
from tests import ROOT
from tests.support.launching import Launched, Launcher, wait_until

EXAMPLES = ROOT / "examples" / "grafana"
STEPS = """
import torch
from megatron_ft import RankMonitorClient
client = RankMonitorClient()
client.init_workload_monitoring()
for iteration in range(0 if CYCLE == 0 else 4, 12):
    client.set_iteration(iteration)
    client.start_section("step")
    if CYCLE == 0 and iteration == 8 and RANK == 1:
        forever()
    time.sleep(0.05)
    client.end_section("step")
say("trained")
while not os.path.exists("end"):
    time.sleep(0.05)
client.shutdown_workload_monitoring()
"""
CRASH = STEPS.replace("forever()", 'while not os.path.exists("fail"): time.sleep(0.05)\n        os._exit(3)')
OPTIONS = ("--nproc-per-node=2", "--max-restarts=2")
TIMEOUT = "--ft-rank-section-timeouts=step:"


def metrics_of(port: int) -> dict[str, float]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    return parsed(text)


def parsed(text: str) -> dict[str, float]:
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in lines}


def is_gone(pid: int) -> bool:
    stat = read_stat(pid)
    return stat is None or stat.state in "ZX"


def port_of(launched: Launched) -> int:
    return int(launched.wait_for(r"metrics: http://\S+:(\d+)/metrics")[0])


def test_job_with_a_hang_tells_it_by_metrics_notifications_and_a_file(launcher: Launcher, tmp_path: Path) -> None:
    told, textfile = tmp_path / "told", tmp_path / "job.prom"
    launched = launcher.start(
        STEPS,
        *OPTIONS,
        f"{TIMEOUT}2",
        "--ft-metrics-port=127.0.0.1:0",
        f"--ft-metrics-textfile={textfile}",
        f"--ft-on-event=cat >> {told}",
    )
    launched.wait_for("^trained$", count=2)
    launched.wait_for("is training again")
    port = port_of(launched)
    with socket.create_connection(("127.0.0.1", port)):  # a scraper that never asks holds up nothing
        # figures are summed up beside the launcher's loop, so that they come a moment later
        wait_until(lambda: metrics_of(port).get("megatron_ft_iteration") == 11, 30)
        wait_until(lambda: metrics_of(port).get('megatron_ft_restarts_total{cause="hang"}') == 1, 30)
        shown = metrics_of(port)
        (launched.directory / "end").touch()
        finished = launched.wait()
    assert finished.code == 0
    assert shown['megatron_ft_restarts_total{cause="hang"}'] == 1
    assert shown['megatron_ft_hangs_total{section="step"}'] == 1
    # In cycle 0 rank 0 goes on to the last iteration, and rank 1 hangs in the ninth. Those of a cycle that goes on
    # count once a minute, and all of them at its end.
    text = textfile.read_text()
    last = parsed(text)
    assert last["megatron_ft_redone_iterations_total"] == 4
    assert last['megatron_ft_section_seconds_count{section="step"}'] == 12 + 8 + 2 * 8
    assert 36 * 0.05 < last['megatron_ft_section_seconds_sum{section="step"}'] < 36
    assert shown['megatron_ft_timeout_seconds{section="step"}'] == 2
    (again,) = launched.events("training_again")
    phases = {name: value for name, value in last.items() if name.startswith("megatron_ft_downtime_seconds_total")}
    assert {name: value for name, value in phases.items() if value} == {
        f'megatron_ft_downtime_seconds_total{{phase="{name}"}}': seconds for name, seconds in again["seconds"].items()
    }
    assert {name.rsplit('"', 2)[1] for name, value in shown.items() if "node_state" in name and value} == {"training"}
    objects = [json.loads(line) for line in told.read_text().splitlines()]
    assert [(each["event"], each.get("cycle"), each["outcome"]) for each in objects] == [
        ("cycle_ended", 0, "failed"),
        ("cycle_ended", 1, "succeeded"),
        ("job_ended", None, "finished"),
    ]
    assert (objects[0]["cause"]["rank"], objects[0]["cause"]["section"]) == (1, "step")
    assert 'state="ended"} 1.0' in text
    launched.assert_nothing_left()


def test_event_command_that_hangs_is_killed_with_what_it_has_started(
    reactor: Reactor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_command, "BOUND_S", 0.3)
    said: list[str] = []
    pid, told = tmp_path / "pid", tmp_path / "told"
    text = f"sleep 600 & echo $! > {pid}.new && mv {pid}.new {pid}; grep -q first && sleep 600; touch {told}"
    command = EventCommand(text, reactor=reactor, say=said.append)
    command.tell({"text": "first"})
    command.tell({"text": "second"})
    assert reactor.run_until(told.exists, time.monotonic() + 20)
    command.close()
    assert said == ["--ft-on-event: the command took longer than 0.3 s: it is killed"]
    wait_until(lambda: is_gone(int(pid.read_text())), 10)
    assert command.pids() == set()


def test_event_command_gets_no_secret_and_no_descriptor_of_the_launcher(
    reactor: Reactor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FT_SECRET", "0123456789abcdef")
    out = tmp_path / "out"
    command = EventCommand(
        f"cat > {out}; echo $FT_SECRET; ls /proc/self/fd | wc -w >> {out}", reactor=reactor, say=print
    )
    with (tmp_path / "other").open("w"):
        command.tell({"text": "x" * 200_000})  # more than a pipe holds
        command.close()
    text, descriptors = out.read_text().splitlines()
    assert json.loads(text) == {"text": "x" * 200_000}
    assert int(descriptors) == 4  # the standard streams, and that of ls


def test_end_of_the_launcher_does_not_wait_for_a_command_that_hangs(
    reactor: Reactor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_command, "LAST_S", 0.2)
    command = EventCommand("sleep 600", reactor=reactor, say=print)
    command.tell({})
    (pid,) = command.pids()
    command.close()
    assert read_stat(pid) is None


def test_taken_port_is_a_mistake_before_any_rank_starts(launcher: Launcher) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        finished = launcher.run("say('a rank')", f"--ft-metrics-port=127.0.0.1:{port}")
    assert (finished.code, finished.out) == (2, "")
    assert f"no metrics can be served at 127.0.0.1:{port}: Address already in use" in finished.err


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[Any]:
    """Start Prometheus with the example's rules, scraping a port each second; returns a function that asks it."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus isn't installed")
    processes: list[subprocess.Popen[bytes]] = []

    def start(scraped: int) -> Any:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        scrape = {"job_name": "job", "scrape_interval": "1s", "static_configs": [{"targets": [f"127.0.0.1:{scraped}"]}]}
        rules = str(EXAMPLES / "alerts.yaml")
        config = {"global": {"evaluation_interval": "1s"}, "scrape_configs": [scrape], "rule_files": [rules]}
        (tmp_path / "prometheus.yml").write_text(json.dumps(config))
        command = [program, f"--config.file={tmp_path / 'prometheus.yml'}", f"--storage.tsdb.path={tmp_path / 'tsdb'}"]
        with (tmp_path / "prometheus.err").open("w") as err:
            processes.append(subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stderr=err))

        def ask(query: str) -> list[Any]:
            url = f"http://127.0.0.1:{port}/api/v1/query?" + urllib.parse.urlencode({"query": query})
            try:
                with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=10) as answer:
                    return list(json.load(answer)["data"]["result"])
            except OSError:
                return []  # it isn't up yet

        return ask

    yield start
    for each in processes:
        each.terminate()
        each.wait(20)


def test_prometheus_raises_alerts_and_has_data_for_the_dashboard_while_the_job_hangs(
    launcher: Launcher, prometheus: Any
) -> None:
    hangs = CRASH.replace('say("trained")', 'client.start_section("step")\nsay("trained")')
    launched = launcher.start(hangs, *OPTIONS, f"{TIMEOUT}3", "--ft-observe-only", "--ft-metrics-port=127.0.0.1:0")
    ask = prometheus(port_of(launched))
    wait_until(lambda: bool(ask('megatron_ft_restarts_total{cause="crash"} == 0')), 40)
    (launched.directory / "fail").touch()
    wait_until(lambda: bool(ask('increase(megatron_ft_restarts_total{cause="crash"}[1m]) > 0')), 40)
    wait_until(lambda: bool(ask('ALERTS{alertname="MegatronFtRestarted"}')), 20)
    dashboard = json.loads((EXAMPLES / "dashboard.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    assert len(queries) > 5
    launched.wait_for("^trained$", count=2)
    wait_until(lambda: bool(ask('delta(megatron_ft_time_seconds{class="hung"}[10s]) > 0')), 40)
    wait_until(lambda: bool(ask('ALERTS{alertname="MegatronFtHangReported"}')), 20)
    # a lag is known after 12 s at the earliest
    for query in (_filled_in(each) for each in queries if "rank_lag" not in each):
        no_data = () if "_bucket" in query else ("NaN",)  # no step ends in a hang, and a quantile of none is NaN
        wait_until(lambda query=query, none=no_data: any(row["value"][1] not in none for row in ask(query)), 20)
    (launched.directory / "end").touch()
    assert launched.wait().code == 0


def _filled_in(query: str) -> str:
    """Return a query of the dashboard as Grafana would send it."""
    for name, value in {"$__rate_interval": "1m", "$__range": "1m", "$job": "job"}.items():
        query = query.replace(name, value)
    return query


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool isn't installed")
def test_alert_rules_pass_promtool() -> None:
    checked = subprocess.run(["promtool", "check", "rules", EXAMPLES / "alerts.yaml"], capture_output=True, check=False)
    assert checked.returncode == 0, checked.stdout
    tested = subprocess.run(
        ["promtool", "test", "rules", Path(__file__).with_name("alert_rules.yaml")], capture_output=True, check=False
    )
    assert tested.returncode == 0, tested.stdout


def test_each_alert_has_a_test_that_it_fires_and_one_that_it_does_not() -> None:
    rules = yaml.safe_load((EXAMPLES / "alerts.yaml").read_text())["groups"][0]["rules"]
    groups = yaml.safe_load(Path(__file__).with_name("alert_rules.yaml").read_text())["tests"]
    told = {(test["alertname"], bool(test["exp_alerts"])) for group in groups for test in group["alert_rule_test"]}
    named = {rule["alert"] for rule in rules}
    for fires in (True, False):
        assert named == {name for name, does in told if does is fires}
