"""Functions that do something first while a script is run ahead."""

from __future__ import annotations

import copy
import datetime
import importlib
import pickle
import random
import sys
import time
import types

import pytest

from megatron_ft.rank.base.replacing import Replacements


def test_replacement_that_the_script_has_overwritten_stays() -> None:
    def original() -> str:
        return "original"

    calls: list[str] = []
    owner = types.SimpleNamespace(a=original, b=original)
    replacements = Replacements()
    for name in ("a", "b"):
        replacements.replace(owner, name, lambda name=name: calls.append(name))
    kept = owner.a
    owner.a = lambda: "the script's " + kept()
    replacements.undo()
    assert owner.b is original
    assert owner.a() == "the script's original"
    assert not calls  # what the script has kept does nothing first any more


def test_methods_are_restored_and_inherited_ones_removed() -> None:
    class Base:
        def method(self) -> int:
            return 1

    class Derived(Base):
        pass

    replacements, calls = Replacements(), list[int]()
    replacements.replace(Derived, "method", lambda _self: calls.append(1))
    assert (Derived().method(), calls) == (1, [1])
    replacements.undo()
    assert "method" not in vars(Derived)


def test_stand_in_of_a_function_can_be_copied_and_pickled() -> None:
    owner = types.SimpleNamespace(sleep=time.sleep, uniform=random.Random(1).uniform)
    replacements = Replacements()
    for name in ("sleep", "uniform"):
        replacements.replace(owner, name, lambda *_: None)
    copied = copy.deepcopy(owner)
    assert copied.sleep is time.sleep
    assert pickle.loads(pickle.dumps(owner.uniform))(0, 1) == copied.uniform(0, 1) == random.Random(1).uniform(0, 1)


def test_torch_jit_knows_what_stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its table may be made before, and after."""
    owner = types.SimpleNamespace(rand=lambda: 1, late=lambda: 2)
    table = {id(owner.rand): "aten::rand"}
    monkeypatch.setitem(sys.modules, "torch.jit._builtins", types.SimpleNamespace(_builtin_table=table))  # type: ignore[arg-type]
    replacements = Replacements()
    for name in ("rand", "late"):
        replacements.replace(owner, name, lambda: None)
    rand = owner.rand
    table[id(owner.late)] = "aten::late"
    assert table[id(rand)] == "aten::rand"
    replacements.undo()
    assert [table[id(each)] for each in (rand, owner.rand, owner.late)] == ["aten::rand", "aten::rand", "aten::late"]


def test_callbacks_that_wait_for_a_module_are_all_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that is run ahead is watched by one, and its collectives by another."""
    monkeypatch.delitem(sys.modules, "webbrowser", raising=False)
    told: list[str] = []
    waiting = [Replacements(), Replacements()]
    for name, each in zip("ab", waiting, strict=True):
        each.when_imported("webbrowser", lambda module, name=name: told.append(f"{name} {module.__name__}"))
    try:
        importlib.import_module("webbrowser")
    finally:
        for each in waiting:
            each.undo()
    assert sorted(told) == ["a webbrowser", "b webbrowser"]


def test_class_method_in_c_is_replaced_in_the_class_itself() -> None:
    """References to the class, taken before or after, see it; afterwards all is as it was."""

    class Derived(datetime.datetime):
        pass

    before, calls = datetime.datetime.__dict__["now"], list[object]()
    taken = datetime.datetime
    replacements = Replacements()
    replacements.replace_class_method(datetime.datetime, "now", lambda *arguments: calls.append(arguments))
    replacements.replace_class_method(datetime.datetime, "no such name", lambda: None)
    kept = datetime.datetime.now
    try:
        assert type(taken.now()) is datetime.datetime
        assert type(Derived.now(datetime.timezone.utc)) is Derived
        assert calls == [(), (datetime.timezone.utc,)]
        assert pickle.loads(pickle.dumps(kept))() >= datetime.datetime.fromtimestamp(0)
    finally:
        replacements.undo()
    calls.clear()
    assert datetime.datetime.__dict__["now"] is before
    assert taken.now() <= kept()
    assert calls == []
