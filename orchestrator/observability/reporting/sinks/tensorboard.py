"""TensorBoard's files, without torch's `SummaryWriter`, which writes from a thread that prints the first error and
ends."""

import io
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.orchestrator.observability.reporting.sinks.sink import numbers
from penstock.orchestrator.run_directory.appended_file import AppendedFile
from penstock.orchestrator.run_directory.run_directory import RunDirectory


class TensorBoard:
    """An event file in `runs/<name>/tensorboard/`, one record a step."""

    def __init__(self, directory: RunDirectory) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # late: half a second
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._event, self._summary = Event, Summary
        name = f"events.out.tfevents.{int(time.time()):010}.{socket.gethostname()}.{os.getpid()}"
        self._file = AppendedFile(directory.tensorboard / name, "tensorboard", directory.losses, _open_below_run)
        self._append(file_version="brain.Event:2")

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in numbers(metrics).items()]
        self._append(step=step, summary=self._summary(value=values))

    def _append(self, **fields: Any) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        record = io.BytesIO()
        RecordWriter(record).write(self._event(wall_time=time.time(), **fields).SerializeToString())
        self._file.append(record.getvalue())

    def close(self) -> None:
        self._file.close()


def _open_below_run(file: Path) -> int:
    """Open a new file, or one that was closed before. Raises `OSError`; where the run's directory is away, none is
    made."""
    file.parent.mkdir(exist_ok=True)
    return os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
