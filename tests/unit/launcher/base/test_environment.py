"""What of the launcher's environment ranks get."""

from __future__ import annotations

from megatron_ft.launcher.base.rank_environment import find_script, rank_environment

ENVIRON = {"HOME": "/home/me", "FT_SECRET": "0123456789abcdef", "FT_SECRET_FILE": "/home/me/secret"}


def test_environment_of_ranks_lacks_the_secret_of_the_job() -> None:
    environment = rank_environment(ENVIRON, reference_names=False)
    assert environment == {"HOME": "/home/me", "FT_SECRET_FILE": "/home/me/secret"}


def test_environment_of_the_fork_server_lacks_the_secret_of_the_job() -> None:
    orders = find_script(["train.py"], ENVIRON)
    assert orders is not None
    assert "FT_SECRET" not in orders.environment
    assert orders.environment["FT_SECRET_FILE"] == "/home/me/secret"
