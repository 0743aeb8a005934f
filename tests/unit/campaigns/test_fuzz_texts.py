"""What people and crashes leave in files and on command lines: whatever it is, one line at most, never a traceback.

`make fuzz` runs these with many more examples.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
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
ARGUMENTS = (
    "1",
    "0",
    "-1",
    "1:2",
    "2:1",
    "x",
    "",
    "nan",
    "inf",
    "1e999",
    "9" * 400,
    "\ud800",
    "a\nb",
    "step:1",
    "🙂",
    "--",
)
JSONS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@contextlib.contextmanager
def file_with(content: bytes, name: str) -> Iterator[str]:
    """Such a file, in a directory of its own."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, name)
        path.write_bytes(content)
        yield str(path)


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


@settings(max_examples=MANY)
@given(damaged(YAMLS) | st.binary(max_size=60))
def test_yaml_of_any_content_is_a_configuration_or_one_line(content: bytes) -> None:
    with file_with(content, "ft.yaml") as path:
        try:
            config = FaultToleranceConfig.from_yaml_file(path)
        except ConfigError as error:
            one_line(str(error).replace(path, "ft.yaml"))
        else:
            json.dumps(config.to_dict(), allow_nan=False)


@settings(max_examples=MANY)
@given(st.dictionaries(st.sampled_from(sorted(FIELDS)) | st.text(max_size=6), JSONS, max_size=4))
def test_configuration_of_any_values_is_taken_or_refused_in_one_line(values: dict[str, object]) -> None:
    try:
        config = FaultToleranceConfig(**values)  # type: ignore[arg-type]
    except ConfigError as error:
        one_line(str(error))
    except TypeError:
        assert not values.keys() <= FIELDS.keys()  # Python's own: there is no such field
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


class TestLogs:
    @pytest.fixture(scope="class")
    @staticmethod
    def logs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
        directory = tmp_path_factory.mktemp("logs")
        faults = (Fault(cycle=0, rank=1, iteration=4),)
        write_job(directory, GeneratedJob(ranks=2, steps=6, checkpoint_every=3, faults=faults))
        return {path.name: path.read_bytes() for path in sorted(directory.glob("*.jsonl"))}

    @settings(max_examples=FEW)
    @given(seed=st.integers(0, 2**32), as_json=st.booleans())
    def test_report_of_any_directory_ends_with_a_code_and_at_most_one_line(
        self, logs: dict[str, bytes], seed: int, as_json: bool
    ) -> None:
        rng = random.Random(seed)
        with tempfile.TemporaryDirectory() as directory:
            for name, content in logs.items():
                Path(directory, name).write_bytes(spoilt(content, rng))
            if rng.random() < 0.2:
                Path(directory, "noise.jsonl").write_bytes(rng.randbytes(200))
            if rng.random() < 0.1:
                os.mkdir(Path(directory, "folder.jsonl"))
            out, err = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = main.main(["report", directory, *(["--json"] if as_json else [])])
            assert code in (0, 1), err.getvalue()
            assert len(err.getvalue().splitlines()) == (0 if code == 0 else 1), err.getvalue()
            assert "Traceback" not in out.getvalue() + err.getvalue()
            if as_json and code == 0:
                json.loads(out.getvalue())


def spoilt(content: bytes, rng: random.Random) -> bytes:
    """A log with cut lines, random bytes, and values of other types and of any size."""
    lines = content.splitlines()
    for _ in range(rng.choice((0, 1, 3, 10))):
        at = rng.randrange(len(lines))
        kind = rng.randrange(5)
        if kind == 0:
            lines[at] = lines[at][: rng.randrange(len(lines[at]) + 1)]
        elif kind == 1:
            lines[at] = rng.randbytes(rng.randrange(1, 60)).replace(b"\n", b"")
        elif kind == 2:
            lines.insert(at, lines[rng.randrange(len(lines))])
        elif kind == 3:
            del lines[at]
            lines = lines or [b"{}"]
        else:
            lines[at] = _other_values(lines[at], rng)
    return b"\n".join(lines) + rng.choice((b"\n", b"", b"\n{", b"\x00" * 100))


def _other_values(line: bytes, rng: random.Random) -> bytes:
    try:
        record = json.loads(line)
    except ValueError:
        return line
    if not isinstance(record, dict) or not record:
        return line
    odd = (
        None,
        True,
        -1,
        0,
        2**63,
        -(2**80),
        10**400,
        1e308,
        float("nan"),
        "",
        "\ud800",
        "x" * 300,
        [],
        {},
        [[[]]],
        [{}],
    )
    for _ in range(rng.randrange(1, 4)):
        name = rng.choice(list(record))
        value = record[name]
        if isinstance(value, list) and value and rng.random() < 0.7:
            value[rng.randrange(len(value))] = copy.deepcopy(rng.choice(odd))
        elif isinstance(value, int) and rng.random() < 0.5:
            record[name] = value + rng.choice((-(10**12), 10**12, 1, -1, 10**17, -(10**17)))
        else:
            record[name] = copy.deepcopy(rng.choice(odd))
    return json.dumps(record).encode()
