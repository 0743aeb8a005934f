"""A node health service is asked by gRPC; one that can't be asked keeps no node out."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megatron_ft.cli.node_service import main
from megatron_ft.core.config.launcher_options import LauncherOptions
from megatron_ft.core.errors import ConfigError
from megatron_ft.core.node_service import METHOD, REQUEST
from megatron_ft.launcher.base.command_line import doubts_about_node_service, node_health_command
from tests.unit.core.test_node_service import answer


def test_one_that_is_not_there_keeps_no_node_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none.sock"), "1"]) == 0
    assert "wasn't asked: its socket isn't there" in capsys.readouterr().err


def test_without_an_endpoint_it_is_the_users_alone() -> None:
    assert node_health_command(LauncherOptions(node_health_command="x")) == "x"
    assert node_health_command(LauncherOptions()) is None


def test_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--ft-node-health-check-endpoint: 'localhost:5' is neither"):
        doubts_about_node_service("localhost:5")
    assert doubts_about_node_service(None) == []
    assert len(doubts_about_node_service(str(tmp_path / "none.sock"))) == 1


@pytest.mark.parametrize(
    ("told", "code", "said"),
    [
        (answer(output={"fail_count": 0}), 0, ""),
        (answer(output={"fail_count": 1, "failed_checks": ["ib0"]}), 1, "fail_count is 1"),
        (b"no protobuf", 0, "it answered in another protocol"),
    ],
)
def test_one_that_answers(tmp_path: Path, capfd: pytest.CaptureFixture[str], told: bytes, code: int, said: str) -> None:
    grpc = pytest.importorskip("grpc")
    asked = []

    def answers(request: bytes, _context: object) -> bytes:
        asked.append(request)
        return told

    _, service, method = METHOD.split("/")
    server = grpc.server(ThreadPoolExecutor(1))
    handlers = {method: grpc.unary_unary_rpc_method_handler(answers)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    server.add_insecure_port(f"unix:{tmp_path}/s.sock")
    server.start()
    try:
        assert main([f"unix://{tmp_path}/s.sock", "20"]) == code
    finally:
        server.stop(None)
    assert asked == [REQUEST]
    assert said in "".join(capfd.readouterr())
