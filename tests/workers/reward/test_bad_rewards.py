"""A reward that hangs, crashes, raises or returns nonsense costs its own sample, and nothing else."""

import asyncio
import signal
import time

import psutil
import pytest

from penstock.workers.reward.reward_result import MAX_TEXT, RewardError
from tests.virtual_time import put_forward, run_ahead
from tests.workers.reward.pools import PATIENCE_S, pool_of, score_past_hangs, scored, scored_past_hangs

pytestmark = pytest.mark.real

BAD = {
    "raise": ("raised", "RuntimeError: no judge"),
    "nan": ("bad_value", "nan"),
    "none": ("bad_value", "None"),
    "text": ("bad_value", "str '1.0'"),
    "sysexit": ("raised", "SystemExit: bye"),
    "cancelled": ("raised", "CancelledError: by itself"),
    "generatorexit": ("raised", "GeneratorExit: bye"),
    "huge": ("bad_value", "whole number"),
    "exit": ("crash", "exit code 3"),
}


@pytest.mark.parametrize("kind", ["plain", "verl", "trl", "waiting"])
def test_failing_samples_cost_themselves_only(behaviours, kind):
    results, _ = scored(f"{behaviours}:{kind}", ["a", *BAD, "bb"])
    assert (results[0], results[-1]) == (1.0, 2.0)
    for (response, (error_kind, text)), error in zip(BAD.items(), results[1:-1], strict=True):
        if response == "none" and kind == "trl":
            assert error is None, "as TRL has it, the sample does not count"
            continue
        assert error.kind == error_kind
        assert text in error.text


def test_the_error_of_a_raise_has_the_line_that_raised(behaviours):
    (error,), _ = scored(f"{behaviours}:plain", ["raise"])
    assert 'raise RuntimeError("no judge")' in error.text
    assert "behaviours.py:" in error.text


@pytest.mark.parametrize(("response", "text"), [("long", "RuntimeError: no no"), ("unspeakable", "ValueError")])
def test_the_text_of_an_error_is_short_and_always_there(behaviours, response, text):
    (error, after), _ = scored(f"{behaviours}:plain", [response, "a"])
    assert (error.kind, after) == ("raised", 1.0)
    assert text in error.text
    assert "behaviours.py:" in error.text
    assert len(error.text) <= MAX_TEXT


def test_the_text_of_an_error_can_be_written_as_utf8(behaviours):
    (error,), _ = scored(f"{behaviours}:plain", ["surrogate"])
    assert error.text.encode().startswith(b"RuntimeError: ?")


@pytest.mark.parametrize("bad", ["garbage", "deep", "giant", "infinite", "stranger", "twice", "done"])
def test_a_process_that_talks_nonsense_costs_one_sample_and_is_replaced(behaviours, bad):
    async def run():
        async with pool_of(f"{behaviours}:plain") as pool:
            return await pool.score(["a", bad, "ccc"], ["{}"] * 3), pool.replaced

    results, replaced = asyncio.run(asyncio.wait_for(run(), 30))
    assert results[::2] == [1.0, 3.0]
    assert results[1].kind == "crash"
    assert replaced == 1


def test_what_a_process_sends_is_never_unpickled(behaviours, tmp_path):
    (error,), _ = scored(f"{behaviours}:plain", [f"pickle {tmp_path}/touched"])
    assert error.kind == "crash"
    assert list(tmp_path.iterdir()) == []


def score_while_stopped(behaviours, act_on):
    """Results of a batch that is larger than what a socket holds, sent to a process that takes nothing of it."""

    async def run():
        async with pool_of(f"{behaviours}:plain") as pool:
            (process,) = pool.alive
            process.child.send_signal(signal.SIGSTOP)
            call = asyncio.create_task(pool.score(["x" * 2**21, "a", "bb"], ["{}"] * 3))
            while not process.writer.transport.get_write_buffer_size():
                await asyncio.sleep(0)
            await act_on(process.child)
            return await asyncio.wait_for(call, 10 * PATIENCE_S)

    return run_ahead(run())


