"""Reading stacks and last words, and picking the frame that tells."""

from __future__ import annotations

import faulthandler
import json
import os

import pytest

from megatron_ft.diagnosis.exceptions import EXCEPTION_MARK, CrashOutput, last_words, words_of_error_file
from megatron_ft.diagnosis.stacks import (
    Frame,
    main_stack,
    parse_faulthandler,
    shortened,
    user_frame,
)
from megatron_ft.rank.base.replacing import left_out_of_stacks

DUMP = """Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
  File "/usr/lib/python3.11/threading.py", line 622 in run

Current thread 0x00007f02 (most recent call first):
  File "/usr/lib/python3.11/queue.py", line 171 in get
  File "/home/u/my loader.py", line 88 in next_batch
  File "/home/u/train.py", line ??? in <module>
"""


def test_a_dump_becomes_threads_and_frames() -> None:
    worker, main = parse_faulthandler(DUMP)
    assert (worker.ident, main.ident) == (0x7F01, 0x7F02)
    assert [str(frame) for frame in main.frames] == [
        "queue.py:171 get",
        "my loader.py:88 next_batch",
        "train.py:0 <module>",
    ]
    assert main_stack([worker, main], 0x7F02) == main.frames
    assert main_stack([worker, main], 0x7F03) == ()


def test_the_frame_that_tells_is_the_user_s() -> None:
    (frames,) = (stack.frames for stack in parse_faulthandler(DUMP)[1:])
    assert str(user_frame(frames, library=["/usr/lib/python3.11"])) == "my loader.py:88 next_batch"
    assert str(user_frame(frames)) == "queue.py:171 get"
    in_package = Frame("/v/site-packages/torch/x.py", 1, "f")
    assert user_frame([in_package]) == in_package
    assert user_frame([]) is None


TRACEBACK = """Traceback (most recent call last):
  File "/home/u/train.py", line 10, in <module>
    step()
KeyError: 'x'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/home/u/train.py", line 12, in <module>
    load()
  File "/home/u/loader.py", line 5, in load
    json.loads(text)
  File "/usr/lib/python3.11/json/__init__.py", line 346, in loads
ValueError: bad
"""


def test_a_fatal_signal_tells_the_thread_that_died() -> None:
    words = last_words(f"{DUMP}Fatal Python error: Segmentation fault\n\n{DUMP}", library=["/usr/lib/python3.11"])
    assert words.where == "my loader.py:88 next_batch"
    assert words.fatal_error.startswith("Fatal Python error: Segmentation fault")
    assert words.error == ""


def test_dump_without_an_exception_has_no_last_words() -> None:
    assert last_words(DUMP) == last_words("") == CrashOutput()
    assert last_words(f"{EXCEPTION_MARK}\n").error == ""


def test_stack_has_no_frame_of_a_stand_in() -> None:
    dumps: list[str] = []

    def dump() -> None:
        fd = os.memfd_create("dump")
        faulthandler.dump_traceback(file=fd, all_threads=False)  # of all it would write a hundred only
        dumps.append(os.pread(fd, 1 << 20, 0).decode().replace("Stack", "Thread 0x7", 1))
        os.close(fd)

    left_out_of_stacks(lambda: dump())()
    frames = main_stack(parse_faulthandler(dumps[0]), 7)
    assert [frame.function for frame in frames[:2]] == ["dump", "test_stack_has_no_frame_of_a_stand_in"]


@pytest.mark.parametrize("error", ["AssertionError:", "AssertionError: ", "AssertionError: \n", "a.b.AssertionError"])
def test_exception_without_a_message_is_its_type_alone(error: str) -> None:
    expected = error.strip().rstrip(":")
    assert last_words(f"{EXCEPTION_MARK} 17\n{error}\n{TRACEBACK}").error == expected
    document = {"message": error, "extraInfo": {"timestamp": "3", "py_callstack": ""}}
    assert words_of_error_file(json.dumps({"message": document})).error == expected
    assert words_of_error_file(json.dumps({"message": error})).error == expected


@pytest.mark.parametrize(("mine", "kept"), [(3, 34), (400, 100)])
def test_deep_stack_keeps_its_innermost_calls_and_those_of_the_user(mine: int, kept: int) -> None:
    inner = [Frame("/x/site-packages/deep.py", n, "f") for n in range(200)]
    users = [Frame("/home/ann/train.py", n, "load") for n in range(mine)]
    frames = [*inner, *users, Frame("/x/site-packages/run.py", 1, "main")]
    found = shortened(frames, library=(), most=100)
    assert (len(found), found[:30], found[-1]) == (kept, tuple(inner[:30]), frames[-1])
    assert user_frame(found) == users[0]
    assert shortened(frames[:20], library=(), most=100) == tuple(frames[:20])
