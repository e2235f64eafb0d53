"""Where calls that wait for each other fail, the one that failed by itself is told. Every wait ends."""

import asyncio
import concurrent.futures
import threading
import traceback
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayTaskError
from ray.runtime_env import RuntimeEnv

from penstock.conf.errors import DataError, DeadlineExceeded, PartnerGone, WorkerDied, WorkerFailed
from penstock.orchestrator.cluster import ray_calls as waiting
from penstock.orchestrator.cluster.ray_calls import answer, answers, get_all, in_thread, outcomes, translate
from tests.fakes.actors import FakeRef


def answering(*, after_s: float | None = 0.0, result: Any = None) -> FakeRef:
    """A call that is answered after so long, by another thread. None: never. `result`: an exception is raised."""
    future = concurrent.futures.Future[Any]()
    if after_s is not None:
        end = future.set_exception if isinstance(result, Exception) else future.set_result
        timer = threading.Timer(after_s, end, (result,))
        timer.daemon = True
        timer.start()
    return FakeRef(future)


def wait(kind: str, refs: list[FakeRef], timeout_s: float = 600.0) -> list[Any]:
    calls = [(f"Trainer-{i}", ref) for i, ref in enumerate(refs)]
    if kind == "sync":
        return get_all(calls, phase="step 3", timeout_s=timeout_s)

    async def all_of() -> list[Any]:
        return await asyncio.wait_for(answers(calls, phase="step 3", timeout_s=timeout_s), 900)

    return asyncio.run(all_of())


def crossed(error: Exception) -> Exception:
    """The error as it comes out of an actor."""
    return RayTaskError("step", "Traceback: one line\nof the remote", error).as_instanceof_cause()


KINDS = pytest.mark.parametrize("kind", ["sync", "async"])


@KINDS
def test_answers_come_in_the_order_of_the_calls(kind: str) -> None:
    assert wait(
        kind, [answering(after_s=0.05, result="a"), answering(result="b"), answering(after_s=0.02, result="c")]
    ) == [
        "a",
        "b",
        "c",
    ]


@KINDS
def test_a_rank_that_does_not_answer_does_not_hide_the_error_of_the_next(kind: str) -> None:
    with pytest.raises(DataError, match="row 3"):
        wait(kind, [answering(after_s=None), answering(result=crossed(DataError("row 3")))], timeout_s=20)


@KINDS
def test_the_death_of_a_rank_is_told_though_the_others_saw_it_first(kind: str) -> None:
    survivor = answering(result=crossed(PartnerGone("step 3, rank 0 of 2: another rank is gone")))
    with pytest.raises(WorkerDied) as raised:
        wait(kind, [survivor, answering(after_s=0.1, result=ActorDiedError())])
    assert str(raised.value).startswith("Trainer-1 has died")
    assert "PartnerGone: step 3, rank 0 of 2: another rank is gone" in str(raised.value)


@KINDS
def test_a_consequence_alone_is_told_after_the_grace(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "CAUSE_GRACE_S", 0.05)
    with pytest.raises(PartnerGone, match="rank 0"):
        wait(kind, [answering(result=crossed(PartnerGone("rank 0: another rank is gone"))), answering(after_s=None)])


@KINDS
def test_each_call_may_have_a_deadline_of_its_own(kind: str) -> None:
    """A rank that loads for too long is noticed while an engine may still compile."""
    late = [("Trainer-0", answering(after_s=None)), ("Rollout-0", answering(after_s=None))]
    with pytest.raises(DeadlineExceeded, match=r"Trainer-0 did not answer within 0\.1 s\. Raise rollout\.start"):
        _started(kind, late, [0.1, 600.0])
    in_time = [("Trainer-0", answering(result="a")), ("Rollout-0", answering(after_s=0.2, result="b"))]
    assert _started(kind, in_time, [30.0, 600.0]) == ["a", "b"]
    with pytest.raises(DeadlineExceeded, match=r"Rollout-0 .* within 0\.1 s\..*or rollout\.compile_timeout_s"):
        _started(kind, [("Rollout-0", answering(after_s=None))], [0.1])


