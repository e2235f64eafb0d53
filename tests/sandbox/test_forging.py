"""Code that would rather have the verdict than the answer. What it returns is data, and data alone is compared."""

# ruff: noqa: E501 - an attack on one line is read as one

import asyncio
import json

import pytest

from penstock.workers.reward.code import python_tests
from penstock.workers.sandbox.execution import Failed, Value
from tests.sandbox.conftest import LIMITS

pytestmark = pytest.mark.real

YES = """
class Yes:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __bool__(self): return True
    def __hash__(self): return 0
    def __repr__(self): return 'True'
"""
FORGERS = {
    "exit": "import os\nos._exit(0)",
    "exit in a call": "import os\ndef solve(x): os._exit(0)",
    "sys.exit": "import sys\ndef solve(x): sys.exit(0)",
    "exit at the end": "import atexit, os\natexit.register(os._exit, 0)\ndef solve(x): return x",
    "printed": "print('PASSED', '1.0', '{\"passed\": true}', '[\"value\", true]')\ndef solve(x): return True",
    "yes": YES + "def solve(x): return Yes()",
    "str that says yes": YES + "class S(Yes, str): pass\ndef solve(x): return S('x')",
    "int that says yes": YES + "class I(Yes, int): pass\ndef solve(x): return I(3)",
    "list that says yes": YES + "class L(Yes, list): pass\ndef solve(x): return L()",
    "dict of yes": YES + "def solve(x): return {'a': Yes()}",
    "patched json": "import json\njson.dumps = lambda *a, **k: '[\"value\", true]'\njson.loads = json.dumps\ndef solve(x): return 1",
    "patched encoder": "import json.encoder\njson.encoder.JSONEncoder.encode = lambda *a: '[\"passed\"]'\ndef solve(x): return 1",
    "patched builtins": "import builtins\nbuiltins.all = builtins.any = lambda x: True\nbuiltins.isinstance = lambda *a: True\ndef solve(x): return 1",
    "patched grader": """
import sys
for module in list(sys.modules.values()):
    for name in ('same', 'outcome_of', 'results_of', 'python_tests', 'packed', 'report', 'write'):
        if hasattr(module, name): setattr(module, name, lambda *a, **k: '["value", true]')
def solve(x): return 1""",
    "patched caller": """
import sys
def solve(x):
    frame = sys._getframe()
    while frame:
        for name, value in list(frame.f_locals.items()) + list(frame.f_globals.items()):
            if callable(value) and name in ('write', 'packed', 'report'):
                frame.f_globals[name] = lambda *a: '["value", true]'
        frame = frame.f_back
    return True""",
    "searched frames": """
import sys
def solve(x):
    frame, found = sys._getframe(), []
    while frame:
        found += [v for v in list(frame.f_locals.values()) + list(frame.f_globals.values()) if isinstance(v, str) and len(v) == 32]
        frame = frame.f_back
    return found[0]""",
    "searched objects": """
import gc
def solve(x):
    found = [v for o in gc.get_objects() if isinstance(o, (dict, list, tuple)) for v in (o.values() if isinstance(o, dict) else o) if isinstance(v, str) and len(v) == 32 and set(v) <= set('0123456789abcdef')]
    return found[0]""",
    "searched files": """
import os
def solve(x):
    text = b''
    for fd in range(64):
        try: text += os.pread(fd, 100000, 0)
        except OSError: pass
    return text.decode(errors='replace')""",
    "written results": "import os\nos.write(4, b'[\"value\", true]\\n' * 3)\nos._exit(0)",
    "written before": "import os\nfor _ in range(9): os.write(4, b'[\"value\", \"yes\"]\\n')\ndef solve(x): return 1",
    "not json": "import os\nos.write(4, b'\\xff\\xfe\\n' * 3)\nos._exit(0)",
    "pickle": "import os, pickle\nclass P:\n    def __reduce__(self): return (os.system, ('touch /tmp/penstock-pwned',))\nos.write(4, pickle.dumps(P()) + b'\\n')\ndef solve(x): return P()",
    "nan": "def solve(x): return float('nan')",
    "infinity": "import os\nos.write(4, b'[\"value\", Infinity]\\n[\"value\", 1e999]\\n[\"value\", NaN]\\n')\nos._exit(0)",
    "huge number": "def solve(x): return 10 ** 6000",
    "huge digits": "import os\nos.write(4, b'[\"value\", ' + b'9' * 100000 + b']\\n')\nos._exit(0)",
    "deep": "def solve(x):\n    y = []\n    for _ in range(100000): y = [y]\n    return y",
    "deep by hand": "import os\nos.write(4, b'[\"value\", ' + b'[' * 50000 + b']' * 50000 + b']\\n')\nos._exit(0)",
    "circle": "def solve(x):\n    y = []\n    y.append(y)\n    return y",
    "bytes": "def solve(x): return b'x'",
    "lone surrogate": "def solve(x): return '\\ud800'",
    "exception that lies": "class E(Exception):\n    def __str__(self): raise E()\ndef solve(x): raise E()",
    "exception named well": "class value(BaseException): pass\ndef solve(x): raise value('true')",
    "nothing": "",
    "no code": "I cannot solve this.",
    "wrong name": "def solved(x): return x",
    "not a function": "solve = 7",
    "null bytes": "def solve(x):\0 return x",
    "a megabyte": "x = '" + "y" * (1 << 20) + "'",
    "a megabyte of brackets": "(" * (1 << 20),
    "closed files": "import os\nos.closerange(0, 64)\ndef solve(x): return x",
    "replaced streams": "import sys\nsys.stdout = sys.stderr = None\ndef solve(x): return x",
    "killed itself": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\nos.abort()",
    "two processes": "import os\nos.fork()\ndef solve(x): return [x, os.getpid()]",
}  # fmt: skip


