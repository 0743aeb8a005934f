"""torchrun's own options, for parsers without torch, and what this package makes of some of them."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Sequence

from megatron_ft.core.config.torchrun import TORCHRUN_OPTIONS
from megatron_ft.core.errors import ConfigError
from megatron_ft.ipc.config.options import ResolvedOptions

DEFAULT_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"


def add_torchrun_options(parser: argparse.ArgumentParser) -> None:
    """Add torchrun's options, as unchecked texts, to a parser that isn't torchrun's."""
    for each in TORCHRUN_OPTIONS.values():
        if each.is_flag:
            parser.add_argument(*each.spellings, action="store_true", help=argparse.SUPPRESS)
        else:
            default = os.environ.get(f"PET_{each.dest.upper()}")
            parser.add_argument(*each.spellings, default=default, help=argparse.SUPPRESS)


def say_what_they_mean(parser: argparse.ArgumentParser) -> None:
    """Adapt ``--help`` of torchrun's parser to the options' meaning here."""
    for action in parser._actions:
        known = TORCHRUN_OPTIONS.get(action.dest)
        if known is not None and known.here:
            action.help = known.here


def parse_signals(text: str) -> tuple[signal.Signals, ...]:
    """Parse torchrun's ``--signals-to-handle``.

    Raises:
        ConfigError: a name is no signal, or one that can't be handled.
    """
    numbers = []
    for name in text.split(","):
        number = getattr(signal.Signals, name.strip().upper(), None)
        if number is None or number in (signal.SIGKILL, signal.SIGSTOP):
            raise ConfigError(f"--signals-to-handle: {name.strip()!r} is no signal that can be handled")
        numbers.append(number)
    # without SIGTERM and SIGINT the job could not be ended in an orderly way
    return tuple(dict.fromkeys([*numbers, signal.SIGTERM, signal.SIGINT]))


def check_forwarded(forwarded: Sequence[signal.Signals], handled: Sequence[signal.Signals]) -> None:
    """Check that no signal is both forwarded and handled.

    Raises:
        ConfigError: a signal is both.
    """
    for number in forwarded:
        if number in handled:
            raise ConfigError(
                f"--ft-forward-signals: {number.name} ends the job (it is one of --signals-to-handle), so it can't be "
                "forwarded without ending it"
            )


def term_timeout(namespace: argparse.Namespace, options: ResolvedOptions) -> float:
    """Return --term-timeout if it is set, else torchrun's equivalent --shutdown-timeout, else the default. Seconds.

    Raises:
        ConfigError: --shutdown-timeout is not a number of seconds.
    """
    if options.was_set("term-timeout"):
        return options.term_timeout
    given = getattr(namespace, "shutdown_timeout", None)
    if given is None:
        given = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    if given is None:
        return options.term_timeout
    try:
        seconds = float(given)
    except ValueError:
        seconds = -1.0
    if seconds < 0:
        raise ConfigError(f"--shutdown-timeout: {given} is no number of seconds")
    return seconds
