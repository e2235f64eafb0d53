"""What an engine's processes print goes where it went before, and its end into the error that tells of their death."""

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.workers.rollout.engine_output import (
    MAX_LINE_CHARS,
    SHOWN_LINES,
    TAIL_BYTES,
    EngineOutput,
    failure_message,
    find_cause,
)

ABOVE = "Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}"


def printed(script: str, *, timeout_s: float = 60) -> int:
    return subprocess.run([sys.executable, "-c", script], timeout=timeout_s).returncode


@pytest.mark.real
def test_what_a_dead_process_printed_is_kept_and_passed_on(capfd: pytest.CaptureFixture[str]) -> None:
    output = EngineOutput()
    with output.captured():
        assert printed("import os, sys; print('one', flush=True); print('two', file=sys.stderr); os._exit(3)") == 3
    assert output.tail() == "one\ntwo\n"  # which waits until it is passed on
    print("three", file=sys.stderr)
    assert capfd.readouterr().err == "one\ntwo\nthree\n"


@pytest.mark.real
def test_a_process_that_lives_on_is_heard_after_the_start(capfd: pytest.CaptureFixture[str]) -> None:
    output = EngineOutput()
    script = "import sys\nfor line in sys.stdin: print('heard', line, end='', flush=True)"
    with output.captured():
        process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, text=True)
    process.communicate("late\n", timeout=900)
    assert output.tail() == "heard late\n"
    print("to the terminal")
    assert capfd.readouterr().out == "to the terminal\n"


@pytest.mark.real
def test_the_tail_is_bounded_and_no_process_waits_for_a_reader(tmp_path: Path) -> None:
    output = EngineOutput()
    with output.captured():
        assert printed(f"for i in range({TAIL_BYTES // 4}): print(i, 'x' * 40)") == 0
    tail = output.tail()
    assert len(tail) == TAIL_BYTES
    assert tail.splitlines()[-1].startswith(f"{TAIL_BYTES // 4 - 1} ")


def test_a_start_that_fails_leaves_the_output_as_it_was(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError), EngineOutput().captured():
        raise RuntimeError("no engine")
    print("here")
    assert capfd.readouterr().out == "here\n"


LOG = """\
(EngineCore pid=31) INFO 11-22 03:00:01 [cpu_worker.py:80] starting
(EngineCore pid=31) ERROR 11-22 03:00:02 [core.py:1203] EngineCore failed to start.
(EngineCore pid=31) ERROR 11-22 03:00:02 [core.py:1203] Traceback (most recent call last):
(EngineCore pid=31) ERROR 11-22 03:00:02 [core.py:1203]   File "core.py", line 1, in __init__
(EngineCore pid=31) ERROR 11-22 03:00:02 [core.py:1203] ValueError: To serve at least one request more memory is needed.
(EngineCore pid=31) Process EngineCore:
(EngineCore pid=31) Traceback (most recent call last):
(EngineCore pid=31) ValueError: To serve at least one request more memory is needed.
"""
WORKERS = """\
(Worker pid=40) ERROR 11-22 03:00:02 [multiproc_executor.py:700] torch.cuda.OutOfMemoryError: CUDA out of memory.
(EngineCore pid=31) ERROR 11-22 03:00:02 [core.py:1203] Exception: WorkerProc initialization failed due to an \
exception in a background process. See stack trace for root cause.
"""


@pytest.mark.parametrize(
    ("output", "cause"),
    [
        (LOG, "ValueError: To serve at least one request more memory is needed."),
        (WORKERS, "torch.cuda.OutOfMemoryError: CUDA out of memory."),
    ],
)
def test_the_cause_is_found_in_the_engines_own_words(output: str, cause: str) -> None:
    told = failure_message(ABOVE, output)
    assert told.splitlines()[0] == cause
    assert told.splitlines()[1] == "The end of its output:"
    assert "pid=" not in told
    assert told.endswith(ABOVE)


def test_a_process_that_was_killed_is_told_by_its_last_lines() -> None:
    told = failure_message("EngineCore encountered an issue. See stack trace (above) for the root cause.", "a\n\nb\n")
    assert told.startswith("it ended without saying why\nThe end of its output:\n  a\n  b\n")
    assert failure_message(ABOVE, "").startswith("it ended without saying why (Engine core")
    assert failure_message(ABOVE, "a", "killed by SIGKILL").startswith("its process ended: killed by SIGKILL\n")


def test_a_reason_that_needs_no_output_is_told_alone() -> None:
    assert failure_message("max_model_len is too large", "loading\n100%\n") == "max_model_len is too large"


def test_lines_are_few_and_short() -> None:
    told = failure_message(ABOVE, "\n".join("y" * 5000 for _ in range(100)) + "\nKeyError: 'x'")
    lines = told.splitlines()
    assert len(lines) == 3 + SHOWN_LINES
    assert all(len(line) <= MAX_LINE_CHARS + 2 for line in lines)


def test_text_that_only_mentions_an_error_is_no_cause() -> None:
    assert find_cause(["see RuntimeError: in the manual", "0 errors", "Exception ignored in: <function>"]) is None
    assert find_cause(["a.b.MyError: first", "KeyError: 'second'", "RuntimeError: See root cause above."]) == (
        "KeyError: 'second'"
    )
