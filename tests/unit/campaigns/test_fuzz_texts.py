"""What people and crashes leave in files and on command lines: whatever it is, one line at most, never a traceback.

`make fuzz` runs these with many more examples.
"""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_ft.cli import main
from megatron_ft.config.config import FIELDS
from megatron_ft.config.files.yaml_file import FaultToleranceConfig
from megatron_ft.errors import ConfigError
from megatron_ft.launcher import arguments
from tests import ROOT
from tests.support.generated_logs import Fault, GeneratedJob, write_job

FEW, MANY = max(10, settings().max_examples // 4), settings().max_examples
YAMLS = [path.read_bytes() for path in sorted((ROOT / "megatron_ft" / "configs").glob("*.yaml"))]
VALUES = ("600", "-1", "0", ".nan", ".inf", "1e400", "null", "true", "[]", "{}", "'x'", "SIGTERM", "a:1", "9" * 5000)
ODD_BYTES = (b"\x00", b"\xff", b"\xe2\x80\xa8", b"\t", b"&a ", b"*a", b"<<: ", b"!!python/name:os.system ", b"{", b"- ")
OPTIONS = (
    *("--nproc-per-node", "--nnodes", "--max-restarts", "--rdzv-backend", "--rdzv-conf", "--rdzv-endpoint"),
    *("--ft-cfg-path", "--ft-log-dir", "--ft-segment", "--ft-restart-policy", "--term-timeout", "--no-python"),
    *("--signals-to-handle", "--ft-observe-only", "--ft-preload", "--standalone", "--ft-nonsense", "-m", "--node-rank"),
    *(f"--ft-{name}" for name in FIELDS),
)
ARGUMENTS = (*VALUES, "1:2", "2:1", "", "\ud800", "a\nb", "step:1", "🙂", "--")
JSONS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@st.composite
def damaged(draw: st.DrawFn, originals: list[bytes]) -> bytes:
    """One of them, cut, spliced and with odd bytes in it."""
    data = bytearray(draw(st.sampled_from(originals)))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        kind = draw(st.integers(0, 3))
        if kind == 0:
            del data[at : at + draw(st.integers(1, 40))]
        elif kind == 1:
            data[at:at] = draw(st.sampled_from(ODD_BYTES) | st.binary(max_size=6))
        elif kind == 2:
            data[at : at + 4] = draw(st.sampled_from(VALUES)).encode()
        else:
            other = draw(st.sampled_from(originals))
            data[at:] = other[draw(st.integers(0, len(other))) :]
    return bytes(data)


def one_line(text: str) -> None:
    assert text.strip()
    assert len(text.splitlines()) == 1, text
    assert len(text) < 2000, len(text)


CONFIGURATIONS = st.dictionaries(st.sampled_from(sorted(FIELDS)) | st.text(max_size=6), JSONS, max_size=4)


@settings(max_examples=2 * MANY)
@given(
    damaged(YAMLS)
    | st.binary(max_size=60)
    | CONFIGURATIONS.map(lambda fields: json.dumps({"fault_tolerance": fields}).encode())
)
def test_yaml_of_any_content_is_a_configuration_or_one_line(content: bytes) -> None:
    with tempfile.NamedTemporaryFile(suffix=".yaml") as file:
        file.write(content)
        file.flush()
        try:
            config = FaultToleranceConfig.from_yaml_file(file.name)
        except ConfigError as error:
            one_line(str(error))
        else:
            json.dumps(config.to_dict(), allow_nan=False)


@settings(max_examples=MANY)
@given(st.lists(st.sampled_from(OPTIONS) | st.sampled_from(ARGUMENTS) | st.text(max_size=5), max_size=6))
def test_command_line_of_any_words_is_read_or_refused_in_one_line(words: list[str]) -> None:
    try:
        line = arguments.parse([*words, __file__])
    except ConfigError as error:
        one_line(str(error))
    except SystemExit:
        assert {"-h", "--help"} & set(words)
    else:
        assert line.min_nodes <= line.max_nodes


@st.composite
def damaged_log(draw: st.DrawFn, content: bytes) -> bytes:
    """A log with cut lines, odd bytes, and values of other types and of any size."""
    lines = draw(st.just(content) | damaged([content])).splitlines()
    for _ in range(draw(st.integers(0, 3)) if lines else 0):
        at = draw(st.integers(0, len(lines) - 1))
        with contextlib.suppress(ValueError):
            record = json.loads(lines[at])
            if isinstance(record, dict) and record:
                name = draw(st.sampled_from(sorted(record)))
                record[name] = draw(JSONS | st.integers(-(10**19), 10**19).map(partial(_plus, record[name])))
                lines[at] = json.dumps(record).encode()
    return b"\n".join(lines) + draw(st.sampled_from((b"\n", b"", b"\n{", b"\x00" * 100)))


def _plus(value: object, by: int) -> object:
    """Return a number that is off, or a list with something odd in it."""
    return value + by if isinstance(value, int) else [*value, by] if isinstance(value, list) else by


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    directory = tmp_path_factory.mktemp("logs")
    faults = (Fault(cycle=0, rank=1, iteration=4),)
    write_job(directory, GeneratedJob(ranks=2, steps=6, checkpoint_every=3, faults=faults))
    return {path.name: path.read_bytes() for path in sorted(directory.glob("*.jsonl"))}


@settings(max_examples=FEW, suppress_health_check=[HealthCheck.too_slow])  # it draws whole logs
@given(st.data(), st.booleans())
def test_report_of_any_directory_ends_with_a_code_and_at_most_one_line(
    logs: dict[str, bytes], data: st.DataObject, as_json: bool
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        for name, content in logs.items():
            Path(directory, name).write_bytes(data.draw(damaged_log(content)))
        if data.draw(st.booleans()):
            Path(directory, "noise.jsonl").write_bytes(data.draw(st.binary(max_size=60)))
            Path(directory, "folder.jsonl").mkdir()
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main.main(["report", directory, *(["--json"] if as_json else [])])
        assert code in (0, 1), err.getvalue()
        assert len(err.getvalue().splitlines()) == (0 if code == 0 else 1), err.getvalue()
        assert "Traceback" not in out.getvalue() + err.getvalue()
        if as_json and code == 0:
            json.loads(out.getvalue())
