"""What an agent reads of a program that it has run."""

import asyncio

import pytest

from penstock.workers.agents import toolbox
from penstock.workers.agents.toolbox import MAX_CHARACTERS, program_text, python
from penstock.workers.sandbox.execution import ProgramOutcome

WELL = ProgramOutcome("", "", 0, 0.1, 0.1, "exited")


@pytest.mark.real
def test_a_program_is_run_and_says_what_it_prints():
    async def both() -> tuple[str, str]:
        return await python("open('/tmp/x', 'w')\nprint(6 * 7)"), await python(
            "import os\nprint(os.listdir('/tmp'))\n1/0"
        )

    first, second = asyncio.run(both())
    assert first == "42"
    assert second.startswith("[]\nTraceback")
    assert second.endswith("ZeroDivisionError: division by zero\n[exit code 1]")
    assert python.__doc__


@pytest.mark.real
def test_the_fences_of_a_loop_that_is_closed_are_taken_down_by_the_next():
    asyncio.run(python("1"))
    (first,) = toolbox.sandboxes.values()
    (worker,) = first.alive
    asyncio.run(python("1"))
    assert worker.process.returncode is not None
    assert first not in toolbox.sandboxes.values()


def test_what_is_said_is_bounded_and_tells_how_it_ended():
    long = program_text(ProgramOutcome("x" * 100_000 + "end", "", 0, 1.0, 1.0, "output"))
    assert len(long) <= MAX_CHARACTERS
    assert long.startswith("xxx")
    assert long.endswith("end\n[ended: output]")
    assert program_text(WELL) == ""
