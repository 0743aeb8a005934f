"""Python imports this before the first line of a script that is run ahead: ``megatron_ft.rank.run_ahead.script``."""

import os
import sys

_known = set(sys.modules)


def _begin() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != here]
    sys.path_importer_cache.pop(here, None)
    # last, and only for now: a launcher that was started beside its package finds it nowhere else
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(here))))
    try:
        from megatron_ft.rank.run_ahead import script

        sys.path.pop()
        script.begin(_known)
    except BaseException:  # noqa: BLE001 - whatever it is: Python would go on, and run the script unwatched
        sys.excepthook(*sys.exc_info())
        os._exit(1)


_begin()
del sys.modules[__name__]
# the one that this file hides; where there is none, Python takes the error for just that
__import__(__name__)
