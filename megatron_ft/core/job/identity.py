"""Who a launcher is, as it tells the coordinator. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ft.core.job import messages as m
from megatron_ft.core.job.decisions import Beside, Memory
from megatron_ft.core.job.progress import Advance

__all__ = ["Identity"]


@dataclass(frozen=True)
class Identity:
    """Who this launcher is; as in `messages.Hello`. ``endpoints``: where the job is coordinated at first."""

    job: str
    rules: m.Rules
    instance: str
    name: str
    address: str
    endpoints: tuple[str, ...]
    rank: int | None = None
    before: Advance = Advance()  # noqa: RUF009 - frozen
    domain: str = ""
    bad: str = ""
    """Why earlier lives of the job call this host a bad node."""
    started_s: float = 0.0
    """When the launcher was started, by the clock of its `Member`."""
    names_life: bool = False

    def hello(
        self,
        session: int,
        *,
        owns: bool,
        memory: Memory,
        standing: m.Standing,
        found_silent: Beside | None,
        now_s: float,
    ) -> m.Hello:
        """The first message of a connection."""
        return m.Hello(
            job=self.job,
            rules=self.rules,
            instance=self.instance,
            session=session,
            name=self.name,
            address=self.address,
            rank=self.rank,
            owns=owns,
            before=self.before,
            domain=self.domain,
            bad=self.bad,
            memory=memory,
            standing=standing,
            found_silent=found_silent,
            up_s=max(0.0, now_s - self.started_s),
            names_life=self.names_life,
        )
