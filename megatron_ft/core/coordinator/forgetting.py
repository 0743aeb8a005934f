"""When a coordinator that no launcher has started forgets a job whose launchers have gone without a word. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_ft.core.coordinator.consensus import Consensus
from megatron_ft.core.coordinator.nodes import Node
from megatron_ft.core.job.admission import Admission
from megatron_ft.core.job.patience import GIVE_UP_S

__all__ = ["FORGETS_S", "Forgetting"]

FORGETS_S = GIVE_UP_S + 30.0
"""Launchers that have had a part in the job give up sooner, also those that notice late that they are cut off."""


class Forgetting:
    """Of one coordinator. One that is ``owned`` by a launcher ends by other rules."""

    def __init__(
        self, consensus: Consensus, admission: Admission, links: Mapping[int, Node], *, is_owned: bool
    ) -> None:
        self._consensus, self._admission, self._links = consensus, admission, links
        self._is_owned = is_owned
        self._since_s = 0.0

    def is_due(self, now_s: float) -> bool:
        """Ask at least every few seconds. Spares and launchers that have just come can't go on with the old job."""
        here = self._links if self._consensus.decision is None else self._consensus.voters()
        if self._is_owned or here or self._admission.rules is None:
            self._since_s = now_s
        return now_s >= self._since_s + FORGETS_S
