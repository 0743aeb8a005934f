"""Which timeouts a train loop may learn now: only from intervals that will be as long in the next run."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Update", "choose_update"]


@dataclass(frozen=True, kw_only=True)
class Update:
    """What is learned now, and one line for each thing that isn't."""

    sections: tuple[str, ...]
    out_of_section: bool
    reasons: tuple[str, ...]


def choose_update(
    *,
    is_persistent_chkpt_loaded: bool,
    is_setup_open: bool,
    has_seen_enough_steps: bool,
    has_saved: bool,
    is_async_save: bool,
    is_closing: bool,
) -> Update:
    """The rules.

    Args:
        is_persistent_chkpt_loaded: "setup" held the load of a checkpoint from storage; without one, or with
            one from memory, it was shorter than others will be.
        is_setup_open: "setup" isn't over yet.
        has_seen_enough_steps: enough training iterations for the longest to be typical.
        has_saved: there was a save.
        is_async_save: how much of an asynchronous save falls into "checkpointing" differs between runs.
        is_closing: the run ends; until then the longest time out of section may be yet to come.
    """
    sections: list[str] = []
    reasons: list[str] = []
    if not is_persistent_chkpt_loaded:
        reasons.append("the timeout of 'setup' is learned in a run that loads a persistent checkpoint")
    elif is_setup_open:
        reasons.append("the timeout of 'setup' isn't learned before its end")
    else:
        sections.append("setup")
    if has_seen_enough_steps:
        sections.append("step")
    else:
        reasons.append("the timeout of 'step' isn't learned before more training iterations were seen")
    if not has_saved:
        reasons.append("the timeout of 'checkpointing' is learned after a save")
    elif is_async_save:
        reasons.append("the timeout of 'checkpointing' isn't learned with asynchronous saves")
    else:
        sections.append("checkpointing")
    out_of_section = is_closing and has_saved and "setup" in sections and "step" in sections
    if is_closing and not out_of_section:
        reasons.append("the out-of-section timeout isn't learned: that takes a load, enough iterations and a save")
    return Update(sections=tuple(sections), out_of_section=out_of_section, reasons=tuple(reasons))