def _started(kind: str, calls: list[tuple[str, FakeRef]], limits: list[float]) -> list[Any]:
    if kind == "sync":
        return get_all(calls, phase="start", timeout_s=limits)

    async def all_of() -> list[Any]:
        return await answers(calls, phase="start", timeout_s=limits)

    return asyncio.run(all_of())


@KINDS
def test_a_cause_waits_for_nobody(kind: str) -> None:
    with pytest.raises(DataError):
        wait(kind, [answering(after_s=None), answering(result=crossed(DataError("row 3")))])


@KINDS
def test_all_who_did_not_answer_are_named(kind: str) -> None:
    with pytest.raises(DeadlineExceeded) as raised:
        wait(kind, [answering(after_s=None), answering(result=1), answering(after_s=None)], timeout_s=0.05)
    assert "Trainer-0" in str(raised.value)
    assert "Trainer-2" in str(raised.value)
    assert "step 3" in str(raised.value)
    assert "Trainer-1" not in str(raised.value)


def test_a_start_that_is_late_names_the_runtime_env_that_it_may_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def said(phase: str, **environment: Any) -> str:
        context = SimpleNamespace(runtime_env=RuntimeEnv(**environment))
        monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
        with pytest.raises(DeadlineExceeded) as late:
            get_all([("Owner", answering(after_s=None))], phase=phase, timeout_s=0.0)
        return str(late.value)

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    assert said("load", pip=["trl"]) == "load: Owner did not answer within 0 s."
    assert said("start") == "start: Owner did not answer within 0 s. Raise rollout.start_timeout_s if it needs longer."
    assert "makes the job's runtime_env (working_dir, pip) on each" in said(
        "start", pip=["trl"], working_dir="gcs://a.zip"
    )


@KINDS
def test_nothing_asked_is_nothing_answered(kind: str) -> None:
    assert wait(kind, []) == []


