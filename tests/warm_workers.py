"""Processes that are forked from one which has imported the heavy packages already.

A worker of a real run spends five to ten seconds of CPU on importing torch and transformers, and the tests start
hundreds of them. The tests' cluster (`ray_cluster.py`) starts its workers by this file, which asks a server for a fork
of itself:

    raylet ─▶ warm_workers.py default_worker.py …  ── arguments, environment, stdio ──▶  server
                    │ lives as long as the worker                                           │ fork
                    └─────────── signals, its own end ──────────────────────▶  default_worker.py …

The worker runs Ray's own program, with its own environment. Tests that start ranks as processes use the same command.
Runs as users start them (`ray job submit`, Ctrl-C) are tested without it. Used by `tests/conftest.py`.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

SOCKET = "PENSTOCK_TEST_WARM_SOCKET"
"""Environment variable of the cluster: where the server listens."""
START_S = 180.0
MAX_REQUEST = 1 << 17
MODULES = (
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen2.tokenization_qwen2",
    "pyarrow.compute",
    "pyarrow.parquet",
    "penstock.workers.trainer.trainer",
    "penstock.workers.trainer.engines.fsdp",
    "penstock.workers.trainer.checkpointing.saver",
    "penstock.workers.rollout.engine_hf",
    "penstock.store.store",
)
"""Imported before the first fork. None of them starts a thread, and none imports Ray, which reads its environment while
it is imported."""


@contextmanager
def warm_python(directory: Path) -> Iterator[list[str]]:
    """The start of a command that runs a Python program in a fork. `directory`: of a short path, for a socket."""
    path = directory / "warm"
    server = subprocess.Popen([sys.executable, __file__, "serve", str(path)], stdin=subprocess.PIPE)
    try:
        deadline = time.monotonic() + START_S
        while not path.exists():
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server of warm workers did not start; its exit status: {server.poll()}")
            time.sleep(0.05)
        yield [sys.executable, "-I", "-S", __file__, "run", str(path)]
    finally:
        server.terminate()
        server.wait(30)


def serve(path: str) -> None:
    """Fork for whoever asks, as long as the process lives that started this one."""
    import importlib
    import select

    for name in MODULES:
        importlib.import_module(name)
    assert threading.active_count() == 1, "a fork would lose threads"
    assert "ray" not in sys.modules, "a fork would have the server's environment"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # each caller is told by its worker, so nobody waits for it here
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path + ".new")
        listener.listen(64)
        os.rename(path + ".new", path)
        while True:
            ready, _, _ = select.select([listener, sys.stdin], [], [])
            if sys.stdin in ready:
                return
            caller, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                become(caller)
            caller.close()


def become(caller: socket.socket) -> None:
    """Run the caller's program with its environment and its open files; end when the caller ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    message, files, _, _ = socket.recv_fds(caller, MAX_REQUEST, 3)
    request = json.loads(message)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    caller.send(str(os.getpid()).encode())
    threading.Thread(target=_end_with, args=(caller,), daemon=True).start()
    status = _status_of(request["arguments"])
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    caller.send(str(status).encode())
    os._exit(status)


def _status_of(arguments: list[str]) -> int:
    """Run a program as `python PROGRAM …` or `python -m MODULE …` would."""
    import runpy
    import traceback

    by_name = arguments[0] == "-m"
    sys.argv = arguments[1:] if by_name else arguments
    sys.path[0] = os.getcwd() if by_name else str(Path(arguments[0]).parent)

    try:
        if by_name:
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    except BaseException:  # noqa: BLE001 - whatever ends a program is printed, and told by its status
        traceback.print_exc()
        return 1
    return 0


def _end_with(caller: socket.socket) -> None:
    """A process whose caller was killed dies as it would have died itself."""
    with suppress(OSError):
        caller.recv(1)
    os.kill(os.getpid(), signal.SIGKILL)


def run(path: str, arguments: Sequence[str]) -> int:
    """Hand everything to the server, and live as long as the process that it forks; its exit status."""
    request = {"arguments": list(arguments), "environment": dict(os.environ), "directory": os.getcwd()}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(path)
        socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2])
        process = int(server.recv(64) or b"0")
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: os.kill(process, number))
        return int(server.recv(64) or b"137")


def set_up(arguments: Sequence[str]) -> list[str]:
    """What Ray's own `setup_worker.py` does for a worker of plain Python: take over the variables of its runtime
    environment. The worker's program and what it is for."""
    import argparse

    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--serialized-runtime-env-context", default="{}")
    parser.add_argument("--language")
    known, program = parser.parse_known_args(arguments)
    context = json.loads(known.serialized_runtime_env_context)
    assert not context.get("command_prefix"), "workers of tests are no containers"
    os.environ.update(context.get("env_vars") or {})
    return program


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        sys.exit(serve(sys.argv[2]))
    elif sys.argv[1] == "run":
        sys.exit(run(sys.argv[2], sys.argv[3:]))
    else:
        sys.exit(run(os.environ[SOCKET], set_up(sys.argv[1:])))
