"""Who may join a job: launchers that know its secret, are of the very job, and have its options. Others hear why."""

from __future__ import annotations

from collections.abc import Mapping

from tests.support.launching import Launched, Launcher, wait_until
from tests.support.nodes import coordinator_of, meeting_place, wait_for_all

SECRET = "0123456789abcdef0123"
SCRIPT = "say('cycle', CYCLE, 'of', RANK, 'in', os.environ['WORLD_SIZE'])"


class Job:
    """One node waits at the coordinator for another one; others that try to be that are to be refused."""

    def __init__(self, launcher: Launcher, env: Mapping[str, str]) -> None:
        self._launcher = launcher
        self._place = meeting_place("--nnodes=2", "--max-restarts=3")
        self.first = self.start(env=env)
        wait_until(lambda: coordinator_of(self.first) is not None, 60)

    def start(self, *options: str, env: Mapping[str, str]) -> Launched:
        return self._launcher.start(SCRIPT, *self._place, *options, env=env)

    def refused(self, *options: str, env: Mapping[str, str] | None = None) -> str:
        """The one line that a launcher says that is refused."""
        ended = self.start(*options, env=env or {}).wait()
        assert ended.code == 2
        assert "cycle" not in ended.out
        (line,) = ended.lines
        return line

    def meet(self, *, env: Mapping[str, str]) -> None:
        """The one that belongs to it: both train, and end with 0."""
        ended = wait_for_all([self.first, self.start(env=env)])
        assert [finished.code for finished in ended] == [0, 0]
        assert sorted(finished.out for finished in ended) == ["cycle 0 of 0 in 2\n", "cycle 0 of 1 in 2\n"]


def test_launcher_without_the_right_secret_is_refused(launcher: Launcher) -> None:
    job = Job(launcher, {"FT_SECRET": SECRET})
    for env in ({"FT_SECRET": SECRET[::-1]}, {}):
        line = job.refused(env=env)
        assert line.endswith("has another secret: FT_SECRET (or FT_SECRET_FILE) must be the same on all nodes")
    path = launcher.directory / "secret"
    path.write_text(f"{SECRET}\n")
    job.meet(env={"FT_SECRET_FILE": str(path)})
