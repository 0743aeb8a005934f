"""The leader's part of learning: it asks for the intervals of all nodes, and sends all of them the maxima. Pure.

The first report of a milestone starts a `Survey` of all nodes; that of the end starts when all nodes have reported it:
what some ranks do after the others' end counts, too. Nothing is kept from one survey to the next, so another leader
can take over at any moment. Times are seconds of the leader's own clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from megatron_ft.core.times import earliest
from megatron_ft.learning.messages import MOST_NAMES, Intervals, Killed, Milestone, Moment, Survey, merge

SURVEY_S = 2.0
"""Answers that take longer are left out."""
BETWEEN_S = 1.0
"""Least time from the end of a survey to the start of the next one, unless the run ends."""
LearningMessage = Milestone | Intervals | Killed
Places = Callable[[], Collection[int]]


@dataclass
class _OpenSurvey:
    survey: Survey
    until_s: float
    awaited: set[int]
    answer: Intervals


@dataclass
class LeaderLearning:
    """The part of one cycle. ``number`` of surveys so far: a leader's surveys differ in it, also of several cycles."""

    cycle: int = -1
    number: int = 0
    due_s: float | None = None
    """Latest time of the next ``tick``."""
    _survey: _OpenSurvey | None = None
    _reached: dict[Moment, int] = field(default_factory=dict)
    """By kind, the count of the milestone that was reached last."""
    _next: Moment | None = None
    """Kind of the milestone whose survey is to start."""
    _not_before_s: float = 0.0
    _ended: set[int] = field(default_factory=set)
    """Places of the nodes whose runs are over."""
    _in_run: set[int] | None = None
    """Places of those that were healthy at the first end of a run; None: before."""
    _killed: set[str] = field(default_factory=set)

    def begin(self, cycle: int) -> LeaderLearning:
        """Return the part of another cycle."""
        return LeaderLearning(cycle, self.number)

    def hear(self, place: int, message: LearningMessage) -> Killed | None:
        """Take a message of the node at that place. Returns what all other nodes are to hear."""
        if message.cycle != self.cycle:
            return None
        match message:
            case Milestone(moment=Moment.END):
                self._ended.add(place)
            case Milestone(moment=moment, count=count) if count > self._reached.get(moment, -1):
                self._reached[moment] = count
                self._next = moment if self._next in (None, Moment.STEPS) else self._next
            case Intervals(number=number):
                survey = self._survey
                if survey is not None and number == survey.survey.number and place in survey.awaited:
                    survey.awaited.discard(place)
                    survey.answer = merge(survey.survey, (survey.answer, message))
            case Killed(name=name) if name not in self._killed and len(self._killed) < MOST_NAMES:
                self._killed.add(name)
                return message
        return None

    def lost(self, place: int) -> None:
        """The node at that place won't answer."""
        if self._survey is not None:
            self._survey.awaited.discard(place)

    def tick(self, now_s: float, places: Places, healthy: Places) -> list[Survey | Intervals]:
        """Return the messages that are due, for all nodes.

        Args:
            now_s: the time.
            places: of the nodes that can be asked now.
            healthy: of the nodes whose ranks run.
        """
        sends: list[Survey | Intervals] = []
        if self._ended and self._in_run is None:
            self._in_run = {*healthy()}
        if self._in_run is not None and self._in_run <= self._ended and Moment.END not in self._reached:
            self._reached[Moment.END], self._next = 0, Moment.END
        survey = self._survey
        if survey is not None and (not survey.awaited or now_s >= survey.until_s):
            self._survey, self._not_before_s = None, now_s + BETWEEN_S
            sends.append(survey.answer)
        self.due_s = None
        if self._survey is None and self._next is not None:
            if self._next is Moment.END or now_s >= self._not_before_s:
                self.number += 1
                asked = Survey(self.cycle, self.number, self._next)
                self._survey, self._next = _OpenSurvey(asked, now_s + SURVEY_S, {*places()}, merge(asked, ())), None
                sends.append(asked)
            else:
                self.due_s = self._not_before_s
        if self._survey is not None:
            self.due_s = earliest(self.due_s, self._survey.until_s)
        return sends
