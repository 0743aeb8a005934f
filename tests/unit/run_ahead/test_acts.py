"""Acts of modules while they are imported, seen before they are done, and the table of harmless ones."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from megatron_ft.diagnosis.stacks import STAND_IN
from megatron_ft.run_ahead import acts
from megatron_ft.run_ahead.acts import Watch


class ActError(BaseException):
    pass


class Library:
    """Modules of a user and of an installed package, imported under a watch."""

    def __init__(self, directory: Path) -> None:
        self.own, self.installed = directory, directory / "lib" / "site-packages"
        self.installed.mkdir(parents=True)
        self.watch = Watch(self._act)

    def _act(self, what: str, module: str) -> None:
        self.watch.end()
        raise ActError(f"{module} {what}")

    def __call__(self, text: str, *, name: str = "acts_a", installed: bool = False) -> str | None:
        path = (self.installed if installed else self.own) / f"{name}.py"
        path.write_text(text)
        spec = __import__("importlib.util").util.spec_from_file_location(name, path)
        module = __import__("importlib.util").util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            with self.watch:
                spec.loader.exec_module(module)
        except ActError as act:
            return str(act)
        finally:
            del sys.modules[name]
        return None


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Library:
    monkeypatch.chdir(tmp_path)
    return Library(tmp_path)


@pytest.mark.parametrize(
    ("text", "act"),
    [
        ("import os; os.environ.get('RANK')", "reads RANK"),
        ("import os; os.environb[b'FT_CYCLE']", "reads FT_CYCLE"),
        ("import os; os.environ['LOCAL_RANK'] = '1'", "reads LOCAL_RANK"),
        ("import os; dict(os.environ)", "reads all of os.environ"),
        ("import os; os.urandom(4)", "draws random numbers"),
        ("import random; random.Random()", "seeds a generator from the system"),
        ("import numpy; numpy.random.default_rng()", "draws random numbers"),
        ("import threading; threading.Thread(target=print).start()", "starts a thread"),
        ("import os; os.system('true')", "starts a process"),
        ("import os; os.fork()", "starts a process"),
        ("open('x', 'w')", "writes a file"),
        ("import os; os.mkdir('x')", "changes files"),
        ("import tempfile; tempfile.mkdtemp()", "makes a temporary file"),
        ("import socket; socket.socket().bind(('127.0.0.1', 0))", "listens"),
        ("import socket; socket.socket().connect(('127.0.0.1', 1))", "uses a network connection"),
        ("import fcntl; fcntl.flock(open(__file__), fcntl.LOCK_SH)", "locks a file"),
    ],
)
def test_act_of_a_module_is_told_before_it_is_done(library: Library, text: str, act: str) -> None:
    assert library(text) == f"acts_a {act}"
    assert "RANK" not in os.environ


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("acts_a", "import subprocess; subprocess.run(['true'])"),  # it waits for the answer
        ("acts_a", "import os; os.makedirs('cache/x', exist_ok=True)"),
        ("tqdm", "import os; {**os.environ}"),
        ("acts_a", "import tempfile; tempfile.gettempdir()"),
        ("acts_a", "import os; os.environ.get('PATH'); os.environ['ACTS'] = '1'; del os.environ['ACTS']"),
        ("acts_a", "open(__file__).close(); open('/dev/null', 'w').close()"),
        ("acts_a", "import random; random.Random(5).random()"),
    ],
)
def test_harmless_act_of_an_installed_package_is_none(library: Library, name: str, text: str) -> None:
    assert library(text, name=name, installed=True) is None


def test_library_that_acts_for_a_users_module_is_named(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(library.installed))
    (library.installed / "acts_helper.py").write_text("def ask():\n    import os\n    return os.urandom(1)\n")
    assert library("import acts_helper; acts_helper.ask()") == "acts_helper draws random numbers"
    sys.modules.pop("acts_helper")


def test_files_that_a_users_module_reads_are_known_and_compared(library: Library) -> None:
    data, folder = library.own / "settings", library.own / "folder"
    data.write_text("1")
    folder.mkdir()
    text = "import os, pathlib; open('settings').read(); os.listdir('folder'); open('/proc/self/stat').read()"
    assert library(f"{text}; os.path.exists('absent'); os.path.isdir('.'); pathlib.Path('later').exists()") is None
    own = {str(library.own / name) for name in ("settings", "folder", "absent", "later")}
    assert set(library.watch.files) == own
    (library.own / "absent").touch()
    assert library.watch.changed_file() == str(library.own / "absent")
    (library.own / "absent").unlink()
    assert library.watch.changed_file() is None
    data.write_text("22")
    assert library.watch.changed_file() == str(data)
    data.unlink()
    assert library.watch.changed_file() == str(data)
    library.watch.note_modules()
    assert __file__ in library.watch.files
    assert not [path for path in library.watch.files if "/lib/python" in path]


def test_generator_seeded_from_the_system_is_seeded_anew_and_others_keep_their_state(library: Library) -> None:
    kept: list[random.Random] = []
    sys.modules["acts_kept"] = kept  # type: ignore[assignment]
    text = "import random, sys; sys.modules['acts_kept'] += [random.Random(), random.Random(7), random.Random()]"
    assert library(f"{text}; sys.modules['acts_kept'][2].seed(8)", installed=True) is None
    del sys.modules["acts_kept"]
    states = [each.getstate() for each in kept]
    library.watch.seed_anew()
    assert [each.getstate() == state for each, state in zip(kept, states, strict=True)] == [False, True, True]


@pytest.mark.parametrize("is_known_to_torch", [True, False])
def test_process_that_has_cuda_is_no_fork_server(
    library: Library, monkeypatch: pytest.MonkeyPatch, is_known_to_torch: bool
) -> None:
    held: dict[str, str] = {}
    monkeypatch.setattr(acts, "thread_count", lambda: 1)  # what else this process has doesn't matter here
    monkeypatch.setattr(acts, "_held", lambda: held)
    monkeypatch.setattr(os, "waitid", Mock(side_effect=ChildProcessError))
    assert library.watch.remains() is None
    if is_known_to_torch:
        monkeypatch.setitem(sys.modules, "torch.cuda", Mock(is_initialized=lambda: True))
    else:
        held.update({"99998": "keeps /dev/nvidia0 open", "99999": "keeps /dev/nvidia-uvm open"})
    assert library.watch.remains() == acts.CUDA


def test_nothing_of_the_watch_is_left_but_a_hook_in_c(library: Library) -> None:
    before = os.urandom, os.getrandom, random.Random.seed, type(os.environ).__iter__, os.environ.encodekey  # type: ignore[attr-defined]
    kept: list[object] = []
    sys.modules["acts_kept"] = kept  # type: ignore[assignment]
    assert library("import os, sys; sys.modules['acts_kept'].append(os.urandom)") is None
    del sys.modules["acts_kept"]
    assert before == (os.urandom, os.getrandom, random.Random.seed, type(os.environ).__iter__, os.environ.encodekey)  # type: ignore[attr-defined]
    stand_in = kept[0]
    assert stand_in.__code__.co_name == STAND_IN  # type: ignore[attr-defined]
    assert len(stand_in(3)) == 3  # type: ignore[operator]
    frames: list[str] = []
    sys.setprofile(lambda frame, event, _: frames.append(frame.f_code.co_filename) if event == "call" else None)
    sys.audit("open", "x", "r", 0)
    sys.setprofile(None)
    assert frames == []
