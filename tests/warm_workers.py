"""Processes that are forked from one which has imported the heavy packages already.

A worker of a real run spends five to ten seconds of CPU on importing torch, transformers and Ray, a vLLM engine twenty,
and the tests start hundreds of them. A server imports them once, and forks:

    test ───▶ DIRECTORY/python -m MODULE …                          ─┐  arguments, environment,
    spawn ──▶ DIRECTORY/python -c CODE …                            ─┼───── open files ─────▶  server
    raylet ─▶ DIRECTORY/python warm_client.py default_worker.py …   ─┘                           │ fork
                    │ warm_client.py: lives as long as the fork                                  ▼
                    └────────────────── signals, its own end ──────────────▶  default_worker.py, MODULE or CODE

`DIRECTORY/python` takes the arguments of Python: tests start ranks, drivers and benchmarks with it, and
`multiprocessing` starts the processes of vLLM with it, in the forks and in tests that ask for the fixture `warm_spawn`.
What a fork starts by `sys.executable` is a fork: so are the nodes of the tests' clusters, and their workers, which they
set up by `warm_client.py`. Each has its own environment, and lives where its caller does: on a machine of
`tests/machines`, if it is on one. Starts as users see them are tested without it: `penstock run` in a shell,
`ray job submit`, an engine of vLLM. Used by `tests/conftest.py`, by `ray_cluster.py`, and by
`tests/machines/ray_nodes.py` for Ray on machines.
"""

import fcntl
import gc
import json
import marshal
import multiprocessing
import os
import select
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

CLOCK_AHEAD_S = "PENSTOCK_TEST_CLOCK_AHEAD_S"
"""Environment variable of a machine: its wall clock is ahead by so much, for all that Python asks it."""
CLIENT = str(Path(__file__).with_name("warm_client.py"))
"""What Ray is told to set up workers by."""
EXECUTABLE = "python"
"""Name of the command, beside the socket."""
START_S = 900.0
MAX_REQUEST = 1 << 17
MAX_FILES = 64
STARTED: list["subprocess.Popen[bytes]"] = []
"""Processes that this process started. It does not wait for them."""
USERS = 0x10000000
"""The kernel's flag of a namespace of users: who mounts without being root is in one."""
HIGH = 512
"""Least number of descriptors beyond those that a program is started with."""
MODULES = (
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen2.tokenization_qwen2",
    "pyarrow.compute",
    "pyarrow.parquet",
    "ray._private.workers.default_worker",
    "ray._private.arrow_serialization",
    "ray._common.pydantic_compat",
    "ray._common.usage.usage_lib",
    "ray.cluster_utils",
    "ray.dashboard.agent",
    "ray.dashboard.http_server_agent",
    "ray.dashboard.optional_utils",
    "ray._private.runtime_env.plugin_schema_manager",
    "pyarrow.json",
    "pydantic.v1",
    "peft",
    "math_verify",
    "reasoning_gym.factory",
    "reasoning_gym",
    "penstock.workers.trainer.assembly",
    "penstock.workers.trainer.engines.fsdp",
    "penstock.workers.trainer.checkpointing.saver",
    "penstock.workers.rollout.engine_hf",
    "penstock.orchestrator.run",
    "penstock.workers.rollout.rollout_actor",
    "penstock.workers.prompts.prompts_actor",
    "penstock.workers.reward.reward_actor",
    "penstock.workers.compute",
    "penstock.store.service.store_actor",
)
VLLM_MODULES = (
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.model_executor.models.qwen2",
)
"""Imported before the first fork. None of them starts a thread, or draws an id of Ray's: all forks would draw the same
next ones, as they would after `ray.scripts.scripts`."""
QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
"""What vLLM reads while it is imported, as `engine_vllm.py` has it."""


def warm_python(directory: Path, ends_with: int, python: str = sys.executable, modules: Sequence[str] = ()) -> Path:
    """The path of a command like `python`. `directory`: of a short path, for a socket. All processes that name the same
    one share a server, which the first of them starts. It ends with the process `ends_with`, and removes the directory.
    `modules`: those that it imports in place of the usual ones, where `python` is of another environment.
    """
    directory.mkdir(mode=stat.S_IRWXU, exist_ok=True)
    path, command = directory / "socket", directory / EXECUTABLE
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # for `START_S` at most
        if not path.exists():
            command.write_text(
                f"#!{sys.executable} -IS\nimport sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
                f"from warm_client import run\nsys.exit(run({str(path)!r}, sys.argv[1:]))\n"
            )
            command.chmod(stat.S_IRWXU)
            _start(path, [python, __file__, str(path), str(ends_with), *modules])
    return command


