"""What the kernel tells of devices."""

from __future__ import annotations

from pathlib import Path

from megatron_ft.link.linux import kernel_facts


def test_the_kernels_log_is_read_to_its_end_or_not_at_all(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_text("6,1,1,-;one\n6,2,2,-;two\n")
    assert kernel_facts.kernel_log(str(log)) == ["6,1,1,-;one", "6,2,2,-;two"]
    assert kernel_facts.kernel_log(str(tmp_path / "none")) == []
