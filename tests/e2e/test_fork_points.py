"""What a script may do before its ranks are forked: a fork server runs small programs ahead and says where it waits."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_ft.core.messages.fork_server import FromServer, ScriptReady, Unfit
from megatron_ft.core.run_ahead import Ahead
from megatron_ft.launcher.spawn.fork_server import ServerProcess
from tests.support.launching import ROOT, clean_environment, wait_until

END = "import os\nos.environ['RANK']\n"
PROGRAM = "starts a program"
TEMPORARY = "makes a temporary file"


@pytest.fixture
def point(tmp_path: Path) -> PointOf:
    return PointOf(tmp_path)


class PointOf:
    """Runs a script ahead, beside modules of the user's and installed ones."""

    def __init__(self, directory: Path) -> None:
        self.own, self.installed = directory / "src", directory / "lib" / "site-packages"
        for each in (self.own, self.installed):
            each.mkdir(parents=True)

    def __call__(self, script: str, **modules: str) -> str:
        """Where the script waits, and why. Modules whose name begins with ``lib_`` are installed ones."""
        for name, text in modules.items():
            directory = self.installed if name.startswith("lib_") else self.own
            path = directory / f"{name}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        path = self.own / "script.py"
        path.write_text(script)
        with self.ahead(path) as (_, told):
            return f"{told.where} ({told.what})" if isinstance(told, ScriptReady) else f"unfit: {told.reason}"

    @contextmanager
    def ahead(self, path: Path) -> Iterator[tuple[ServerProcess, ScriptReady | Unfit]]:
        """A server that has run this script ahead, and what it says."""
        environment = {**clean_environment(), "PYTHONPATH": f"{ROOT}:{self.installed}"}
        server = ServerProcess(Ahead([sys.executable, "-u", str(path)], environment, (), shares_output=False))
        found: list[FromServer] = []

        def has_told() -> bool:
            found.extend(server.read())
            return bool(found)

        try:
            wait_until(has_told, 30)
            (told,) = found
            assert isinstance(told, (ScriptReady, Unfit))
            yield server, told
        finally:
            server.kill()


@pytest.mark.parametrize(
    "call",
    [
        "subprocess.run(['true'])",
        "subprocess.check_output('true', shell=True)",
        "subprocess.getoutput('ls')",
        "subprocess.Popen(['true'], stdout=subprocess.PIPE)",
        "functools.partial(subprocess.run, ['true'])()",
        "os.system('true')",
        "os.popen('true')",
        "os.posix_spawn('/bin/true', ['true'], {})",
    ],
)
def test_program_that_a_users_module_starts_ends_the_shared_part(point: PointOf, call: str) -> None:
    text = f"import functools, os, subprocess\n{call}\n"
    assert point(f"import part\n{END}", part=text) == f"part.py:2 ({PROGRAM})"


def test_program_that_a_users_package_starts_ends_the_shared_part(point: PointOf) -> None:
    text = "import subprocess\nsubprocess.run(['true'])\n"
    assert point(f"import package\n{END}", **{"package/__init__": text}) == f"__init__.py:2 ({PROGRAM})"


@pytest.mark.parametrize(
    "call",
    [
        "os.spawnlp(os.P_WAIT, 'true', 'true')",
        "pty.spawn(['true'])",
        "asyncio.run(asyncio.create_subprocess_exec('true'))",
        "multiprocessing.get_context('spawn').Process(target=print).start()",
        "multiprocessing.get_context('fork').Process(target=print).start()",
        "ctypes.CDLL(None).system(b'true')",
    ],
)
def test_process_that_a_users_module_starts_ends_the_shared_part(point: PointOf, call: str) -> None:
    text = f"import asyncio, ctypes, multiprocessing, os, pty\n{call}\n"
    assert point(f"import part\n{END}", part=text).startswith("part.py:2 (")


def test_program_of_a_library_that_a_users_module_calls_ends_the_shared_part(point: PointOf) -> None:
    helper = "import subprocess\ndef ask():\n    return subprocess.check_output(['echo'])\n"
    assert point(f"import part\n{END}", part="import lib_a\nlib_a.ask()", lib_a=helper) == f"part.py:2 ({PROGRAM})"


@pytest.mark.parametrize(
    "call",
    [
        "subprocess.run(['true'], check=True)",
        "subprocess.run(['true'], check=True, env=os.environ)",
        "platform.processor()",
        "ctypes.util.find_library('nowhere')",
        "uuid._get_command_stdout('ip')",
    ],
)
def test_program_of_a_library_that_is_being_imported_is_shared(point: PointOf, call: str) -> None:
    text = f"import ctypes.util, os, platform, subprocess, uuid\n{call}\n"
    assert point(f"import part\n{END}", part="import lib_a", lib_a=text) == "script.py:3 (reads RANK)"


