"""Every error that Penstock raises on purpose: one small hierarchy, in the lowest layer so that all can use it.

A message says what was received, why it cannot work, and the key or command that mends it. All errors cross process
boundaries, so each is built from its message alone and pickles as such.
"""

import difflib
import signal
from collections.abc import Iterable
from typing import Any


class PenstockError(Exception):
    """Base of all errors. `exit_code` is what the command line ends with."""

    exit_code = 1


class ConfigError(PenstockError):
    """A key, type, range or combination in the configuration that cannot work."""

    exit_code = 2


class DataError(PenstockError):
    """A dataset or a row of it that cannot be used."""

    exit_code = 2


class PromptRefused(DataError):
    """A prompt that leaves an engine no room for a response, or has no token."""


class UnknownAdapter(DataError):
    """A request for an adapter that an engine does not have, or not any more."""


class SamplingError(DataError, ValueError):
    """A value of a sampling distribution that no engine can draw from. `field`: its name."""

    def __init__(self, text: str, field: str = "") -> None:
        super().__init__(text)
        self.field = field

    def __reduce__(self) -> tuple[Any, ...]:
        return SamplingError, (str(self), self.field)


class ModelError(PenstockError):
    """A model directory that lacks something or does not fit the run."""

    exit_code = 2


class ResourceError(PenstockError):
    """The cluster lacks what the run asks for."""

    exit_code = 2


class CannotScale(ConfigError):
    """A request for more or fewer members of a run that cannot be granted."""


class DataflowError(ConfigError):
    """A graph that cannot run: a column without a writer, a cycle, an impossible unit."""


class ShapeError(PenstockError, ValueError):
    """A tensor handed to a loss or an advantage whose shape or values do not fit the others'."""


class StoreError(PenstockError):
    """A call that the store refuses; its state is as before the call."""


class StalenessViolation(StoreError):
    """A token older than `max_staleness` reached a batch. Always a bug in Penstock."""


class LeaseExpired(StoreError):
    """A write or acknowledgement under a lease that is over; the rows belong to another by now."""


class RewardFailure(PenstockError):
    """More than the configured share of rewards failed."""


class EngineFailure(PenstockError):
    """More than the configured share of an engine's samples have log-probabilities that are no numbers."""


class RunInUse(PenstockError):
    """Another process works in the run's directory. The message names it."""

    exit_code = 2


class TakenOver(RunInUse):
    """Another process drives the run now, with the actors that this one has started."""


class WeightError(PenstockError):
    """A publication is missing, damaged, or not what the engine serves."""


class CheckpointError(PenstockError):
    """A checkpoint that cannot be written, is damaged, or is of another run than the one that wants it; a URL that does
    not answer."""


class DamagedCheckpoint(CheckpointError):
    """A file of a checkpoint that is missing, or is not what was written. The message names it."""


class MemoryCheckpointError(PenstockError):
    """An in-memory checkpoint of a trainer that is missing, damaged, or of another trainer, or that cannot be copied
    to another node. The run can then only resume from its last checkpoint."""


class NotPlainData(PenstockError, ValueError):
    """A value that cannot be kept as plain data, or a text that holds none."""


class NotStarted(PenstockError):
    """A call that came before the one that makes what it needs. The message names both."""


class SandboxUnavailable(PenstockError):
    """Code of a model cannot be fenced in on this machine, so none of it runs. The message says what is missing."""

    exit_code = 2


class WorkspaceError(PenstockError):
    """A request about a workspace's files that failed, such as a file that is not there."""


class DeadlineExceeded(PenstockError):
    """A phase that did not end in time. The message names the phase and the process that did not answer."""


class WorkerDied(PenstockError):
    """An actor or engine process ended on its own. The message names it."""


class RayEnded(WorkerDied):
    """The Ray of this process has ended before its run, and all actors with it."""


class WorkerFailed(WorkerDied):
    """An actor that raised what is none of Penstock's errors: the user's code, or a bug, so a new process does not
    help. The message names both, with the end of the traceback."""


class PartnerGone(WorkerDied):
    """A partner of this process that is gone: another rank, the store. The cause is the other's own error."""


class StoreDied(PartnerGone):
    """The store's process is dead, says Ray. It may still answer over its socket for a moment: Ray knows of a kill
    before the process does."""


class LimitReached(PenstockError):
    """A limit of an attempt that was reached. The attempt is truncated, unless it goes on with a shorter conversation.
    `limit`: turns, tokens, context or time."""

    def __init__(self, limit: str, text: str = "") -> None:
        super().__init__(text or limit)
        self.limit = limit

    def __reduce__(self) -> tuple[Any, ...]:
        return LimitReached, (self.limit, str(self))


class Rejected(PenstockError):
    """An attempt that its environment keeps from being trained, with a word for the reason: `raise
    Rejected("refused")`."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail or reason)
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return Rejected, (self.reason, str(self))


class InfrastructureError(PenstockError):
    """A failure of what an attempt needs, such as a container or a service: not the policy's doing. The attempt is
    played again from its start, `environment.retries` times at most."""


class AttemptOver(PenstockError):
    """An attempt that has ended: nothing more is sampled for it."""


DEVICE_FAILED = (
    "cuda error", "cuda driver error", "nccl error", "nccl communicator", "ecc error", "cublas_status_", "cudnn_status_"
)  # fmt: skip
USERS_OWN = (
    "out of memory", "device-side assert", "alloc_failed", "no kernel image", "invalid ", "invalid_", "not_supported"
)  # fmt: skip
"""Parts of CUDA's messages about a program or a setting that would fail in the same way on any other GPU."""


def is_device_failure(error: BaseException) -> bool:
    """Return whether a GPU has failed, or the connection between GPUs, by what the error says: torch raises most of
    these as bare `RuntimeError`s. The process is of no use afterwards, since CUDA repeats such an error at every
    call."""
    text = str(error).lower()
    failed, own = (any(word in text for word in words) for words in (DEVICE_FAILED, USERS_OWN))
    return isinstance(error, RuntimeError) and failed and not own


def is_refusal(error: BaseException) -> bool:
    """Return whether an error refuses the run as it was asked for: the user has to change something."""
    return isinstance(error, PenstockError) and error.exit_code == ConfigError.exit_code


def how_ended(code: int) -> str:
    """The exit code of a process, or the signal that killed it.

    >>> how_ended(2), how_ended(-9)
    ('exit code 2', 'killed by SIGKILL')
    """
    return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"


def suggest(word: str, known: Iterable[str]) -> str:
    """Make a half sentence for "unknown name" errors: the nearest known name, and all of them if they are few."""
    names = sorted(known)
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return f"{hint} Known: {', '.join(names)}." if len(names) <= 24 else hint
