"""From `progress` records to spans: what is known is told, what isn't is not invented."""

from __future__ import annotations

import random
from typing import Any

import pytest

from megatron_ft.cli.analysis.section_spans import RankSpans, spans_of
from megatron_ft.cli.logs.progress import ProgressCollector, ProgressEvents, join, parse_progress
from megatron_ft.cli.logs.read import EventLogFile, parse_log
from tests.support.arrived import line
from tests.support.generated_logs import END, ITERATION, START, progress_record

S = 1_000_000_000
NAMES = ["outer", "inner", "other"]
OUTER, INNER, OTHER = 0, 1, 2


def record(*events: tuple[float, int, int], skipped: int = 0, begin: float = 0.0, names: Any = NAMES) -> dict[str, Any]:
    """Of rank 3 in cycle 1; times in seconds."""
    whole = [(int(at * S), kind, what) for at, kind, what in events]
    document: dict[str, Any] = progress_record(3, 1, list(names), int(begin * S), whole, skipped)
    return document


def events_of(*records: dict[str, Any]) -> ProgressEvents:
    collector = ProgressCollector()
    for each in records:
        collector.add(parse_progress(line(each)))
    (events,) = collector.finished()
    assert collector.passed_over == 0
    return events


def spans(*records: dict[str, Any]) -> RankSpans:
    return spans_of(events_of(*records))


def closed(found: RankSpans) -> list[tuple[str, float, float, int]]:
    of = found.closed
    rows = zip(of.sections.tolist(), of.begin_ns.tolist(), of.end_ns.tolist(), of.depths.tolist(), strict=True)
    return [(found.names[section], begin / S, end / S, depth) for section, begin, end, depth in rows]


def test_spans_across_lost_events_are_not_invented() -> None:
    """What was open may have closed and opened again; only what begins and ends on one side is known."""
    found = spans(
        record((1, START, OUTER), (2, START, INNER), (3, END, INNER), (4, START, INNER)),
        record((10, END, INNER), (11, START, INNER), (12, END, INNER), (13, END, OUTER), begin=10, skipped=7),
    )
    assert closed(found) == [("inner", 2, 3, 1), ("inner", 11, 12, 1)]
    assert found.unknown == ((4 * S, 10 * S),)
    assert found.still_open == ()
    assert (found.begin_ns, found.end_ns) == (1 * S, 13 * S)


def test_an_end_never_closes_another_section() -> None:
    """After a loss: one section is still open, of another only the end is known."""
    found = spans(record((5, END, INNER), (6, START, OUTER), skipped=9))
    assert closed(found) == []
    assert found.still_open == ((OUTER, 6 * S),)


def test_section_names_that_grow_and_move_are_followed() -> None:
    found = spans(
        record((1, START, 0), (2, END, 0), names=["a"]),
        record((3, START, 1), (4, END, 1), (5, START, 0), (6, END, 0), begin=2, names=["b", "a"]),
        record((7, START, 2), (8, END, 2), begin=6, names=["b"]),
    )
    assert [name for name, *_ in closed(found)] == ["a", "a", "b", "section #2"]


@pytest.mark.parametrize(
    "broken",
    [
        {"dt_us": [1]},
        {"code": ["x", 258]},
        {"code": [0, 258]},
        {"code": [256, 99 * 256]},
        {"dt_us": [-5, 1]},
        {"iterations": [1]},
        {"iterations": "many"},
        {"from_ns": None},
        {"from_ns": 10**30},
        {"rank": "3"},
        {"skipped": -1},
        {"skipped": None},
        {"names": None},
        {"names": [1]},
        {"dt_us": [1.5, 2]},
        {"dt_us": [0, 2**60]},
        {"dt_us": [[1], [2]]},
        {"code": [[256], [512]]},
        {"code": [256.0, 512.0]},
        {"code": ["256", "512"]},
        {"code": [256, 10**30]},
        {"code": [256, float("nan")]},
        {"iterations": [[]]},
        {"cycle": True},
    ],
)
def test_a_record_that_makes_no_sense_is_passed_over_and_the_others_are_not(broken: dict[str, Any]) -> None:
    collector = ProgressCollector()
    whole = [record((at, START, OUTER), (at + 1, END, OUTER), begin=at) for at in (1, 4, 7)]
    for each in (whole[0], {**whole[1], **broken}, whole[2]):
        collector.add(parse_progress(line(each)))
    (events,) = collector.finished()
    assert collector.passed_over == 1
    assert [row[1:3] for row in closed(spans_of(events))] == [(1, 2), (7, 8)]


def test_logs_of_a_replaced_monitor_join_to_spans_without_duplicates() -> None:
    first = events_of(record((1, START, OUTER), (2, ITERATION, 5), (3, END, OUTER), (4, START, OUTER)))
    overlapping = record((3, END, OUTER), (4, START, OUTER), (5, ITERATION, 6), (6, END, OUTER), begin=3)
    found = spans_of(join([events_of(overlapping), first]))
    assert closed(found) == [("outer", 1, 3, 0), ("outer", 4, 6, 0)]
    later = record((8, END, OUTER), (9, START, INNER), (10, END, INNER), begin=8, names=["inner", "outer", "x"])
    later["code"] = [END * 256 + 1, START * 256, END * 256]
    found = spans_of(join([first, events_of(later)]))
    assert closed(found) == [("outer", 1, 3, 0), ("outer", 4, 8, 0), ("inner", 9, 10, 0)]
    found = spans_of(join([first, events_of({**later, "skipped": 2})]))
    assert closed(found) == [("outer", 1, 3, 0), ("inner", 9, 10, 0)]
    assert found.unknown == ((4 * S, 8 * S),)


