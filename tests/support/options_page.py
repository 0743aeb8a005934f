"""docs/options.md, made from the tables of options: ``python -m tests.support.options_page``."""

from __future__ import annotations

from pathlib import Path

from megatron_ft.config.config import FIELDS
from megatron_ft.config.files.options import default_text
from megatron_ft.config.launcher_options import LAUNCHER_OPTIONS
from megatron_ft.config.option import Option
from megatron_ft.config.reference import IGNORED
from megatron_ft.config.torchrun import TORCHRUN_OPTIONS

PAGE = Path(__file__).parents[2] / "docs" / "options.md"

_HEAD = """\
# Options

This page is made from the tables in `megatron_ft/config`; `python -m tests.support.options_page` writes it anew.

`ft_launcher` takes all of torchrun's options and those below, before the script. `--help` shows ten to start with,
`--help-all` all in groups. Dashes and underscores mean the same.
The spellings of earlier versions and of nvidia-resiliency-ext keep working: `--ft-param-NAME`, `--fault-tol-cfg-path`,
`--ignore-missing-fault-tol-cfg`, `--ft-restart-policy`, `--ft-scheduler`, `--ft-max-no-progress-restarts`.
An option may also stand in the YAML file, in the section `fault_tolerance`, unless the list says otherwise: its key
is the name without `--ft-`, with underscores. The command line wins. Each may also be an environment variable: `PET_`
and one of its names in capitals. In brackets: the default. Durations are seconds, `null` is no limit. `--ft-dry-run`
says what they come to, and where each value comes from.
"""


def page() -> str:
    """The text of the page."""
    parts = [_HEAD, "## The configuration, which the ranks get, too\n", _list(FIELDS)]
    parts += ["## The launcher\n", _list(LAUNCHER_OPTIONS)]
    parts += ["## Options of torchrun that mean something else or more here\n"]
    parts += [f"- `--{each.name}`: {each.here}" for each in TORCHRUN_OPTIONS.values() if each.here]
    parts += ["\n## Options of nvidia-resiliency-ext that are ignored\n"]
    by_loss: dict[str, list[str]] = {}
    for name, loss in IGNORED.items():
        by_loss.setdefault(loss, []).append(name.replace("_", "-"))
    parts += [f"- {', '.join(f'`--ft-{name}`' for name in names)}: {loss}" for loss, names in by_loss.items()]
    return "\n".join(parts) + "\n"


def _list(options: dict[str, Option]) -> str:
    rows = []
    for each in options.values():
        value = "" if each.is_flag else f" {each.kind.metavar}"
        has_default = not each.is_flag and "Default: " not in each.help
        notes = [default_text(each)] if has_default else []
        notes += [] if each.in_yaml else ["not in YAML"]
        bracket = f" ({', '.join(notes)})" if notes else ""
        rows.append(f"- `{each.spellings[0]}{value}`{bracket}: {each.help}")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
