"""The processes of one vLLM engine, seen from the process that starts them: started, called within deadlines, ended,
and what they have failed with. vLLM is imported when they are started.

They are children of this process and inherit its standard output and error, and say why they fail only there. So both
lead into a pipe while the engine is started; a thread passes on what comes to where it would have gone, and goes on as
long as a process has the other end open. The end of the output is kept for the error message when they die.
"""

import asyncio
import gc
import multiprocessing
import os
import re
import select
import sys
import threading
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from penstock.conf.errors import DeadlineExceeded, PenstockError, ResourceError, WeightError, WorkerDied, how_ended
from penstock.metering.meters import Meters
from penstock.workers.pictures.processor import PictureProcessor
from penstock.workers.protocols import EngineSpec
from penstock.workers.rollout.vllm_conversion import engine_arguments, vllm_environment

T = TypeVar("T")

PHASE_KEY = "weights.phase_timeout_s"
TAIL_BYTES = 1 << 16
SHOWN_LINES = 12
MAX_LINE_CHARS = 300

_REDIRECTED = threading.Lock()
"""Lock around redirection. Standard output belongs to the whole process, so one engine is started after the other."""
_ORIGIN = re.compile(r"^\([\w ]*\bpid=\d+\)\s?")
_LOG = re.compile(r"^(DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d [\d:.]+ \[[^\]]*\] ?")
_RAISED = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit|Failure): \S")
_POINTS_ELSEWHERE = re.compile(r"root cause above|stack trace|background process", re.IGNORECASE)


class VllmProcesses:
    """Base of the engines. Lifecycle: `_build` once, `_in_time` for each call, `close`. Once they are broken, they are
    of no use any more."""

    def __init__(self, spec: EngineSpec, meters: Meters | None = None) -> None:
        """`meters`: for vLLM's statistics after each step; None: it gathers none."""
        self._spec, self._config, self._meters = spec, spec.config, meters
        self._pictures: PictureProcessor | None = None
        """Processor of the model's pictures; None for a model of text."""
        self.llm: Any = None
        """vLLM's own engine, from `start` to `close`."""
        self._stats: Any = None
        """The `VllmStats`, once the engine is started with meters."""
        self._broken: str | None = None
        """The reason why the engine is broken."""
        self._output = EngineOutput()
        self._children: list[BaseProcess] = []

    def _build(self) -> None:
        """Start them. Raises `ResourceError`, and `ModelError` for weights that are not the model's."""
        others = multiprocessing.active_children()
        with self._output.captured(), vllm_environment(self._spec):
            from vllm import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM

            from penstock.workers.weights.stored import check_model

            check_model(self._spec.model_path)
            try:
                self._pictures = PictureProcessor.if_it_sees(self._spec.model_path, self._spec.picture_digest)
                family = self._pictures.family if self._pictures is not None else None
                arguments = AsyncEngineArgs(**engine_arguments(self._spec, family))
                self.llm = AsyncLLM.from_engine_args(arguments, stat_loggers=self._stat_loggers())
            except (RuntimeError, ValueError, OSError) as error:
                told = explained(str(error), self._output.tail())
                raise ResourceError(
                    f"the vLLM engine for {self._spec.model_path} did not start: {told}\nIts memory is set by "
                    "rollout.kv_cache_gib and rollout.max_model_len, on a GPU by rollout.gpu_memory_utilization."
                ) from None
        self._children = [child for child in multiprocessing.active_children() if child not in others]

    def _stat_loggers(self) -> list[Any]:
        """The factories of stat loggers; vLLM gathers its statistics only where there is one."""
        if self._meters is None:
            return []
        from penstock.workers.rollout.vllm_extensions import VllmStats

        self._stats = VllmStats(self._meters)
        return [self._stats.logger]

    async def close(self) -> None:
        llm, self.llm = self.llm, None
        self._broken = self._broken or "it was closed"
        if llm is not None:
            llm.shutdown()  # blocks on purpose: its output task must not run and report the end as a failure
            await asyncio.sleep(0.01)  # its cancelled tasks end
            del llm
            gc.collect()  # a cycle would keep it until the interpreter ends, when its __del__ prints an error

    async def nonfinite_weights(self) -> list[str]:
        self.check_alive()
        call = self.llm.collective_rpc("nonfinite_weights")
        found = await self._in_time("a look at the weights", call, self._spec.phase_timeout_s, PHASE_KEY)
        return sorted({name for names in found for name in names})

    def _is_gone(self) -> bool:
        return self.llm is None or self.llm.errored

    async def _in_time(self, what: str, call: Awaitable[T], timeout_s: float, key: str) -> T:
        """Return the call's result. Raises `DeadlineExceeded` naming `what`; the engine's own failures as
        `WeightError`, `WorkerDied`."""
        try:
            return await asyncio.wait_for(call, timeout_s)
        except TimeoutError:
            raise DeadlineExceeded(
                f"{what}: the vLLM engine for {self._spec.model_path} did not answer within {timeout_s:g} s. Raise "
                f"{key}, or see its log."
            ) from None
        except PenstockError:
            raise
        except Exception as error:  # noqa: BLE001 - vLLM reports failures of its processes as bare Exceptions with text
            if self.llm is not None and self.llm.errored:
                raise self._died(error) from None
            raise WeightError(f"{what}: {error}") from None

    def _died(self, reason: object) -> WorkerDied:
        self._broken = self._broken or str(reason)
        codes = [child.exitcode for child in self._children if child.exitcode]
        told = explained(str(reason), self._output.tail(), ", ".join(map(how_ended, codes)))
        return WorkerDied(f"the vLLM engine for {self._spec.model_path} is gone: {told}")

    def check_alive(self) -> None:
        if self._broken is not None or self.llm is None:
            reason = self._broken or "it was never started"
            raise WorkerDied(f"the vLLM engine for {self._spec.model_path} is not serving: {reason}.")