def test_program_of_a_checkout_of_megatron_that_is_being_imported_is_shared(point: PointOf) -> None:
    """The user's other files in a directory of that name aren't Megatron's."""
    text = "import subprocess\nsubprocess.run(['true'])\n"
    assert point(f"import megatron.core\n{END}", **{"megatron/core": text}) == "script.py:3 (reads RANK)"
    assert point(f"import megatron.mine\n{END}", **{"megatron/mine": text}) == f"mine.py:2 ({PROGRAM})"


CLOCKS = {
    "datetime.datetime.now()": "datetime.now",
    "datetime.datetime.now(datetime.timezone.utc)": "datetime.now",
    "datetime.datetime.utcnow()": "datetime.utcnow",
    "datetime.datetime.today()": "date.today",
    "datetime.date.today()": "date.today",
    "datetime.datetime.fromtimestamp(time.time())": "time.time",
    "functools.partial(Date.now)()": "datetime.now",
    "time.strftime('%Y')": "time.strftime",
    "time.strftime('%Y', time.localtime())": "time.localtime",
    "time.localtime(time.time())": "time.time",
    "time.gmtime()": "time.gmtime",
    "time.ctime()": "time.ctime",
    "time.asctime()": "time.asctime",
    "email.utils.formatdate()": "time.time",
}
IMPORTS = "import datetime, email.utils, functools, logging, time\nfrom datetime import datetime as Date\n"


@pytest.mark.parametrize("call", CLOCKS)
def test_date_that_a_users_file_reads_ends_the_shared_part(point: PointOf, call: str) -> None:
    found = point(f"import part\n{END}", part=f"{IMPORTS}{call}\n")
    assert found.startswith(f"part.py:3 (reads the clock ({CLOCKS[call]}"), found


@pytest.mark.parametrize(
    "call",
    [
        "time.time(), time.time_ns(), time.perf_counter(), time.monotonic()",
        "time.strftime('%Y', time.localtime(5)), time.ctime(5), datetime.datetime.fromtimestamp(5)",
        "datetime.datetime(2020, 1, 1).isoformat(), datetime.datetime.strptime('2020', '%Y')",
        "logging.basicConfig(format='%(asctime)s %(message)s'), logging.warning('hello')",
    ],
)
def test_time_that_is_no_current_date_is_shared(point: PointOf, call: str) -> None:
    assert point(f"{IMPORTS}{call}\n{END}") == "script.py:5 (reads RANK)"


def test_time_that_is_made_a_date_later_is_read_anew_in_every_cycle(point: PointOf) -> None:
    """A fork at the conversion would be too late: all cycles would keep the time of the first."""
    text = f"{IMPORTS}now = time.time()\nNAME = Date.fromtimestamp(now).isoformat()\n"
    assert point(text + END) == "script.py:3 (reads the clock (time.time))"
    measures = f"{IMPORTS}began = time.time()\ndef name():\n    return time.ctime(began)\n"
    assert point(measures + END) == "script.py:7 (reads RANK)"


def test_date_that_a_library_reads_ends_the_shared_part_if_a_user_calls_it(point: PointOf) -> None:
    text = "from datetime import datetime\ndef name():\n    return datetime.now()\nLOADED = name()\n"
    assert point(f"import lib_a\n{END}", lib_a=text) == "script.py:3 (reads RANK)"
    assert point(f"import lib_a\nlib_a.name()\n{END}", lib_a=text) == "script.py:2 (reads the clock (datetime.now))"


@pytest.mark.parametrize(
    "call",
    [
        "tempfile.mkdtemp()",
        "tempfile.mkstemp()",
        "tempfile.mktemp()",
        "tempfile.TemporaryDirectory()",
        "tempfile.NamedTemporaryFile()",
        "tempfile.TemporaryFile()",
        "tempfile.SpooledTemporaryFile()",
        "taken()",
    ],
)
def test_temporary_file_ends_the_shared_part_wherever_it_is_made(point: PointOf, call: str) -> None:
    text = f"import tempfile\nfrom tempfile import mkdtemp as taken\nKEPT = {call}\n"
    assert point(f"import lib_a\n{END}", lib_a=text) == f"script.py:1 ({TEMPORARY})"
    assert point(f"import part\n{END}", part=text) == f"part.py:3 ({TEMPORARY})"


