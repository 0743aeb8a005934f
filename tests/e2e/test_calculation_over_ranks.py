"""Timeouts calculated over three real ranks with gloo: equal on all of them, from the slowest one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path

from tests.support.monitored import expect, monitor, rank

WORLD = 3
SCRIPT = """
import json
import torch.distributed as dist
rank = int(os.environ['RANK'])
dist.init_process_group('gloo', init_method='file://' + os.environ['STORE'], rank=rank, world_size=3)
client.init_workload_monitoring()
assert not client.calculate_and_set_section_timeouts(['slow'], calc_out_of_section=False, skip_if_not_ready=True)
try:
    client.calculate_and_set_section_timeouts(['slow'], calc_out_of_section=False)
    say('not raised')
except RankMonitorClientError:
    pass
with client.section('a'):
    time.sleep(0.02 * (rank + 1))
if rank == 1:
    # seen by one rank only: enough, and all ranks agree that it is
    with client.section('slow'): time.sleep(0.15)
client.send_heartbeat(); time.sleep(0.1 * (3 - rank)); client.send_heartbeat()
client.calculate_and_set_section_timeouts(['a', 'slow'])
client.calculate_and_set_hb_timeouts()
observed = {name: ns / 1e9 for name, ns in client._recorder.observed().items() if ns >= 0}
say('state', json.dumps([client.state_dict(), observed]))
client.shutdown_workload_monitoring()
dist.barrier()
dist.destroy_process_group()
client.init_workload_monitoring()
say('again', client.section_timeouts.section['a'])
client.load_state_dict(json.loads(sys.stdin.readline()))
say('loaded', client.section_timeouts.section['a'], client.section_timeouts.section['kept'])
client.start_section('a')
signal.pause()
"""


def test_ranks_agree_on_calculated_timeouts_and_the_next_run_uses_them(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        ranks = []
        for number in range(WORLD):
            path = tmp_path / f"s{number}"
            stack.enter_context(
                monitor(
                    path,
                    rank_section_timeouts={"a": 50.0, "slow": None, "kept": 9.0},
                    safety_factor=4.0,
                    learned_floor=1.0,
                )
            )
            env = {"RANK": str(number), "WORLD_SIZE": str(WORLD), "STORE": str(tmp_path / "store")}
            ranks.append(stack.enter_context(rank(path, SCRIPT, {**env, "OMP_NUM_THREADS": "1"})))
        found = [json.loads(expect(process, "state")) for process in ranks]
        states = [state for state, _ in found]
        assert all(state == states[0] for state in states)
        learned = states[0]["current_timeouts"]["section"]["section"]
        slowest = max(observed["a"] for _, observed in found)
        assert learned["a"] == 4.0 * slowest
        assert learned["a"] >= 4.0 * 0.06
        assert learned["slow"] == 4.0 * found[1][1]["slow"]
        assert "kept" not in learned
        for process in ranks:
            # a new initialisation begins with the configuration; the state brings the learned values back
            assert float(expect(process, "again")) == 50.0
            assert process.stdin is not None
            short = json.loads(json.dumps(states[0]))
            short["current_timeouts"]["section"]["section"]["a"] = 0.3
            process.stdin.write(json.dumps(short) + os.linesep)
            process.stdin.flush()
            assert expect(process, "loaded") == "0.3 9.0"
        for process in ranks:
            assert process.wait(30) == -signal.SIGKILL
