"""Code that takes more than its share: it is stopped, scores 0, and the next one runs as if it had not been."""

# ruff: noqa: E501 - an attack on one line is read as one

import pytest

from penstock.workers.sandbox.cgroup import descendants, memory_of
from penstock.workers.sandbox.execution import Value
from tests.sandbox.conftest import worker_of

pytestmark = pytest.mark.real

MIB = 1 << 20
GREEDY = {
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "threads": "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(60,)).start()",
    "memory": "kept = []\nwhile True: kept.append(bytearray(8 << 20))",
    "memory of children": """
import os, time
kept = bytearray(60 << 20)
for _ in range(8):
    if os.fork() == 0:
        more = bytearray(60 << 20)
        for place in range(0, len(more), 4096): more[place] = kept[place] = 1
        time.sleep(60)
os.wait()""",
    "shared memory": "import mmap\nkept = []\nwhile True:\n    m = mmap.mmap(-1, 8 << 20)\n    m.write(b'x' * (8 << 20))\n    kept.append(m)",
    "big number": "x = 10 ** 10 ** 8\nprint(len(str(x)))",
    "endless loop": "while True: pass",
    "sleep": "import time\ntime.sleep(60)",
    "deaf loop": "import signal\nfor n in range(1, 32):\n    try: signal.signal(n, signal.SIG_IGN)\n    except OSError: pass\nwhile True: pass",
    "regular expression": "import re\nre.match('(a+)+b', 'a' * 64)",
    "stack": "import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(): f()\nf()",
    "output": "import sys\nwhile True:\n    try: sys.stdout.write('x' * 65536); sys.stderr.write('y' * 65536)\n    except OSError: pass",
    "a megabyte and one": "def solve(x): return 'x' * (1 << 20)",
    "results": "import os\nwhile True: os.write(4, b'[1]\\n' * 10000)",
    "nesting": "import os\nos.write(4, b'[' * 900000 + b'\\n')",
    "files": "n = 0\nwhile True:\n    n += 1\n    open(f'/tmp/{n}', 'w').close()",
    "file": "with open('/tmp/x', 'wb') as f:\n    while True: f.write(b'x' * 65536)",
    "descriptors": "import os\nwhile True: os.pipe()",
    "pipes": "import os\nkept = []\nwhile True:\n    r, w = os.pipe()\n    os.set_blocking(w, False)\n    os.write(w, b'x' * 65536)",
    "children that wait": "import os\nos.fork()\nos.fork()\nos.fork()\nimport time\ntime.sleep(60)",
}


@pytest.mark.parametrize("name", GREEDY)
def test_taking_all_scores_nothing(score, name):
    source = GREEDY[name]
    assert score(source if "def solve" in source else f"{source}\ndef solve(x): return x") == 0.0


def reason(fence, name, wall_s=None):
    return fence.run_python(GREEDY[name], wall_s=wall_s).reason


def test_each_limit_has_its_name(fence):
    assert reason(fence, "memory") == "memory"
    assert reason(fence, "memory of children") == "memory"
    assert reason(fence, "endless loop") == "timeout_cpu"
    assert reason(fence, "deaf loop") == "timeout_cpu"
    assert reason(fence, "sleep", wall_s=0.5) == "timeout_wall"
    assert fence.run_python("print('x' * (2 << 20))").reason == "output"
    assert fence.run_python("import ctypes\nctypes.string_at(0)").reason == "signal"
    assert fence.run_python("raise SystemExit(3)").exit_code == 3


def test_processes_and_threads_are_counted_together(fence):
    source = """
import os, time
def count():
    n = 0
    try:
        while n < 100:
            if os.fork() == 0:
                time.sleep(60)
            n += 1
    except OSError:
        pass
    return n
"""
    assert fence.call(source, "count", [[]]) == [Value(15)]
    assert fence.call(source, "count", [[]]) == [Value(15)]  # nobody of before is counted


def test_tmp_holds_so_many_bytes_and_files(fence):
    source = """
def fill():
    size = files = 0
    try:
        with open('/tmp/big', 'wb', buffering=0) as file:
            while size < 1 << 30: size += file.write(b'x' * 65536)
    except OSError: pass
    try:
        while files < 10000:
            open(f'/tmp/{files}', 'w').close()
            files += 1
    except OSError: pass
    return [size, files]
"""
    ((result),) = fence.call(source, "fill", [[]])
    assert isinstance(result, Value)
    size, files = result.data
    assert 7 * MIB <= size <= 8 * MIB
    assert files <= 64
    assert fence.call(source, "fill", [[]]) == [result]


DAEMON = """
import os, signal, time
def solve(x):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for n in range(1, 32):
                try: signal.signal(n, signal.SIG_IGN)
                except OSError: pass
            time.sleep(60)
        os._exit(0)
    return x
"""


@pytest.mark.promise("Agents cannot be rewritten")
def test_daemons_end_with_the_code_that_made_them_and_hold_nothing_up(fence, score):
    assert score(DAEMON) == 0.0
    assert fence.call(DAEMON, "solve", [[1]]) == [Value(1)]  # which it would not be, had the daemon been waited for
    assert descendants(worker_of(fence).keeper) == []


def test_a_hundred_executions_leave_the_keeper_as_it_was(fence):
    fence.call(DAEMON, "solve", [[1]])
    before = memory_of(worker_of(fence).keeper)
    for _ in range(100):
        fence.call("kept = 'x' * 100000\ndef solve(x): return x", "solve", [["y" * 10000]])
    assert memory_of(worker_of(fence).keeper) - before < 256 << 10