def _start(path: Path, words: Sequence[str]) -> None:
    with open(f"{path}.log", "wb") as log:
        server = subprocess.Popen(words, stdin=subprocess.DEVNULL, stderr=log, env={**QUIET, **os.environ})
    STARTED.append(server)
    deadline = time.monotonic() + START_S
    while not path.exists():
        if server.poll() is not None or time.monotonic() > deadline:
            server.kill()
            said = Path(f"{path}.log").read_text(errors="replace")
            raise RuntimeError(f"the server of warm workers did not start; its exit status: {server.poll()}; {said}")
        time.sleep(0.05)


def serve(path: str, ends_with: int, modules: Sequence[str]) -> None:
    """Fork for whoever asks, as long as the process `ends_with` lives."""
    import importlib

    # Ray reads them while it is imported: a worker that will be told its job, and ends with the process of this number,
    # which every machine has. That it ends with its raylet is the caller's business. Agents see it by a pipe of theirs.
    os.environ.update(RAY_JOB_ID="ffffffff", RAY_RAYLET_PID="1", RAY_enable_pipe_based_agent_to_parent_health_check="1")
    for name in modules or MODULES:
        importlib.import_module(name)
    if not modules and importlib.util.find_spec("vllm"):
        for name in VLLM_MODULES:
            importlib.import_module(name)
    assert threading.active_count() == 1, "a fork would lose threads"
    gc.collect()
    gc.freeze()  # the collector of a fork looks at what the fork has made, and leaves the shared pages shared
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who is interrupted at a terminal needs it until it has cleaned up
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # each caller is told by its worker, so nobody waits for it here
    sys.executable = str(Path(path).with_name(EXECUTABLE))
    multiprocessing.set_executable(sys.executable)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path + ".new")
        listener.listen(64)
        os.rename(path + ".new", path)
        owner = os.pidfd_open(ends_with)
        while True:
            ready, _, _ = select.select([listener, owner], [], [])
            if owner in ready:
                shutil.rmtree(Path(path).parent, ignore_errors=True)
                return
            caller, _ = listener.accept()
            try:
                forked = fork_for(caller)
            except OSError:  # the caller has ended already, or its machine
                caller.close()
                continue
            if forked == 0:
                listener.close()
                os.close(owner)
                become(caller)
            caller.close()


def _set_clock_ahead(seconds: float) -> None:
    real, real_ns = time.time, time.time_ns
    time.time = lambda: real() + seconds
    time.time_ns = lambda: real_ns() + int(seconds * 1e9)


def fork_for(caller: socket.socket) -> int:
    """As `os.fork`; the child lives where the caller does, on this machine or on one that is made of namespaces."""
    from machines.enter import KINDS, join

    pid = _peer(caller)
    if _is_with(pid, "pid"):
        with _process(pid) as there:
            forked = os.fork()
            if forked == 0:
                try:
                    if not _is_with(pid, "mnt"):  # it has mounted something for itself: `tests/tmpfs.py`
                        join(there, USERS | KINDS["mount"])
                except OSError:  # the caller has ended
                    os._exit(1)
        return forked
    with _process(pid) as there, _process(os.getpid()) as here:
        join(there, KINDS["pid"])  # for children alone: the server stays where it is
        forked = -1
        try:
            forked = os.fork()
        finally:
            if forked:
                join(here, KINDS["pid"])
        if forked == 0:
            try:
                join(there, sum(flag for kind, flag in KINDS.items() if kind != "pid"))
            except OSError:
                os._exit(1)
    return forked


def _is_with(pid: int, kind: str) -> bool:
    """A process is in the same namespace as this one."""
    return os.stat(f"/proc/{pid}/ns/{kind}").st_ino == os.stat(f"/proc/self/ns/{kind}").st_ino


