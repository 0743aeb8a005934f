"""Where launchers look for the coordinator: not all at another place, each at another time."""

from __future__ import annotations

from collections.abc import Collection

from megatron_ft.core.job.search import Search

CANDIDATES = ("h1:1", "h2:1", "h3:1")


def searching(*, own: str = "h9:1") -> Search:
    """One whose coordinator, at h0:1, has just been lost."""
    search = Search(("h0:1",), own=own)
    search.address = "h0:1"
    search.found()
    search.candidates(CANDIDATES)
    return search


def way(search: Search, steps: int, *, answering: Collection[str]) -> list[tuple[str, bool]]:
    """The next addresses that it tries, and whether it is patient there; nothing leads at those that answer."""
    tried = []
    for _ in range(steps):
        address = search.next(knows_job=True, now_s=0.0)
        tried.append((address, search.is_patient and address in answering))
        search.tried(is_answered=address in answering)
    return tried


def test_in_its_first_pass_it_is_patient_once_and_looks_everywhere() -> None:
    search = searching()
    tried = way(search, 6, answering=CANDIDATES)
    assert tried == [
        ("h0:1", False),
        ("h1:1", True),
        ("h0:1", False),
        ("h2:1", False),
        ("h0:1", False),
        ("h3:1", False),
    ]


def test_later_it_is_patient_each_time_at_the_first_that_answers() -> None:
    search = searching()
    way(search, 6, answering=CANDIDATES)
    tried = way(search, 8, answering=CANDIDATES)
    assert [address for address, _ in tried[::2]] == ["h1:1"] * 4
    assert [is_patient for _, is_patient in tried] == [True, False] * 4
    assert {address for address, _ in tried} == {"h0:1", *CANDIDATES}


def test_one_that_was_cut_off_comes_to_the_others_within_a_pass() -> None:
    search = searching(own="h3:1")
    way(search, 6, answering=["h3:1"])
    assert way(search, 2, answering=["h3:1"])[0] == ("h3:1", True)
    way(search, 6, answering=CANDIDATES)
    assert {address for address, is_patient in way(search, 12, answering=CANDIDATES) if is_patient} == {"h1:1"}


def test_where_the_job_was_coordinated_last_comes_first_again_once_it_answers() -> None:
    search = searching()
    way(search, 12, answering=CANDIDATES)
    assert search.home == "h1:1"
    way(search, 6, answering=["h0:1", *CANDIDATES])
    assert search.home == "h0:1"