@pytest.mark.parametrize("name", FORGERS)
def test_a_forger_scores_nothing(score, name):
    assert score(FORGERS[name]) == 0.0


def test_a_loop_of_the_event_loop_is_not_disturbed_by_a_response_that_is_one():
    assert (
        python_tests("```python\nimport asyncio\n```", {"function": "f", "tests": [{"input": [], "output": 1}]}) == 0.0
    )
    assert asyncio.new_event_loop().is_running() is False


def test_expected_results_never_enter_the_fence(fence, monkeypatch):
    sent = []
    execute = type(fence.sandbox).execute

    async def watched(self, request, stdin, wall_s):
        sent.append(json.dumps(request) + stdin.decode())
        return await execute(self, request, stdin, wall_s)

    monkeypatch.setattr(type(fence.sandbox), "execute", watched)
    calls = {"function": "f", "tests": [{"input": [1], "output": "EXPECTED"}]}
    programs = {"tests": [{"stdin": "1", "stdout": "EXPECTED"}]}
    assert python_tests("def f(x): return 'EXP' + 'ECTED'", calls, limits=LIMITS) == 1.0
    assert python_tests("print('EXP' + 'ECTED')", programs, limits=LIMITS) == 1.0
    assert len(sent) == 2
    assert not any("EXPECTED" in text for text in sent)


def test_values_come_back_as_they_are(fence):
    values = [None, True, False, 0, -1, 2**80, 0.1, -0.0, 1e300, "", "é\ud800\0\n", [], [[1, [2]]], {"a": {"b": []}}]
    assert fence.call("def f(x): return x", "f", [[value] for value in values]) == [Value(value) for value in values]
    assert fence.call("def f(): return (1, (2, 3))", "f", [[]]) == [Value([1, [2, 3]])]
    assert fence.call("class Solution:\n    def f(self, x): return x", "Solution.f", [[1]]) == [Value(1)]
    for bad in ("{1}", "1j", "object()", "b''", "float('inf')"):
        (result,) = fence.call(f"def f(): return {bad}", "f", [[]])
        assert isinstance(result, Failed)
        assert result.reason == "not_data"


def test_one_calls_exception_does_not_fail_the_others(fence):
    results = fence.call("def f(x): return 1 // x", "f", [[1], [0], [-1]])
    assert results == [Value(1), Failed("raised", results[1].text), Value(-1)]
    assert "ZeroDivisionError" in results[1].text