def test_temporary_directory_of_filelocks_import_is_shared(point: PointOf) -> None:
    probe = "import tempfile\nwith tempfile.TemporaryDirectory() as path:\n    assert path\n"
    text = f"exec(compile({probe!r}, __file__, 'exec'), {{'__name__': 'NAME'}})\n"
    assert point(f"import lib_a\n{END}", lib_a=text.replace("NAME", "filelock._strict")) == "script.py:3 (reads RANK)"
    assert point(f"import lib_a\n{END}", lib_a=text.replace("NAME", "filelock._other")) == f"script.py:1 ({TEMPORARY})"


def test_directory_for_temporary_files_is_shared(point: PointOf) -> None:
    text = "import tempfile\nWHERE = tempfile.gettempdir(), tempfile.gettempprefix()\n"
    assert point(f"import part, lib_a\n{END}", part=text, lib_a=text) == "script.py:3 (reads RANK)"


@pytest.mark.parametrize(
    "read",
    [
        "{k.lower(): v for k, v in os.environ.items()}",
        "list(os.environ.values())",
        "dict(os.environ)",
        "dict(**os.environ)",
        "{**os.environ}",
        "{k: os.environ[k] for k in os.environ}",
        "os.environ | {}",
        "dict(os.environb)",
        "repr(os.environ)",
        "json.dumps(dict(os.environ))",
        "configparser.ConfigParser(os.environ, interpolation=None)",
    ],
)
def test_library_that_goes_over_all_variables_at_import_is_where_ranks_are_forked(point: PointOf, read: str) -> None:
    text = f"import configparser, json, os\nKEPT = {read}\n"
    assert point(f"import lib_a\n{END}", lib_a=text) == "script.py:1 (reads all of os.environ, in lib_a)"


@pytest.mark.parametrize("read", ["os.environ.copy()", "copy.deepcopy(os.environ)", "os.environb.copy()"])
def test_library_that_copies_all_variables_at_import_is_where_ranks_are_forked(point: PointOf, read: str) -> None:
    text = f"import copy, os\nKEPT = {read}\n"
    assert point(f"import lib_a\n{END}", lib_a=text) == "script.py:1 (copies os.environ, in lib_a)"


@pytest.mark.parametrize(
    "name", ["tqdm", "networkx", "fsspec", "numba.core.config", "dask.config", "wsgiref.handlers", "urllib.request"]
)
def test_library_that_keeps_only_variables_of_its_own_is_shared(point: PointOf, name: str) -> None:
    pytest.importorskip(name)
    assert point(f"import {name}, os\nlen(sys.modules) if 0 else None\n{END}") == "script.py:4 (reads RANK)"


def test_users_module_that_is_called_like_such_a_library_is_the_users(point: PointOf) -> None:
    assert point(f"import tqdm\n{END}", tqdm="import os\nKEPT = dict(os.environ)\n") == (
        "tqdm.py:2 (reads all of os.environ)"
    )


def test_number_of_variables_is_shared_if_a_library_asks(point: PointOf) -> None:
    assert point(f"import lib_a\n{END}", lib_a="import os\nlen(os.environ)\n") == "script.py:3 (reads RANK)"


def test_variable_that_a_users_file_asks_c_for_ends_the_shared_part(point: PointOf) -> None:
    assert point(f"import ctypes\nctypes.CDLL(None).getenv(b'RANK')\n{END}") == (
        "script.py:2 (calls getenv of a C library)"
    )


@pytest.mark.parametrize(
    ("look", "is_read"),
    [
        ("os.path.getmtime(data)", True),
        ("os.stat(data).st_mtime", True),
        ("Path(data).stat().st_mtime", True),
        ("os.path.exists(data), os.path.isdir(data)", False),
        ("Path(data).exists(), Path(data).is_dir()", False),
    ],
)
def test_time_of_a_directory_is_read_like_a_list_of_its_files(point: PointOf, look: str, is_read: bool) -> None:
    data, script = point.own / "data", point.own / "script.py"
    data.mkdir()
    script.write_text(f"import os\nfrom pathlib import Path\ndata = {str(data)!r}\n{look}\n{END}")
    with point.ahead(script) as (server, told):
        assert isinstance(told, ScriptReady)
        assert server.changed_file() is None
        (data / "checkpoint").touch()
        assert server.changed_file() == (str(data) if is_read else None)


@pytest.mark.parametrize("look", ["os.path.getmtime(file)", "Path(file).stat().st_mtime", "Path(file).read_text()"])
def test_file_whose_time_or_text_is_read_is_known(point: PointOf, look: str) -> None:
    file, script = point.own / "latest", point.own / "script.py"
    file.write_text("1")
    script.write_text(f"import os\nfrom pathlib import Path\nfile = {str(file)!r}\n{look}\n{END}")
    with point.ahead(script) as (server, _):
        file.write_text("2 or 3")
        assert server.changed_file() == str(file)