@contextmanager
def _process(pid: int) -> Iterator[int]:
    """A descriptor that refers to it."""
    descriptor = os.pidfd_open(pid)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def become(caller: socket.socket) -> None:
    """Run the caller's program with its environment and its open files; end when the caller ends."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with suppress(OSError):  # the caller has ended
        _lead_as(caller)
    message, files, _, _ = socket.recv_fds(caller, MAX_REQUEST, MAX_FILES)
    request = marshal.loads(message)
    caller = socket.socket(fileno=_moved(caller.detach(), HIGH))
    for file, number in zip([_moved(file, HIGH) for file in files], request["files"], strict=True):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    if group := os.environ.get("PENSTOCK_COSTS_GROUP"):  # see costs.py
        with suppress(OSError):
            Path(group, "cgroup.procs").write_text(str(os.getpid()))
    sys.path[1:1] = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    arguments = request["arguments"]
    if arguments[0] == CLIENT:
        arguments = set_up(arguments[1:])
    if ahead_s := os.environ.get(CLOCK_AHEAD_S):
        _set_clock_ahead(float(ahead_s))
    if (threads := os.environ.get("OMP_NUM_THREADS")) and (torch := sys.modules.get("torch")):
        torch.set_num_threads(int(threads))  # it reads them when it is loaded
    if raylet := sys.modules.get("ray._raylet"):  # Ray's C++ has read the server's environment;
        raylet.Config.initialize("")  # whether a cluster asks for a token is there
    caller.send(str(os.getpid()).encode())
    threading.Thread(target=_end_with, args=(caller,), daemon=True).start()
    status = _status_of(arguments)
    threading._shutdown()  # type: ignore[attr-defined]  # as at Python's own end: executors end, other threads are waited for
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    caller.send(str(status).encode())
    os._exit(status)


def _lead_as(caller: socket.socket) -> None:
    """Lead a session or a process group where the caller leads one: a raylet kills the groups of its workers."""
    pid = _peer(caller)
    if os.getsid(pid) == pid:
        os.setsid()
    elif os.getpgid(pid) == pid:
        os.setpgid(0, 0)


def _peer(caller: socket.socket) -> int:
    """Number of the process at the other end."""
    pid, _, _ = struct.unpack("3i", caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(pid)


def _moved(file: int, above: int) -> int:
    """The open file under another descriptor."""
    moved = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, above)
    os.close(file)
    return moved


def _status_of(arguments: list[str]) -> int:
    """Run a program as `python [OPTIONS] PROGRAM …`, `-m MODULE …` or `-c CODE …` would."""
    import runpy
    import traceback

    is_safe = "-P" in arguments[:1]
    while arguments[0].startswith("-") and arguments[0] not in ("-m", "-c"):
        del arguments[: 2 if arguments[0] == "-X" else 1]
    kind, program = (arguments[0], arguments[1]) if arguments[0] in ("-m", "-c") else ("", arguments[0])
    sys.argv = {"-m": arguments[1:], "-c": ["-c", *arguments[2:]], "": arguments}[kind]
    sys.path[:1] = [] if is_safe else [os.getcwd() if kind else str(Path(program).parent)]

    try:
        if kind == "-m":
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        elif kind == "-c":
            exec(compile(program, "<string>", "exec"), sys.modules["__main__"].__dict__)
        else:
            runpy.run_path(program, run_name="__main__")
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


def use_warm_workers(ray_params: Any, head: bool) -> None:
    """Have the node that `ray start` is about to start set up warm workers. For `RAY_START_HOOK`."""
    ray_params.setup_worker_path = CLIENT


def set_up(arguments: Sequence[str]) -> list[str]:
    """What Ray's own `setup_worker.py` does for a worker of plain Python: take over the variables and the working
    directory of its runtime environment. The worker's program and what it is for."""
    import argparse

    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--serialized-runtime-env-context", default="{}")
    parser.add_argument("--language")
    known, program = parser.parse_known_args(arguments)
    context = json.loads(known.serialized_runtime_env_context)
    if prefix := context.get("command_prefix"):
        enter, directory, and_then = prefix  # the working directory of a job; workers of tests are no containers
        assert (enter, and_then) == ("cd", "&&")
        os.chdir(directory)
    os.environ.update(context.get("env_vars") or {})
    return program


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
