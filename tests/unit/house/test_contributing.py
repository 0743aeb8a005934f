"""CONTRIBUTING.md is a map: what it names is there, and no folder is missing from its picture."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import megatron_ft

PACKAGE = Path(megatron_ft.__file__).parent
MAP = PACKAGE.parent.joinpath("CONTRIBUTING.md").read_text()
PICTURE = MAP.partition("## The house")[2].partition("\n| folder |")[0]
NAMED = re.findall(r"`([a-z_]+(?:/[a-z_]+)*\.py)`", MAP.partition("## Where do I change")[2].partition("\n## ")[0])


@pytest.mark.parametrize("name", sorted(set(NAMED)))
def test_a_file_that_is_named_exists(name: str) -> None:
    assert (PACKAGE / name).is_file()


@pytest.mark.parametrize("folder", ["(top)", "launcher"])
def test_every_loose_file_is_in_the_picture(folder: str) -> None:
    entry = PICTURE.partition(f" {folder}/ " if folder == "launcher" else folder)[2]
    named = re.findall(r"\w+", re.split(r"\n +\w+/", entry)[0])
    place = PACKAGE if folder == "(top)" else PACKAGE / folder
    assert {path.stem for path in place.glob("[!_]*.py")} - set(named) == set()


def test_every_folder_is_in_the_picture() -> None:
    folders = {path.parent.name for path in PACKAGE.rglob("*.py")} - {PACKAGE.name, "startup"}
    assert {name for name in folders if f"{name}/" not in PICTURE} == set()
    assert len(NAMED) > 10


UNIT = Path(__file__).parent.parent


def test_the_unit_tests_lie_as_the_package_does() -> None:
    folders = {path.parent.relative_to(UNIT) for path in UNIT.rglob("test_*.py")} - {Path("house"), Path("campaigns")}
    assert {folder for folder in folders if not (PACKAGE / folder).is_dir()} == set()
