"""``lightning.pytorch`` and ``pytorch_lightning``: either, whichever is used, and a word if there is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

IMPORT = "from megatron_ft.integrations.lightning import FaultToleranceCallback, FaultToleranceSectionsCallback"
BASES = """
bases = [c.__module__ for c in FaultToleranceSectionsCallback.__mro__ if c.__name__ == "Callback"]
print(bases, [name for name in ("lightning", "pytorch_lightning") if name in sys.modules])
"""


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A directory for packages of these names, found before any that is installed."""
    return tmp_path


def install(packages: Path, name: str) -> None:
    package = packages.joinpath(*name.split("."))
    package.mkdir(parents=True)
    if "." in name:
        (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text("class Callback: pass\n")


def test_lightning_package_that_cannot_be_imported_is_left_out(packages: Path) -> None:
    install(packages, "lightning.pytorch")
    (packages / "lightning" / "pytorch" / "__init__.py").write_text("import not_there")
    install(packages, "pytorch_lightning")
    assert run(packages, IMPORT, BASES).stdout.startswith("['pytorch_lightning']")


def run(packages: Path, *lines: str, without: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    head = ["import sys", f"sys.path.insert(0, {str(packages)!r})", *(f"sys.modules[{n!r}] = None" for n in without)]
    script = "\n".join([*head, *lines])
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("first", "bases"),
    [
        ("", "['lightning.pytorch', 'pytorch_lightning'] ['lightning', 'pytorch_lightning']"),
        ("import lightning.pytorch", "['lightning.pytorch'] ['lightning']"),
        ("import pytorch_lightning", "['pytorch_lightning'] ['pytorch_lightning']"),
        (
            "import pytorch_lightning, lightning.pytorch",
            "['lightning.pytorch', 'pytorch_lightning'] ['lightning', 'pytorch_lightning']",
        ),
    ],
)
def test_lightning_package_that_the_script_imported_first_is_served(packages: Path, first: str, bases: str) -> None:
    """The one that the script has imported; both if it is too early to know."""
    install(packages, "lightning.pytorch")
    install(packages, "pytorch_lightning")
    done = run(packages, first, IMPORT, BASES)
    assert done.stdout.strip() == bases, done.stderr


@pytest.mark.parametrize("name", ["lightning.pytorch", "pytorch_lightning"])
def test_lightning_package_installed_alone_is_served(packages: Path, name: str) -> None:
    install(packages, name)
    other = ({"lightning", "pytorch_lightning"} - {name.split(".")[0]}).pop()
    done = run(packages, IMPORT, BASES.replace("sys.modules]", "sys.modules and sys.modules[name]]"), without=(other,))
    assert done.stdout.strip() == f"['{name}'] ['{name.split('.')[0]}']", done.stderr


def test_import_without_lightning_names_the_extra_to_install(packages: Path) -> None:
    done = run(packages, IMPORT, without=("lightning", "pytorch_lightning"))
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: ")
    assert "pip install 'megatron_ft[lightning]'" in last


def test_real_trainer_takes_a_single_callback(packages: Path) -> None:
    package = "lightning.pytorch"
    pytest.importorskip(package, reason="the extra megatron_ft[lightning] isn't installed")
    done = run(
        packages,
        IMPORT,  # before the trainer's package: ours can't know yet which it will be
        f"from {package} import Trainer, Callback",
        "callback = FaultToleranceSectionsCallback(autoresume=False, calculate_timeouts=False)",
        "trainer = Trainer(accelerator='cpu', logger=False, callbacks=callback, enable_checkpointing=False)",
        "print(isinstance(callback, Callback), callback in trainer.callbacks, callback.state_key)",
    )
    assert done.stdout.strip() == "True True FaultToleranceSectionsCallback", done.stderr
