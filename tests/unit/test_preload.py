"""Which modules are imported once for all ranks, and when a rank must be a fresh interpreter."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
import warnings
from pathlib import Path

import pytest

from megatron_ft.core.errors import ConfigError
from megatron_ft.core.preload import (
    LearnedImport,
    RankCommand,
    differing_variables,
    hidden_modules,
    may_be_preloaded,
    parse_preload,
    read_command,
    to_preload,
    without,
)
from megatron_ft.launcher.first_server import omp_threads_to_set
from megatron_ft.rank import preloading
from megatron_ft.rank.import_recorder import ImportRecorder
from megatron_ft.rank.preloading import Wanted, import_all

ROOTS = ["/python/lib/", "/venv/site-packages/"]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (None, ()),
        ("", ()),
        ("none", None),
        (" None ", None),
        ("torch", ("torch",)),
        ("a, b.c ,a", ("a", "b.c")),
    ],
)
def test_parse(text: str | None, names: tuple[str, ...] | None) -> None:
    assert parse_preload(text) == names


@pytest.mark.parametrize("text", ["a,,b", "a b", "1x", "a.", "./train.py", "a;b"])
def test_parse_refuses(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--ft-preload: .* is no name of a module"):
        parse_preload(text)


def test_commands_of_torch() -> None:
    assert read_command(["py", "-u", "train.py", "--lr", "1"], "py") == RankCommand("train.py", False, ("--lr", "1"))
    assert read_command(["py", "-u", "-m", "pkg.train", "-x"], "py") == RankCommand("pkg.train", True, ("-x",))
    for argv in (
        ["numactl", "-N", "0", "py", "-u", "t.py"],
        ["py", "t.py"],
        ["py", "-u", "-"],
        ["py", "-u", "-c", "1"],
    ):
        assert isinstance(read_command(argv, "py"), str)


def test_variables_that_are_read_at_import() -> None:
    server = {"OMP_NUM_THREADS": "1", "HOME": "/a", "TORCH_NCCL_BLOCKING_WAIT": "0", "LD_PRELOAD": "x"}
    rank = {"OMP_NUM_THREADS": "8", "HOME": "/b", "RANK": "3", "TORCHELASTIC_RUN_ID": "r", "TORCH_LOGS": "all"}
    assert differing_variables(server, rank) == ["LD_PRELOAD", "OMP_NUM_THREADS", "TORCH_LOGS"]
    assert differing_variables(server, {**server, "HOME": "/b"}) == []


def test_files_that_hide_a_module() -> None:
    assert hidden_modules(["train", "queue", "utils"], {"queue", "torch", "os"}) == ["queue"]
    assert hidden_modules(["train"], {"queue"}) == []


@pytest.mark.parametrize(
    ("name", "origin", "allowed"),
    [
        ("megatron.core", "/venv/site-packages/megatron/core/__init__.py", True),
        ("json", "/python/lib/json/__init__.py", True),
        ("megatron.core", "/home/me/Megatron-LM/megatron/core/__init__.py", False),
        ("mine", "/home/me/mine.py", False),
        ("mine", "/venv/site-packages-of-mine/mine.py", False),
        ("__main__", "/venv/site-packages/x/__main__.py", False),
        ("megatron_ft.rank.client", "/home/me/megatron_ft/rank/client.py", True),
    ],
)
def test_only_what_is_installed_is_preloaded(name: str, origin: str, allowed: bool) -> None:
    assert may_be_preloaded(LearnedImport(name, origin), ROOTS) is allowed


def test_the_order_of_imports_stays_and_what_was_dropped_goes() -> None:
    modules = [LearnedImport(name, f"/venv/site-packages/{name}.py") for name in ("b", "a", "a.x", "ab", "c.d", "c.e")]
    found = to_preload(modules, roots=ROOTS, dropped={"a", "c.d"})
    assert [module.name for module in found] == ["b", "ab", "c.e"]


@pytest.mark.parametrize(
    ("culprit", "asked_for", "name"),
    [
        ("lightning.fabric.x", [], "lightning"),
        ("lightning", [], "lightning"),
        ("torch._inductor.x", [], "torch._inductor.x"),
        ("a.b", ["a.b"], "a.b"),
        ("a.b.c", ["a.x"], "a.b.c"),
    ],
)
def test_what_is_left_out_for_a_culprit(culprit: str, asked_for: list[str], name: str) -> None:
    assert without(culprit, asked_for) == name


@pytest.mark.parametrize(
    ("argv", "environ", "threads"),
    [
        (["train.py"], {}, None),
        (["--nproc-per-node=2", "train.py"], {}, "1"),
        (["--nproc_per_node", "8", "train.py"], {}, "1"),
        (["--nproc-per-node", "gpu", "train.py"], {}, "1"),
        (["--nproc-per-node=1", "train.py"], {}, None),
        (["train.py", "--nproc-per-node=2"], {}, None),
        (["train.py"], {"PET_NPROC_PER_NODE": "4"}, "1"),
        (["--nproc-per-node=2", "train.py"], {"OMP_NUM_THREADS": "3"}, None),
    ],
)
def test_the_number_of_threads_that_torchrun_will_set(
    argv: list[str], environ: dict[str, str], threads: str | None
) -> None:
    assert omp_threads_to_set(argv, environ) == threads


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(preloading, "why_unfit", lambda: None)  # what runs the tests may have threads
    return tmp_path


def test_imports_stop_at_the_first_module_that_spoils(path: Path) -> None:
    (path / "fine_a.py").write_text("")
    (path / "fails_b.py").write_text("import nothing_of_that_name")
    (path / "reads_c.py").write_text("import os\nLOCAL = os.environ.get('LOCAL_RANK')")
    (path / "fine_d.py").write_text("")
    begun: list[str] = []
    result = import_all([Wanted(name) for name in ("fine_a", "fails_b", "reads_c", "fine_d")], begun.append)
    assert begun == ["fine_a", "fails_b", "reads_c"]
    assert result.imported == 1
    assert result.failed == {"fails_b": "ModuleNotFoundError: No module named 'nothing_of_that_name'"}
    assert (result.spoiled_by, result.reason) == ("reads_c", "it reads LOCAL_RANK while it is imported")
    assert type(os.environ).__name__ == "_Environ", "nobody watches any more"


def test_a_module_from_another_file_spoils(path: Path) -> None:
    (path / "shadowed_e.py").write_text("")
    result = import_all([Wanted("shadowed_e", "/elsewhere/shadowed_e.py")], lambda _name: None)
    assert result.spoiled_by == "shadowed_e"
    assert "the ranks import shadowed_e from /elsewhere/shadowed_e.py" in result.reason


def test_what_a_module_imports_must_come_from_where_the_ranks_have_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkout that the script puts before the installed package is what the ranks import, and not preloaded."""
    monkeypatch.setattr(preloading, "installed_roots", lambda: [f"{path}/"])
    (path / "library_i.py").write_text("")
    (path / "plugin_i.py").write_text("import library_i")
    plugin = Wanted("plugin_i", str(path / "plugin_i.py"))
    result = import_all([plugin], lambda _name: None, {"library_i": "/home/me/checkout/library_i.py"})
    assert result.spoiled_by == "plugin_i"
    assert "the ranks import library_i from /home/me/checkout/library_i.py" in result.reason


