"""Python imports this before the first line of a rank's script.

Starts the fork server (see ``megatron_ft.run_ahead.server``), the reference's names (see
``megatron_ft.rank.reference.finder``), and the watch of collectives (see ``megatron_ft.rank.collectives.init_hook``).

Every Python that a rank starts inherits PYTHONPATH and loads this file, Python 2.7 included: no syntax here is newer,
and a Python that can't import this package only loads the ``sitecustomize`` that this file hides.
"""

import os
import sys

_OLDEST = (3, 10)
_NEWEST = (3, 14)
"""Oldest and newest Python for which a failure is reported; a newer one may have its reasons."""
_known = set(sys.modules)


def _begin():  # type: () -> None
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != here]
    sys.path_importer_cache.pop(here, None)
    if sys.version_info < _OLDEST:
        return
    # a fork server gets the variables of its ranks only later
    is_watched = "MEGATRON_FT_RUN_AHEAD" in os.environ or (
        os.environ.get("FT_WATCH_COLLECTIVES") == "on" and os.environ.get("WORLD_SIZE", "1") != "1"
    )
    names_are_served = os.environ.get("MEGATRON_FT_REFERENCE_NAMES") == "on"
    for is_wanted, module, what in (
        (names_are_served, "reference.finder", "nvidia_resiliency_ext isn't served by megatron_ft here"),
        (is_watched, "collectives.init_hook", "the collectives of this rank aren't watched"),
    ):
        if not is_wanted:
            continue
        try:
            _begin_ours("megatron_ft.rank." + module, here)
        except Exception as error:  # noqa: BLE001 - no script may fail because of this
            if sys.version_info[:2] <= _NEWEST and sys.stderr is not None:
                sys.stderr.write("FT: WARNING: %s: %r\n" % (what, error))  # noqa: UP031 - as old as Python 2.7
    if "MEGATRON_FT_RUN_AHEAD" in os.environ:
        _begin_ours("megatron_ft.run_ahead.server", here, _known)


def _begin_ours(module, here, *arguments):  # type: (str, str, *object) -> None
    # last, and only for now: a launcher started beside its package finds it nowhere else
    sys.path.append(os.path.abspath(os.path.join(here, *[os.pardir] * 3)))
    try:
        begin = __import__(module, fromlist=["begin"]).begin
    finally:
        sys.path.pop()
    begin(*arguments)


_begin()
if vars(sys.modules[__name__]) is globals():  # otherwise the fork server has imported the hidden one
    # kept: Python 2.7 empties the namespace of a module without references
    _hiding = sys.modules.pop(__name__)
    # import the hidden sitecustomize; if there is none, Python expects this very error
    __import__(__name__)
