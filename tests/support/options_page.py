"""docs/options.md, made from the tables of options: ``python -m tests.support.options_page``."""

from __future__ import annotations

import re
from pathlib import Path

from megatron_ft.core.config.config import FIELDS
from megatron_ft.core.config.launcher_options import LAUNCHER_OPTIONS
from megatron_ft.core.config.option import Option, dashed
from megatron_ft.core.config.reference import IGNORED
from megatron_ft.core.config.torchrun import TORCHRUN_OPTIONS
from megatron_ft.ipc.config.options import default_text
from tests.support.pages import MAX_CELL_WORDS, cell_words

PAGE = Path(__file__).parents[2] / "docs" / "options.md"

_HEAD = """\
# Options

This page is made from the tables in `megatron_ft/core/config`; `python -m tests.support.options_page` writes it anew.

`ft_launcher` takes all of torchrun's options and those below, before the script. `--help` shows ten to start with,
`--help-all` all in groups. Dashes and underscores mean the same.
The spellings of earlier versions and of nvidia-resiliency-ext keep working: `--ft-param-NAME`, `--fault-tol-cfg-path`,
`--ignore-missing-fault-tol-cfg`, `--ft-restart-policy`, `--ft-scheduler`, `--ft-max-no-progress-restarts`.
An option with a key may also stand in the YAML file, in the section `fault_tolerance`; the command line wins. Each may
also be given as an environment variable, like torchrun's own: `PET_` and one of its names in capitals.
`null` is no limit. `megatron-ft check-config FILE OPTIONS` says what they come to, and where each value comes from.
"""


def page() -> str:
    """The text of the page."""
    parts = [_HEAD, "## The configuration, which the ranks get, too\n", _table(FIELDS)]
    parts += ["## The launcher\n", _table(LAUNCHER_OPTIONS)]
    parts += ["## Options of torchrun that mean something else or more here\n", "| option | here |\n|---|---|"]
    changed = {f"--{each.name}": each.here for each in TORCHRUN_OPTIONS.values() if each.here}
    parts += [f"| `{name}` | {_cell(_first(here))} |" for name, here in changed.items()]
    parts += ["", *_details(changed)]
    parts += ["\n## Options of nvidia-resiliency-ext that are ignored\n", "| options | what is lost |\n|---|---|"]
    by_loss: dict[str, list[str]] = {}
    for name, loss in IGNORED.items():
        by_loss.setdefault(loss, []).append(name)
    parts += [
        f"| {', '.join(f'`--ft-{dashed(name)}`' for name in names)} | {_cell(loss)} |"
        for loss, names in by_loss.items()
    ]
    return "\n".join(parts) + "\n"


def _table(options: dict[str, Option]) -> str:
    rows = ["| option | key in YAML | default | unit | |", "|---|---|---|---|---|"]
    for each in options.values():
        value = "" if each.is_flag else f" {each.kind.metavar}"
        shown = _cell(f"`{each.spellings[0]}{value}`")
        default = "" if each.is_flag or "Default: " in each.help else default_text(each)
        key = f"`{each.field}`" if each.in_yaml else ""
        rows.append(f"| {shown} | {key} | {default} | {each.kind.unit} | {_cell(_first(each.help))} |")
    rows += ["", *_details({each.spellings[0]: each.help for each in options.values()})]
    return "\n".join(rows) + "\n"


def _first(text: str) -> str:
    """Return a help text's first sentences: as many as fit in a cell."""
    sentences = re.split(r"(?<=\.) ", text)
    fit = [end for end in range(1, len(sentences) + 1) if cell_words(" ".join(sentences[:end])) <= MAX_CELL_WORDS]
    return " ".join(sentences[: max(fit, default=1)])


def _details(texts: dict[str, str]) -> list[str]:
    """Return the sentences that aren't in the table, a line for each option that has some."""
    rest = {name: text.removeprefix(_first(text)).strip() for name, text in texts.items()}
    return [f"- `{name}`: {text}" for name, text in rest.items() if text]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
