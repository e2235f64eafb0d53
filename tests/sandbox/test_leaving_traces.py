"""Nothing of one execution is there in the next, though the same interpreter stands behind both."""

# ruff: noqa: E501 - an attack on one line is read as one

import os

import pytest

from penstock.workers.sandbox.execution import ProgramOutcome, Value

pytestmark = pytest.mark.real

TRACES = {
    "files": ("open('/tmp/x', 'w').write('x'); open('/dev/shm/y', 'w').write('y')", "os.listdir('/tmp')", []),
    "environment": ("os.environ['X'] = 'x'; os.putenv('Y', 'y')", "[dict(os.environ), ctypes.CDLL(None).getenv(b'Y')]", [{}, 0]),
    "builtins": ("import builtins; builtins.len = lambda x: 7", "len([])", 0),
    "modules": ("sys.modules['evil'] = sys; json.dumps = None", "['evil' in sys.modules, json.dumps(1)]", [False, "1"]),
    "working directory": ("os.mkdir('/tmp/d'); os.chdir('/tmp/d')", "os.getcwd()", "/tmp"),
    "mask": ("os.umask(0)", "os.umask(0) != 0", True),
    "priority": ("os.nice(5)", "os.nice(0)", 0),
    "limits": ("resource.setrlimit(resource.RLIMIT_NOFILE, (9, 9))", "resource.getrlimit(resource.RLIMIT_NOFILE)", [256, 256]),
    "processor": ("os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})", "len(os.sched_getaffinity(0))", len(os.sched_getaffinity(0))),
    "timers": ("signal.setitimer(signal.ITIMER_REAL, 0.05); signal.signal(signal.SIGALRM, signal.SIG_IGN)", "signal.getitimer(signal.ITIMER_REAL)", [0.0, 0.0]),
    "children": ("os.fork() or time.sleep(60)", "os.getpid()", 1),
    "descriptors": ("os.dup2(0, 50)", "os.path.exists('/proc') or [fd for fd in range(5, 300) if is_open(fd)]", []),
    "recursion": ("sys.setrecursionlimit(50000)", "sys.getrecursionlimit()", 1000),
}  # fmt: skip
PRELUDE = """
import ctypes, json, os, resource, signal, sys, time
def is_open(fd):
    try: return bool(os.fstat(fd))
    except OSError: return False
"""


@pytest.mark.parametrize("name", TRACES)
def test_the_next_one_finds_everything_as_new(fence, name):
    leave, look, new = TRACES[name]
    for _ in range(2):
        outcome = fence.run_python(f"{PRELUDE}\n{leave}\nprint('left')")
        assert outcome.stdout.startswith("left"), outcome
        assert fence.call(f"{PRELUDE}\ndef look(): return {look}", "look", [[]]) == [Value(new)]


SEARCH = """
import ctypes
libc = ctypes.CDLL(None)
libc.sbrk.restype = ctypes.c_void_p
def search(first, second):
    # How often both halves stand side by side: never put together here, or the search would find itself.
    first, second = first.encode(), second.encode()
    found = pages = 0
    for start in {libc.sbrk(0), id(libc), id(search), id([]), id("a" + first.decode()), ctypes.addressof(ctypes.c_int())}:
        page = start & ~4095
        for step in (-4096, 4096):
            place = page if step > 0 else page - 4096
            while libc.mincore(ctypes.c_void_p(place), ctypes.c_size_t(4096), (ctypes.c_char * 1)()) == 0:
                text = ctypes.string_at(place, 4096)
                pages += 1
                at = text.find(first)
                while at >= 0:
                    end = at + len(first)
                    found += text[end : end + len(second)] == second
                    at = text.find(first, end)
                place += step
                if abs(place - page) > 64 << 20: break
    return [found, pages]
"""


def test_the_memory_of_the_next_one_holds_nothing_of_the_last(fence):
    """The keeper, whose copy each execution begins as, has read neither code nor input nor output."""
    source = "kept = 'MARK-a8f1-' + str(6 * 7)\nprint(kept * 1000)\ndef solve(x): return [x, kept]"
    for _ in range(5):
        fence.call(source, "solve", [["MARK-a8f1-42"] * 1] * 50)
        fence.run_python(source, "MARK-a8f1-42")
    result = fence.call(SEARCH, "search", [["MARK-a8", "f1-42"]])[0]
    assert isinstance(result, Value), result
    found, pages = result.data
    assert found == 0
    assert pages > 100
    (seen,) = fence.call(
        SEARCH + "\nkept = [chr(77) + 'ARK-a8' + 'f1-42' + str(n) for n in range(9)]", "search", [["MARK-a8", "f1-42"]]
    )
    assert isinstance(seen, Value)
    assert seen.data[0] > 0, "the search would not find what is there"


def test_random_numbers_differ_from_run_to_run(fence):
    """An interpreter that had loaded `random` would hand the same state to each fork."""
    seen = {fence.run_python("import random, os\nprint(random.random(), os.urandom(8))").stdout for _ in range(4)}
    assert len(seen) == 4


def test_programs_run_as_programs_do(fence):
    ran = fence.run_python("import sys\nprint(__name__, sys.stdin.read(), input.__name__)", "typed\n")
    assert isinstance(ran, ProgramOutcome)
    assert ran.stdout == "__main__ typed\n input\n"
    assert ran.is_success
    source = "import atexit, threading, time\natexit.register(print, 'last')\nthreading.Thread(target=lambda: (time.sleep(0.05), print('thread'))).start()\nprint('main')"
    assert fence.run_python(source).stdout == "main\nthread\nlast\n"
    assert "line 2" in fence.run_python("x = 1\nx / 0").stderr
    assert fence.run_python("import sys\nsys.exit('why')").stderr == "why\n"
    assert fence.run_python(b"\xff\xfe".decode("latin1")).exit_code == 1
    assert fence.run_python("print(\ud800)").exit_code == 1
    assert fence.run_python("print(1)\0").exit_code == 1
    assert (
        fence.run_python("import sys\nsys.stdout.buffer.write(sys.stdin.buffer.read())", b"\xff\x00a").stdout
        == "\ufffd\0a"
    )
    assert fence.run_python("import asyncio\nasync def main(): print(7)\nasyncio.run(main())").stdout == "7\n"
    assert (
        fence.run_python("import subprocess\nprint(subprocess.run(['echo', 'hi'], capture_output=True).stdout)").stdout
        == "b'hi\\n'\n"
    )
    pool = "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(4) as p: print(sum(p.map(abs, range(9))))"
    assert fence.run_python(pool).stdout == "36\n"
