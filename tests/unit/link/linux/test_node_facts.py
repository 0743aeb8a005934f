"""What the kernel tells of a node's links and devices."""

from __future__ import annotations

from pathlib import Path

from megatron_ft.link.base.node_problems import Port
from megatron_ft.link.linux import node_facts


def test_links_are_read_from_the_kernels_files(tmp_path: Path) -> None:
    for name, state in (("eth0", "up"), ("lo", "unknown"), ("eth1", "down"), ("tun0", "unknown")):
        (tmp_path / "class/net" / name).mkdir(parents=True)
        (tmp_path / "class/net" / name / "operstate").write_text(f"{state}\n")
    port = tmp_path / "class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text("2: INIT\n")
    (port / "phys_state").write_text("5: LinkUp\n")
    assert node_facts.interfaces_up(tmp_path) == ["eth0", "tun0"]
    assert node_facts.ports(tmp_path) == [Port(name="mlx5_0/1", link="INIT", cable="LinkUp")]


def test_the_kernels_log_is_read_to_its_end_or_not_at_all(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_text("6,1,1,-;one\n6,2,2,-;two\n")
    assert node_facts.kernel_log(str(log)) == ["6,1,1,-;one", "6,2,2,-;two"]
    assert node_facts.kernel_log(str(tmp_path / "none")) == []
