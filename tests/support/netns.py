"""Hosts on this machine: network namespaces on a bridge, each with a host name of its own."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.launching import Launched

__all__ = ["Hosts", "hosts"]

_made = itertools.count()
_BECOME = 'hostname "$1"; mount --bind "$2" /etc/hosts; shift 2; exec "$@"'


class Hosts:
    """``node1`` to ``nodeN`` of a network of their own."""

    def __init__(self, directory: Path, count: int) -> None:
        self._tag = f"ft{os.getpid()}{next(_made)}"
        self._inhabitants: list[subprocess.Popen[bytes]] = []
        self._hosts_file = directory / "hosts"
        # a subnet of a network that is nobody's (RFC 2544); only these namespaces know it
        self._addresses = {number: f"198.18.77.{number}" for number in range(1, count + 1)}
        lines = [f"{address} node{number}\n" for number, address in self._addresses.items()]
        self._hosts_file.write_text("127.0.0.1 localhost\n" + "".join(lines))

    def up(self) -> None:
        """Make them.

        Raises:
            subprocess.CalledProcessError: that isn't allowed here.
        """
        bridge = f"{self._tag}b"
        _ip("link", "add", bridge, "type", "bridge")
        _ip("link", "set", bridge, "up")
        for number, address in self._addresses.items():
            name, link = self._name(number), self._link(number)
            _ip("netns", "add", name)
            _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", link, "master", bridge, "up")
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", "eth0", "up")
        # somebody must be able to enter them, too
        subprocess.run([*self.enter(1), "true"], check=True, capture_output=True)
        for number in self._addresses:
            words = [*self.enter(number), "sh", "-c", "echo entered; exec cat"]  # which ends with us
            inhabitant = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self._inhabitants.append(inhabitant)
            assert inhabitant.stdout is not None
            assert inhabitant.stdout.readline() == b"entered\n"

    def down(self) -> None:
        """Remove them, as far as they are there."""
        for inhabitant in self._inhabitants:
            inhabitant.communicate()
        for number in self._addresses:
            subprocess.run(["ip", "netns", "del", self._name(number)], capture_output=True)
            subprocess.run(["ip", "link", "del", self._link(number)], capture_output=True)
        subprocess.run(["ip", "link", "del", f"{self._tag}b"], capture_output=True)

    def enter(self, number: int) -> list[str]:
        """Words of a command that becomes the one after it, on that host."""
        inside = ["unshare", "--uts", "--mount", "sh", "-c", _BECOME, "sh", f"node{number}", str(self._hosts_file)]
        return ["ip", "netns", "exec", self._name(number), *inside]

    def inhabitant(self, number: int) -> int:
        """A process that is there all the time: its namespaces are the host."""
        return self._inhabitants[number - 1].pid

    def cut(self, number: int) -> None:
        """Nothing gets there or comes from there any more; nobody is told."""
        _ip("link", "set", self._link(number), "down")

    def heal(self, number: int) -> None:
        """The network is there again."""
        _ip("link", "set", self._link(number), "up")

    def power_off(self, number: int, launched: Launched) -> None:
        """No process of that launch says anything any more, and no kernel either; nobody could tidy up."""
        self.cut(number)
        launched.destroy()
        Path(launched.temp_dir).mkdir()  # where the fixture looks for what is left

    def _name(self, number: int) -> str:
        return f"{self._tag}n{number}"

    def _link(self, number: int) -> str:
        return f"{self._tag}v{number}"


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    """Four hosts; skips where they can't be made."""
    missing = [command for command in ("ip", "unshare", "mount", "hostname") if shutil.which(command) is None]
    if missing:
        pytest.skip(f"network namespaces need {', '.join(missing)}")
    made = Hosts(tmp_path, 4)
    try:
        made.up()
        yield made
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces can't be made here: {error.stderr.decode().strip()}")
    finally:
        made.down()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