def test_an_installed_module_that_imports_the_users_files_spoils(path: Path) -> None:
    (path / "mine_j.py").write_text("")
    (path / "plugin_j.py").write_text("import mine_j")
    result = import_all([Wanted("plugin_j", str(path / "plugin_j.py"))], lambda _name: None)
    assert result.spoiled_by == "plugin_j"
    assert "which isn't installed" in result.reason


def test_a_module_that_keeps_a_file_open_spoils(path: Path) -> None:
    (path / "opens_k.py").write_text("FILE = open(__file__)")
    result = import_all([Wanted("opens_k")], lambda _name: None)
    sys.modules.pop("opens_k")
    assert (result.spoiled_by, result.reason) == ("opens_k", f"it keeps {path / 'opens_k.py'} open")


def test_the_ranks_have_heard_the_warnings_of_their_imports(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_args: shown.append(str(message)))
    monkeypatch.setattr(preloading, "installed_roots", lambda: [f"{path}/"])
    for name in ("theirs_m", "asked_for_n"):
        (path / f"{name}.py").write_text(
            f"import warnings\nwarnings.warn('{name} warns')\nwarnings.filterwarnings('error', 'a filter of {name}')"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        import_all([Wanted("theirs_m", str(path / "theirs_m.py")), Wanted("asked_for_n")], lambda _name: None)
        warnings.warn("a later one", stacklevel=1)
        for name in ("theirs_m", "asked_for_n"):
            with pytest.raises(UserWarning, match=name):
                warnings.warn(f"a filter of {name}", stacklevel=1)
    assert shown == ["asked_for_n warns", "a later one"]


def test_a_module_that_counts_devices_spoils(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch with CUDA refuses it to all forks from then on."""
    import torch

    def count_devices() -> int:
        return 0

    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", count_devices, raising=False)
    (path / "counts_l.py").write_text("import torch\nCOUNT = torch._C._cuda_getDeviceCount()")
    result = import_all([Wanted("counts_l")], lambda _name: None)
    assert (result.spoiled_by, result.reason) == ("counts_l", "it touched CUDA")
    assert torch._C._cuda_getDeviceCount is count_devices


def test_the_recorder_finds_what_the_others_find(path: Path) -> None:
    (path / "recorded_f.py").write_text("VALUE = 5")
    (path / "looked_for_g.py").write_text("raise SystemExit")
    read_fd, write_fd = os.pipe()
    recorder = ImportRecorder(write_fd)
    before = list(sys.meta_path)
    recorder.install()
    try:
        import recorded_f  # type: ignore[import-not-found]

        assert importlib.util.find_spec("looked_for_g") is not None
        with pytest.raises(ModuleNotFoundError):
            import recorded_g  # type: ignore[import-not-found]  # noqa: F401
        assert recorded_f.VALUE == 5
        assert recorded_f.__spec__.origin == str(path / "recorded_f.py")
    finally:
        recorder.stop()
    assert sys.meta_path == before
    assert os.read(read_fd, 10_000).decode() == f"recorded_f\t{path / 'recorded_f.py'}\n"
    os.close(read_fd)


def test_the_recorder_hurts_nobody_when_its_reader_is_gone_or_slow(path: Path) -> None:
    for number in range(3):
        (path / f"recorded_h{number}.py").write_text("")
    read_fd, write_fd = os.pipe()
    recorder = ImportRecorder(write_fd)
    recorder.install()
    try:
        while True:  # a launcher that is stopped reads nothing
            try:
                os.write(write_fd, b"x" * 4096)
            except BlockingIOError:
                break
        done = threading.Event()
        threading.Thread(target=lambda: (__import__("recorded_h0"), done.set())).start()
        assert done.wait(10)
        os.close(read_fd)
        import recorded_h2  # type: ignore[import-not-found]  # noqa: F401

        assert recorder not in sys.meta_path
    finally:
        recorder.stop()
