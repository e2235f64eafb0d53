"""Transports of which one end fails, hangs or sends something else than was agreed: both ends hear of
it, by version and phase.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from penstock.conf.errors import DeadlineExceeded, PenstockError, WeightError
from penstock.workers.weights.engine_calls import StreamedVersion, StreamPart
from tests.workers.rollout.fake_llm import fail, hang, is_serving
from tests.workers.weights.streaming.host_memory import STREAMS, TRANSPORTS, Side

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("warm_spawn")]
pytest.importorskip("vllm", reason="vLLM is not installed: its transfer engines are not tested")


@pytest.mark.parametrize("trouble", ["fail", "hang"])
def test_weights_that_do_not_wake_end_the_sending(make_side: Callable[..., Side], trouble: str) -> None:
    troubles = {"wake weights": {"fail": fail, "hang": hang}[trouble]}
    side = make_side("ipc", num_gpus_per_worker=0.5, timeout_s=0.3, **troubles)
    asyncio.run(side.engines[0].sleep())
    sent, loaded = side.run()
    assert "phase wake" in str(loaded)
    assert "phase wake" in str(sent)


@pytest.mark.parametrize("name", TRANSPORTS)
def test_an_engine_that_serves_another_version_than_asked_for_is_broken(
    make_side: Callable[..., Side], name: str
) -> None:
    side = make_side(name, finish=lambda: setattr(side.engines[0].llm, "version", "default"))
    sent, loaded = side.run(3)
    assert isinstance(loaded, WeightError)
    assert "version 3: the engine says it serves 'default'" in str(loaded)
    assert not is_serving(side.engines[0])
    assert sent is None if name == "shm" else sent is loaded


@pytest.mark.parametrize("name", TRANSPORTS)
@pytest.mark.parametrize("phase", ["load", "finish", "version"])
@pytest.mark.parametrize(("trouble", "expected"), [(hang, DeadlineExceeded), (fail, WeightError)])
def test_a_failing_or_silent_engine_is_named_with_its_phase_on_both_sides(
    make_side: Callable[..., Side], name: str, phase: str, trouble: Callable[[], Any], expected: type[PenstockError]
) -> None:
    side = make_side(name, timeout_s=1.0, **{phase: trouble})
    sent, loaded = side.run()
    assert isinstance(loaded, expected)
    assert f"version 1, phase {phase}" in str(loaded)
    assert not is_serving(side.engines[0])
    if name == "shm":
        assert sent is None
    else:
        assert sent is loaded
        with pytest.raises(WeightError, match=f"is not connected: .*phase {phase}"):
            side.transport.send(2)


@pytest.mark.parametrize("name", STREAMS)
def test_one_engine_of_two_that_fails_ends_the_sending(make_side: Callable[..., Side], name: str) -> None:
    side = make_side(name, engines=2, timeout_s=2.0)
    side.engines[1].llm.troubles = {"load": fail}
    sent, _, loaded = side.run()
    assert isinstance(loaded, WeightError)
    assert sent is loaded


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("phase", ["pause", "start"])
def test_a_failure_before_loading_ends_the_sending_and_old_weights_still_serve(
    make_side: Callable[..., Side], name: str, phase: str
) -> None:
    side = make_side(name, in_flight=1, timeout_s=2.0, **{phase: fail})
    sent, loaded = side.run()
    assert isinstance(loaded, WeightError)
    assert f"phase {phase}" in str(loaded)
    assert side.calls()[-1] == "resume"
    assert is_serving(side.engines[0])
    assert sent is loaded


@pytest.mark.parametrize("name", STREAMS)
def test_a_sender_that_dies_is_noticed_by_the_engine(make_side: Callable[..., Side], name: str) -> None:
    side = make_side(name, timeout_s=0.3)
    (loaded,) = side.run(sending=False)
    assert isinstance(loaded, DeadlineExceeded)
    assert "version 1, phase receive" in str(loaded)
    assert "after 0 of 11 tensors" in str(loaded)
    assert not is_serving(side.engines[0])


@pytest.mark.parametrize("name", STREAMS)
def test_an_engine_that_is_never_told_of_the_version_is_noticed_by_the_sender(
    make_side: Callable[..., Side], name: str
) -> None:
    side = make_side(name, timeout_s=0.3)
    (sent,) = side.run(loading=False)
    assert isinstance(sent, DeadlineExceeded)
    assert "version 1, phase send, trainer rank 0 of 1" in str(sent)
    assert "of 11 tensors taken" in str(sent)


@pytest.mark.parametrize("name", STREAMS)
def test_an_engine_that_does_not_connect_is_named(make_side: Callable[..., Side], name: str) -> None:
    with pytest.raises(PenstockError, match="connecting to the trainer"):
        make_side(name, timeout_s=0.3, connect=hang).run()


def test_a_worker_that_cannot_open_a_handle_is_an_error_of_both(make_side: Callable[..., Side]) -> None:
    side = make_side("ipc", timeout_s=2.0)
    side.engines[0].llm.worker.init_transfer_engine = lambda _: None  # it then expects one handle for each tensor
    sent, loaded = side.run()
    assert isinstance(loaded, WeightError)
    assert "phase load" in str(loaded)
    assert sent is loaded


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([StreamPart(2, {"names": ["a"]})], "version 1, phase receive: the trainer sends version 2"),
        ([StreamPart(1, {"names": ["a"]}), StreamPart(1, None)], "announced 2 tensors and ended after 1"),
        ([StreamPart(1, {"names": ["a", "b", "c"]}), StreamPart(1, None)], "announced 2 tensors and ended after 3"),
    ],
)
def test_parts_of_another_version_and_wrong_counts_are_refused(
    make_side: Callable[..., Side], parts: list[StreamPart], expected: str
) -> None:
    engine = make_side("ipc").engines[0]
    engine.llm.worker.update_weights = lambda info: None

    async def run() -> list[Any]:
        async def send() -> None:
            for part in parts:
                await engine.deliver(part)

        return await asyncio.gather(engine.load(StreamedVersion(1, 2)), send(), return_exceptions=True)

    loaded, sent = asyncio.run(run())
    assert isinstance(loaded, WeightError)
    assert expected in str(loaded)
    assert sent is loaded
    assert not is_serving(engine)
