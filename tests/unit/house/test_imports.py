"""What the files of users' processes, and of commands, load when they are imported and used."""

from __future__ import annotations

from pathlib import Path

from tests.unit.house.fresh_interpreter import output_of


def test_the_hooks_import_no_torch() -> None:
    code = "import sys, megatron_ft.fault_tolerance; print({'torch', 'numpy'} & set(sys.modules))"
    assert output_of(code).strip() == "set()"


def test_the_config_class_imports_no_yaml() -> None:
    output_of(
        "import sys\n"
        "from megatron_ft import FaultToleranceConfig as C\n"
        "C.from_dict({'rank_section_timeouts': {'step': 1}}).copy()\n"
        "heavy = {'yaml', 'torch', 'numpy', 'logging', 'argparse', 'difflib', 'asyncio'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )


def test_a_check_of_a_config_file_imports_no_torch(tmp_path: Path) -> None:
    file = tmp_path / "ft.yaml"
    file.write_text("fault_tolerance:\n  rank_heartbeat_timeout: 60\n")
    code = (
        "import sys; from megatron_ft.cli import main as cli; code = cli.main(sys.argv[1:]); "
        "print(sorted({'torch', 'numpy'} & set(sys.modules)), code)"
    )
    assert output_of(code, "check-config", str(file)).splitlines()[-1] == "[] 0"


def test_the_driver_is_asked_without_torch() -> None:
    code = "import sys; from megatron_ft.ipc.linux import nvml; nvml.load(); print('torch' in sys.modules)"
    assert output_of(code).strip() == "False"


def test_process_without_torch_has_no_collectives_and_does_not_import_it() -> None:
    code = "import sys; from megatron_ft.rank.crash_reporter.flight_recorder import collectives; "
    code += "print(collectives().error, 'torch' in sys.modules)"
    assert output_of(code).strip() == "torch.distributed isn't imported False"
