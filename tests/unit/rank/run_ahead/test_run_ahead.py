"""The parts of running ahead: what is noticed, and that everything is as it was afterwards."""

from __future__ import annotations

import collections
import copy
import importlib.util
import os
import sys
import time
import traceback
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

import megatron_ft
from megatron_ft.rank.base.replacing import Replacements
from megatron_ft.rank.run_ahead.call_stack import callers, is_own
from megatron_ft.rank.run_ahead.environ import watch_environ
from megatron_ft.rank.run_ahead.read_files import ReadFiles


def test_the_users_files_are_those_that_nobody_has_installed() -> None:
    for file in (collections.__file__, pytest.__file__, "<string>", "<frozen os>", "/x/dist-packages/y.py"):
        assert not is_own(file)
    assert not is_own(os.path.join(os.path.dirname(megatron_ft.__file__), "rank", "client.py"))
    for file in ("/home/me/train.py", "train.py", __file__):
        assert is_own(file)


def test_stand_in_function_is_not_among_the_callers() -> None:
    """Where it is installed, in site-packages, it would pass for a library that acts for the user's module."""
    found: list[str] = []
    replacements = Replacements()
    replacements.replace(time, "localtime", lambda: found.extend(f.f_code.co_filename for f in callers()))
    try:
        time.localtime()
    finally:
        replacements.undo()
    assert set(found[:3]) == {__file__}
    assert not [file for file in found if os.path.dirname(megatron_ft.__file__) in file]


def test_a_file_that_has_changed_is_found(tmp_path: Path) -> None:
    module, missing, listed, entered = (tmp_path / name for name in ("module.py", "missing", "listed", "entered"))
    module.write_text("1")
    listed.mkdir()
    entered.mkdir()
    looked = ReadFiles()
    for path in (module, missing, entered):
        looked.note(str(path))
    looked.note(importlib.util.cache_from_source(str(module)))
    looked.note(str(listed), listed=True)
    assert len(looked) == 4
    assert looked.changed() is None
    (entered / "new").touch()  # nobody has looked into it
    assert looked.changed() is None
    (listed / "new").touch()
    assert looked.changed() == str(listed)
    missing.touch()
    assert looked.changed() == str(missing)
    module.write_text("2")
    assert looked.changed() == str(module)


def test_a_file_is_as_it_was_when_the_script_looked(tmp_path: Path) -> None:
    """One that is edited while the script still runs ahead has changed."""
    module = tmp_path / "module.py"
    module.write_text("1")
    looked = ReadFiles()
    looked.note(str(module))
    module.write_text("12")
    looked.note(str(module))
    assert looked.changed() == str(module)


def test_variables_of_a_rank_are_told_of_before_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")  # so that what is written below past it is undone
    monkeypatch.delenv("RANK")
    told: list[str] = []

    def on_use(name: str) -> None:
        told.append(name)
        os.environ._data[b"RANK"] = b"3"  # type: ignore[attr-defined]  # as in a rank, where it is there by then

    before, kind = os.environ, type(os.environ)
    replacements = Replacements()
    watch_environ(replacements, on_use, lambda: told.append("all"), lambda: told.append("copy"))
    try:
        assert os.environ["RANK"] == "3"
        assert os.environb[b"RANK"] == b"3"
        assert os.getenv("LOCAL_RANK", "x") == "x"
        assert "MASTER_ADDR" not in os.environ
        assert os.environ["PATH"]
        os.environ["FT_X"] = "1"
        del os.environ["FT_X"]
        with pytest.raises(KeyError) as raised:
            os.environ["FT_Y"]
        assert told == ["RANK", "RANK", "LOCAL_RANK", "MASTER_ADDR", "FT_X", "FT_X", "FT_Y"]
        assert not [f for f in traceback.extract_tb(raised.value.__traceback__) if "megatron_ft" in f.filename]
        told.clear()
        dict(os.environ)
        repr(os.environ)
        assert set(told) >= {"all"}
        told.clear()
        os.environ.copy()
        assert told[0] == "copy"
        assert isinstance(os.environ, kind)
    finally:
        replacements.undo()
    assert os.environ is before
    assert type(os.environ) is type(os.environb) is kind
    told.clear()
    assert os.environ["RANK"] == "3"
    assert told == []


def test_replaced_functions_are_restored_after_the_run_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "late_r.py").write_text("def f(a):\n    return a + 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    calls: list[object] = []
    original, finders = time.sleep, list(sys.meta_path)
    replacements = Replacements()
    replacements.replace(time, "sleep", lambda *arguments: calls.append(arguments))
    replacements.replace(time, "nothing of that name", lambda: None)

    def hook(module: ModuleType) -> None:
        calls.append(module.__name__)
        replacements.replace(module, "f", lambda *arguments: calls.append(arguments))

    replacements.when_imported("late_r", hook)
    kept = time.sleep
    assert kept == original
    assert {kept} <= {original}
    kept(0)
    import late_r  # type: ignore[import-not-found]

    assert late_r.f(1) == 2
    assert calls == [(0,), "late_r", (1,)]
    assert type(late_r.__loader__).__name__ == type(late_r.__spec__.loader).__name__ == "SourceFileLoader"
    replacements.undo()
    assert time.sleep is original
    assert list(sys.meta_path) == finders
    kept(0)
    assert late_r.f(1) == 2
    assert len(calls) == 3


def test_number_of_variables_is_asked_apart_from_their_values() -> None:
    told: list[str] = []
    replacements = Replacements()
    watch_environ(replacements, told.append, *(partial(told.append, word) for word in ("all", "copy", "number")))
    try:
        len(os.environ)
        copy.deepcopy(os.environb)
    finally:
        replacements.undo()
    assert told[:2] == ["number", "copy"]