def test_a_process_that_dies_while_it_takes_a_batch_costs_one_sample(behaviours):
    async def kill(child):
        child.kill()

    results = score_while_stopped(behaviours, kill)
    assert results[1:] == [1.0, 2.0]
    assert results[0].kind == "crash"
    assert "SIGKILL" in results[0].text


def test_a_process_that_does_not_take_its_batch_is_killed_at_the_deadline(behaviours):
    results = score_while_stopped(behaviours, lambda child: put_forward(2 * PATIENCE_S))
    assert results[1:] == [1.0, 2.0]
    assert results[0].kind == "timeout"


def test_a_segmentation_fault_costs_its_own_sample(behaviours):
    results, _ = scored(f"{behaviours}:plain", ["a", "segfault", "ccc"])
    assert results[::2] == [1.0, 3.0]
    assert results[1].kind == "crash"
    assert "SIGSEGV" in results[1].text


@pytest.mark.parametrize(
    ("kind", "bad"), [("plain", "hang"), ("plain", "spin"), ("plain", "half"), ("trl", "hang"), ("waiting", "spin")]
)
def test_a_hanging_sample_is_killed_at_its_deadline(behaviours, kind, bad):
    results = scored_past_hangs(behaviours, kind, ["a", bad, "ccc"])
    assert results[::2] == [1.0, 3.0]
    assert results[1].kind == "timeout"
    assert f"reward.timeout_s={PATIENCE_S:g}" in results[1].text


def test_an_async_sample_that_waits_too_long_costs_no_process(behaviours):
    async def run():
        async with pool_of(f"{behaviours}:waiting") as pool:
            return await pool.score(["a", "wait", "ccc"], ["{}"] * 3), pool.replaced

    results, replaced = asyncio.run(run())
    assert results[::2] == [1.0, 3.0]
    assert results[1].kind == "timeout"
    assert replaced == 0


def test_async_samples_of_a_batch_wait_at_the_same_time():
    there = []

    async def score(response, task):
        there.append(response)
        while len(there) < 40:
            await asyncio.sleep(0.001)
        return 1.0

    results, _ = scored(score, ["a"] * 40)
    assert results == [1.0] * 40


@pytest.mark.promise("Runs hang")
def test_two_hanging_samples_leave_the_rest_scored(behaviours):
    results = scored_past_hangs(behaviours, "plain", ["hang", "b", "hang", "d"])
    assert [isinstance(r, RewardError) for r in results] == [True, False, True, False]


def test_wrong_length_is_isolated_to_the_sample_that_causes_it(behaviours):
    results, _ = scored(f"{behaviours}:wrong_length", ["ok", "bad", "ok"])
    assert results[::2] == [1.0, 1.0]
    assert "2 values for 1 sample" in results[1].text


def test_a_batch_function_that_is_slow_for_many_samples_gets_smaller_batches(behaviours):
    async def run():
        async with pool_of(f"{behaviours}:slow_for_many") as pool:
            first = await score_past_hangs(behaviours, pool, ["x"] * 4)
            replaced = pool.replaced
            second = await score_past_hangs(behaviours, pool, ["x"] * 4)
            return first, second, replaced, pool.replaced

    first, second, before, after = run_ahead(run())
    assert first == second == [1.0] * 4
    assert before == after == 1


def test_prints_go_to_the_log_and_not_into_the_protocol(behaviours, capfd, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    results, _ = scored(f"{behaviours}:plain", ["print", "bb"])
    assert results == [1.0, 2.0]
    out = capfd.readouterr()
    assert "hello" in out.out
    assert "raw" in out.out
    assert "hello" in out.err


def test_a_reward_that_reads_standard_input_sees_its_end(behaviours):
    assert scored(f"{behaviours}:plain", ["input"])[0] == [0.0]


def test_what_a_killed_reward_has_started_is_killed_with_it(behaviours):
    results = scored_past_hangs(behaviours, "plain", ["child"])
    assert results[0].kind == "timeout"
    while ["sleep", "600.125"] in [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])]:
        time.sleep(0.01)  # a killed process is there for a moment; one that nobody waits for has no command