def test_errors_that_crossed_ray_have_penstocks_types() -> None:
    error = translate(crossed(ValueError("nonsense")), "Compute-a")
    assert type(error) is WorkerFailed
    assert str(error).startswith("Compute-a failed with ValueError: nonsense")
    assert type(translate(crossed(DataError("row 3")), "Compute-a")) is DataError
    assert type(translate(crossed(ActorDiedError()), "Rollout-0")) is PartnerGone
    assert type(translate(ActorDiedError(), "Rollout-0")) is WorkerDied
    assert type(translate(OutOfMemoryError("the node is low on memory"), "Rollout-0")) is WorkerDied
    said = str(translate(OutOfMemoryError("1 worker(s) were killed\nTop 10"), "Rollout-0"))
    assert said == (
        "Rollout-0 was ended by Ray's memory monitor, as its node ran out of memory: lower rollout.kv_cache_gib, or "
        "rollout.gpu_memory_utilization on a GPU, or use nodes with more memory (1 worker(s) were killed)."
    )
    assert type(translate(crossed(OutOfMemoryError("the node is low on memory")), "Trainer-0")) is PartnerGone
    own = KeyError("x")
    assert translate(own, "Rollout-0") is own


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be reported later", WorkerDied),
        ("CUDA error: unspecified launch failure", WorkerDied),
        ("CUDA error: an illegal memory access was encountered", WorkerDied),
        ("CUDA error: the launch timed out and was terminated", WorkerDied),
        ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`", WorkerDied),
        ("NCCL error in: ProcessGroupNCCL.cpp:3356, unhandled system error, NCCL version 2.27.5", WorkerDied),
        ("NCCL communicator encountered error set by ProcessGroupNCCL: NCCL error: remote side aborted", WorkerDied),
        ("CUDA out of memory. Tried to allocate 2.00 GiB.", WorkerFailed),
        ("CUDA error: out of memory", WorkerFailed),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", WorkerFailed),
        ("CUDA error: device-side assert triggered", WorkerFailed),
        ("CUDA error: no kernel image is available for execution on the device", WorkerFailed),
        ("CUDA error: invalid device ordinal", WorkerFailed),
        ("mat1 and mat2 shapes cannot be multiplied", WorkerFailed),
    ],
)
def test_what_a_gpu_has_ended_is_a_death_and_what_a_program_does_to_it_is_not(said: str, expected: type) -> None:
    error = translate(crossed(RuntimeError(said)), "Trainer-0")
    assert type(error) is expected
    assert said in str(error)
    assert type(translate(crossed(ValueError(said)), "Trainer-0")) is WorkerFailed  # quoted by somebody's own error


def test_an_actor_that_its_constructor_ended_is_told_with_what_that_raised() -> None:
    try:
        raise ValueError("no snapshot is there")
    except ValueError:
        trace = traceback.format_exc()
    raised = RayTaskError("Store.__init__", trace, ValueError("no snapshot is there"))
    said = str(translate(ActorDiedError(raised), "Store"))
    assert said.startswith("Store has died (ValueError: no snapshot is there). Its log")


def test_one_answer_that_does_not_come_is_named() -> None:
    with pytest.raises(DeadlineExceeded, match=r"evaluation: Reward-0 did not answer within 0\.01 s"):
        asyncio.run(answer(asyncio.sleep(60), name="Reward-0", phase="evaluation", timeout_s=0.01))


@pytest.mark.parametrize(
    ("name", "key"), [("Reward-0", "reward.num_processes"), ("Trainer-policy-1", "max_tokens_per_microbatch")]
)
def test_a_dead_actor_is_told_with_the_keys_of_its_memory(name: str, key: str) -> None:
    said = str(translate(ActorDiedError(), name))
    assert said.startswith(f"{name} has died")
    assert key in said
    assert "kv_cache" not in said


@pytest.mark.parametrize("error", [WorkerDied("it has died"), None])
def test_a_cancellation_that_comes_with_the_answer_is_a_cancellation(error: Exception | None) -> None:
    """A task that went on would keep its task group, and the run, from ending."""

    async def run() -> None:
        ref = asyncio.get_running_loop().create_future()
        asking = asyncio.ensure_future(answer(ref, name="Rollout-0", phase="load", timeout_s=60))
        await asyncio.sleep(0)
        if error is not None:
            ref.set_exception(error)
        else:
            ref.set_result(1)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    asyncio.run(run())


def test_of_calls_that_do_not_depend_on_each_other_each_has_its_own_outcome() -> None:
    refs = [
        answering(result=1),
        answering(result=crossed(DataError("row 3"))),
        answering(after_s=None),
        answering(result=TimeoutError()),
    ]
    calls = [(f"Rollout-{i}", ref) for i, ref in enumerate(refs)]

    async def all_of() -> list[Any]:
        return await outcomes(calls, phase="heartbeat", timeout_s=0.2)

    found = asyncio.run(asyncio.wait_for(all_of(), 60))
    assert found[0] == 1
    assert [type(error) for error in found[1:]] == [DataError, DeadlineExceeded, DeadlineExceeded]
    assert str(found[2]) == "heartbeat: Rollout-2 did not answer within 0.2 s."
    assert asyncio.run(outcomes([], phase="heartbeat", timeout_s=0.2)) == []


def test_what_a_thread_has_made_is_given_back_if_the_caller_is_gone() -> None:
    async def main() -> None:
        may_go_on, given_back = threading.Event(), asyncio.Event()

        def made() -> str:
            assert may_go_on.wait(60)
            return "an actor"

        calling = asyncio.ensure_future(in_thread(made, lambda result: given_back.set()))
        await asyncio.sleep(0)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        assert not given_back.is_set()
        may_go_on.set()
        await asyncio.wait_for(given_back.wait(), 60)
        assert await in_thread(lambda: "kept", lambda result: given_back.clear()) == "kept"
        assert given_back.is_set()

    asyncio.run(main())