class EngineOutput:
    """The output of the processes. Lifecycle: `captured` around their start, `tail` at any time from then on."""

    def __init__(self) -> None:
        self._kept = bytearray()
        self._reading = threading.Lock()
        self._pipe = self._onward = -1

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Capture what is printed within the block, and by processes started within it for as long as they live."""
        with _REDIRECTED:
            self._pipe, entrance = os.pipe()
            os.set_blocking(self._pipe, False)
            _flush()
            output, self._onward = os.dup(1), os.dup(2)
            os.dup2(entrance, 1)
            os.dup2(entrance, 2)
            os.close(entrance)
            threading.Thread(target=self._pass_on, name="engine-output", daemon=True).start()
            try:
                yield
            finally:
                _flush()
                os.dup2(output, 1)
                os.dup2(self._onward, 2)
                os.close(output)

    def tail(self) -> str:
        """The end of what was printed so far, including everything from a dead process."""
        self._drain()
        return bytes(self._kept).decode(errors="replace")

    def _pass_on(self) -> None:
        poll = select.poll()
        poll.register(self._pipe, select.POLLIN)
        while True:
            poll.poll()
            if not self._drain():
                return

    def _drain(self) -> bool:
        """Take what is in the pipe. False at its end: no process is left that could print."""
        with self._reading:
            while self._pipe >= 0:
                try:
                    chunk = os.read(self._pipe, TAIL_BYTES)
                except BlockingIOError:
                    return True
                if not chunk:
                    os.close(self._pipe)
                    os.close(self._onward)
                    self._pipe = -1
                    break
                self._kept += chunk
                del self._kept[:-TAIL_BYTES]
                with suppress(OSError):  # nobody reads it: it is kept all the same
                    _write(self._onward, chunk)
            return False


def explained(reason: str, output: str, ended: str = "") -> str:
    """The message for an engine that failed with `reason`: the cause in its output, if it has one, and the output's
    last lines. `ended`: how its processes did."""
    lines = [line for line in map(_bare, output.splitlines()) if line]
    cause = cause_in(lines)
    if cause is None and not _POINTS_ELSEWHERE.search(reason):
        return reason
    told = cause or (f"its process ended: {ended}" if ended else "it ended without saying why")
    if not lines:
        return f"{told} ({reason})"
    return "\n".join([told, "The end of its output:", *(f"  {line}" for line in lines[-SHOWN_LINES:]), reason])


def cause_in(lines: list[str]) -> str | None:
    """The last error raised in these lines that does not point to another one."""
    raised = [line for line in lines if _RAISED.match(line) and not _POINTS_ELSEWHERE.search(line)]
    return raised[-1] if raised else None


def _bare(line: str) -> str:
    """The line without the process, the logger, and what underlines a traceback."""
    text = _LOG.sub("", _ORIGIN.sub("", line)).rstrip(" ^\r")
    return text if len(text) <= MAX_LINE_CHARS else text[: MAX_LINE_CHARS - 1] + "…"


def _write(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or nobody reads it
            stream.flush()
