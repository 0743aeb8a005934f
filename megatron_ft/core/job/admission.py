"""Who is let into a job: launchers of that very job, whose options are those of the first one. Pure."""

from __future__ import annotations

from megatron_ft.core.job import lines
from megatron_ft.core.job.messages import REFUSED, Dismiss, Hello, Rules

__all__ = ["differences", "refusal"]


def refusal(hello: Hello, job: str, rules: Rules) -> Dismiss | None:
    """What to answer to a launcher that doesn't belong to that job, or has other options; None if it is let in."""
    if hello.job != job:
        return Dismiss(REFUSED, lines.ANOTHER_JOB)
    if hello.rules != rules:
        return Dismiss(REFUSED, lines.other_options(differences(hello.rules, rules)))
    return None


def differences(own: Rules, others: Rules) -> list[tuple[str, str, str]]:
    """What differs: each option, its value in ``own``, and in ``others``."""
    theirs = _options(others)
    return [(name, value, theirs[name]) for name, value in _options(own).items() if value != theirs[name]]


def _options(rules: Rules) -> dict[str, str]:
    """All that the rules say, as users write it."""
    last_call = "not set" if rules.last_call_s is None else f"{rules.last_call_s:g}"
    return {
        "--nnodes": f"{rules.min_nodes}:{rules.max_nodes}",
        "--restart-policy": "min-healthy" if rules.min_healthy else "any-failed",
        "--max-restarts": str(rules.max_restarts),
        "--ft-max-no-progress-cycles": str(rules.max_stalled),
        "--ft-scale-up-at-once": "set" if rules.at_once else "not set",
        "--rdzv-conf last_call_timeout": last_call,
        "--rdzv-conf join_timeout": f"{rules.join_timeout_s:g}",
        "--ft-no-restart-exit-code": str(rules.no_progress_code),
        "the number of launchers that srun has started": str(rules.launchers),
        "the exit code of a job that is to be started again": str(rules.try_again_code),
    }