def test_record_written_twice_by_a_replaced_monitor_counts_once() -> None:
    """The same events, told from another moment on: their times differ by less than a microsecond."""
    times = [1.0, 1.5, 2.0000002, 2.5000009, 3.0]
    kinds = [(START, OUTER), (END, OUTER), (ITERATION, 1), (START, OUTER), (END, OUTER)]
    events = [(at, *what) for at, what in zip(times, kinds, strict=True)]
    first, again = events_of(record(*events[:4])), events_of(record(*events[2:], begin=times[2]))
    assert first.at_ns[3] < again.at_ns[1]
    joined = join([first, again])
    assert len(joined.at_ns) == 5
    assert joined.iterations.tolist() == [1]
    assert [name for name, *_ in closed(spans_of(joined))] == ["outer", "outer"]


def test_a_loss_is_not_forgotten_when_logs_are_joined() -> None:
    first = events_of(record((1, START, OUTER), (2, END, OUTER), (3, START, OUTER)))
    only_lost = events_of(record(begin=3.5, skipped=7))
    for parts in ([first, only_lost], [only_lost, first]):
        joined = join(parts)
        assert len(joined.at_ns) == 3
        assert joined.gaps
    assert spans_of(join([first, only_lost])).still_open == ()
    # among the events that both tell, the second log's are the same but it says that others were lost between them
    again = events_of(record((2, END, OUTER), begin=2), record((3, START, OUTER), (9, END, OUTER), begin=3, skipped=2))
    joined = join([first, again])
    assert (joined.gaps, len(joined.at_ns)) == ((2,), 4)
    assert closed(spans_of(joined)) == [("outer", 1, 2, 0), ("outer", 3, 9, 0)]


def log_of(*lines: bytes) -> EventLogFile:
    header = {"t": 0, "ev": "log_opened", "wall_ns": 10**18, "pid": 1, "host": "a", "role": "monitor"}
    log = parse_log("log", [line(header), *lines])
    assert log is not None
    return log


@pytest.mark.parametrize("damage", ["torn", "broken", "mad"])
def test_a_record_that_cannot_be_read_leaves_a_gap(damage: str) -> None:
    """What was in it may have closed the section; that the rank was in it all the time would be invented."""
    pieces = [record((1, START, OUTER)), record((2, END, OUTER), (7, START, OUTER), begin=1), record((8, END, OUTER))]
    middle = line(pieces[1])
    bad = {
        "torn": middle[:-9],
        "broken": line({**pieces[1], "code": None}),
        "mad": line({**pieces[1], "code": [7, 7]}),
    }
    log = log_of(line(pieces[0]), bad[damage], line(pieces[2]))
    assert log.passed_over == 1
    assert closed(spans_of(log.progress[0])) == []
    other = log_of(line(pieces[0]), b'{"t":5,"ev":"warning","te', line(pieces[2]))
    assert closed(spans_of(other.progress[0])) == [("outer", 1, 8, 0)]  # what is torn is no progress record


def test_unreadable_first_record_leaves_a_gap_at_the_start() -> None:
    log = log_of(b'{"t":5,"ev":"prog', line(record((8, START, INNER), (9, END, INNER))))
    assert 0 in log.progress[0].gaps
    log = log_of(b"garbage", line(record((8, START, INNER), (9, END, INNER))))
    assert 0 in log.progress[0].gaps
    log = log_of(b"[" * 100_000, line(record((8, START, INNER), (9, END, INNER))))
    assert log.passed_over == 1


def test_random_nested_sections_cut_into_records_are_found_again() -> None:
    """Random well-nested sections, cut into records anywhere."""
    for seed in range(30):
        chance = random.Random(seed)
        events, expected, stack, begin = [], [], [], {}
        for at in range(1, 120):
            closable = stack[-1] if stack else None
            free = [name for name in range(3) if name not in stack]
            if closable is not None and (not free or chance.random() < 0.5):
                stack.pop()
                events.append((at, END, closable))
                expected.append((NAMES[closable], *begin.pop(closable), at))
            else:
                name = chance.choice(free)
                events.append((at, START, name))
                begin[name] = (len(stack), at)
                stack.append(name)
        cuts = sorted(chance.sample(range(len(events)), 6))
        pieces = [events[a:b] for a, b in zip([0, *cuts], [*cuts, len(events)], strict=True)]
        starts = [0.0, *(float(piece[-1][0]) if piece else 0.0 for piece in pieces)]
        records = [record(*piece, begin=max(starts[: n + 1])) for n, piece in enumerate(pieces)]
        found = spans(*records)
        assert [(n, d, b, e) for n, b, e, d in closed(found)] == sorted(expected, key=lambda row: row[2])
        assert [section for section, _ in found.still_open] == stack
