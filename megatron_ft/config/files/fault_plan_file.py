"""Reads a fault plan from a YAML file."""

from __future__ import annotations

import os

import yaml

from megatron_ft.errors import ConfigError
from megatron_ft.link.base.fault_plan import FaultPlan, parse_plan


def read_fault_plan(path: str | os.PathLike[str]) -> FaultPlan:
    """Return the plan in the file.

    Raises:
        ConfigError: the file can't be read, isn't YAML, or isn't a plan; one line.
    """
    source = os.fspath(path)
    try:
        with open(path, encoding="utf-8") as file:
            document = yaml.safe_load(file)
    except OSError as error:
        raise ConfigError(f"{source}: the fault plan can't be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{source}: the fault plan isn't a text file") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: the fault plan isn't YAML: {' '.join(str(error).split())}") from None
    return parse_plan(document, source=source)
