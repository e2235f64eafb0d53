"""The program that keeps a fence: process 1 behind it, an interpreter that stands ready and forks for each execution.

Its text is handed to a bare Python (`fence.py`), so it imports nothing of Penstock. For each message of the worker:

    worker ─▶ seconds, five files ─▶ keeper:  fresh /tmp, fork into a PID namespace of its own ─▶ child
    worker ◀─ how it ended ◀ keeper:  wait or kill, /tmp away             child:  limits, no capabilities, seccomp, code

Nothing of an execution outlives it. The child is process 1 of its namespace, so the kernel kills all its processes with
it, before `wait4` returns; the only place where it could write is a tmpfs that is unmounted then; and the keeper never
reads a byte that an execution has written or is to read, so no later fork finds one in its memory. If /tmp cannot be
unmounted, the execution counts and the worker takes the fence down (`is_spent`); if another of these steps fails, the
keeper ends, and its fence with it.

The code's own process says what the code returned. That is data: nothing here decides whether it is right.
"""

import _socket  # what `socket` is made of: that takes 6 ms longer to load, a tenth of a cold execution
import atexit
import ctypes
import fcntl
import gc
import json
import os
import resource
import select
import signal
import sys
import time
import types
from collections.abc import Callable
from typing import Any, NoReturn

CLONE_NEWPID = 0x20000000
NO_SUID_DEVICES_PROGRAMS = 2 | 4 | 8
READ_ONLY_AS_IT_IS = 1 | 2 | 8 | 32 | 4096
"""Mount flags: `MS_RDONLY`, no programs, and a remount of this one mount."""
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
CAPABILITIES_V3 = 0x20080522
REQUEST, ANSWER = 3, 4
"""File descriptors of the child, after its standard ones."""
NUM_FILES = 5
MAX_TEXT = 2_000
"""Largest number of characters of an exception that are passed on."""

SOURCES: dict[str, str] = {}
"""Sources of what is run here, for tracebacks."""

libc = ctypes.CDLL(None, use_errno=True)


def checked(name: str, *arguments: Any) -> None:
    """Call libc. Raises `OSError`."""
    if getattr(libc, name)(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def prctl(option: int, argument: int, pointer: Any = 0) -> None:
    checked("prctl", option, argument, pointer, 0, 0)


class Keeper:
    """Serves executions one after the other until the worker's end of the socket is closed."""

    def __init__(self, control: _socket.socket, limits: dict[str, Any], programs: dict[str, str]) -> None:
        self.control = control
        self.limits = limits
        self.programs = {kind: bytes.fromhex(program) for kind, program in programs.items()}
        self.program = b""
        self.own = os.pidfd_open(os.getpid())
        self.interrupts = 0
        """Events of the worker's connection at which an execution is ended: that it ends, which poll always reports."""
        self.tmp = f"size={limits['tmp_bytes']},nr_inodes={limits['tmp_files']},mode=700".encode()

    def serve(self) -> None:
        self.control.send(b"ready")
        kind = self.control.recv(64).decode()
        if not kind:
            return
        self.program = self.programs[kind]
        if kind == "uncounted":  # shared memory without a file by another name
            checked("umount2", b"/dev/zero", MNT_DETACH)
        while True:
            message, ancillary, _, _ = self.control.recvmsg(64, _socket.CMSG_LEN(4 * NUM_FILES))
            if not message or not ancillary:
                return
            files = memoryview(ancillary[0][2]).cast("i").tolist()
            self.control.send(json.dumps(self._execute(files, float(message))).encode())

    def _execute(self, files: list[int], wall_s: float) -> dict[str, Any]:
        started = time.perf_counter()
        checked("mount", b"tmpfs", b"/tmp", b"tmpfs", NO_SUID_DEVICES_PROGRAMS, self.tmp)
        facts = self._fork(files, wall_s)
        facts["is_spent"] = libc.umount2(b"/tmp", 0) < 0
        return facts | {"seconds": time.perf_counter() - started}

    def _fork(self, files: list[int], wall_s: float) -> dict[str, Any]:
        """Fork into a PID namespace of its own, and wait for the end."""
        checked("unshare", CLONE_NEWPID)
        pid = os.fork()
        if pid == 0:
            self.run_child(files)
        checked("setns", self.own, CLONE_NEWPID)
        for file in files:
            os.close(file)
        in_time = self._wait(pid, wall_s)
        _, status, usage = os.wait4(pid, 0)
        return {"status": status, "in_time": in_time, "cpu_s": usage.ru_utime + usage.ru_stime}

    def run_child(self, files: list[int]) -> NoReturn:
        """Run, and end. A failure before the fence stands ends the process without running anything."""
        code = 70
        try:
            code = self.run(files)
        except BaseException as error:  # noqa: BLE001 - nothing may return to where the keeper was
            os.write(2, f"{type(error).__name__}: {error}\n".encode(errors="replace"))
        finally:
            os._exit(code)

    def run(self, files: list[int]) -> int:
        """Fence in, and run; return the exit code."""
        take_files(files)
        fence_in(self.limits, self.program)
        with open(REQUEST, "rb") as file:
            request = json.loads(file.read())
        return run_calls(request) if "calls" in request else run_main(request["source"])

    def _wait(self, pid: int, wall_s: float) -> bool:
        """Wait for a process; return whether it ended in time. If not, or when the worker is gone, it is killed."""
        process = os.pidfd_open(pid)
        poll = select.poll()
        poll.register(process, select.POLLIN)
        poll.register(self.control, self.interrupts)
        ready = self.polled(poll, wall_s)
        if process not in ready:
            os.kill(pid, signal.SIGKILL)
        os.close(process)
        return bool(ready)

    def polled(self, poll: select.poll, wall_s: float) -> list[int]:
        """Wait for one of the files; return those that are ready."""
        return [file for file, _ in poll.poll(wall_s * 1000)]


def take_files(files: list[int]) -> None:
    """Move the files to 0, 1, … and close every other file, the keeper's socket too."""
    high = [fcntl.fcntl(file, fcntl.F_DUPFD, 64) for file in files]
    for number, file in enumerate(high):
        os.dup2(file, number)
    os.closerange(len(files), 1 << 20)


def fence_in(limits: dict[str, Any], program: bytes) -> None:
    """Set what the namespaces do not do: limits, no capabilities, the seccomp filter."""
    os.setsid()
    os.chdir("/tmp")
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    cpu_s = -int(-limits["cpu_s"] // 1)
    for name, value in {
        "AS": limits["memory_bytes"],
        "CPU": cpu_s,
        "NPROC": limits["num_processes"] + 1,  # the keeper counts too
        "FSIZE": limits["file_bytes"],
        "NOFILE": limits.get("num_descriptors", 256),
        "CORE": 1,  # 0 still calls the host's program for crashes (core(5)), 1 never does
        "MEMLOCK": 0,
        "MSGQUEUE": 0,
        "SIGPENDING": 256,
        "RTPRIO": 0,
        "NICE": 0,
    }.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0)
    checked("capset", (ctypes.c_uint32 * 2)(CAPABILITIES_V3, 0), (ctypes.c_uint32 * 6)())
    install(program)


class Filter(ctypes.Structure):
    """The C structure `struct sock_fprog`."""

    _fields_ = (("length", ctypes.c_ushort), ("lines", ctypes.c_char_p))


def install(program: bytes) -> None:
    prctl(PR_SET_SECCOMP, 2, ctypes.byref(Filter(len(program) // 8, program)))


def run_main(source: str) -> int:
    """Run a program like `python FILE`; return the exit code."""
    code = guarded(lambda: execute(source, "__main__"))
    return finished(code)


def run_calls(request: dict[str, Any]) -> int:
    """Run calls and write a line of JSON for each: ["value", DATA], or a kind and a text that say why there is none."""
    problem, module = attempt(execute, request["source"], "candidate")
    if problem is not None:
        report("unready", problem)
        return 1
    for arguments in request["calls"]:
        problem, value = attempt(called, module, request["function"], arguments)
        if problem is not None:
            report("raised", problem)
            continue
        problem, line = attempt(packed, value)
        if problem is None:
            write(line)
        else:
            report("not_data", problem)
    return 0


def execute(source: str, name: str) -> types.ModuleType:
    """Run the text as a new module of this name."""
    module = types.ModuleType(name)
    module.__dict__["__file__"] = file = f"<{name}>"
    sys.modules[name] = module
    SOURCES[file] = source
    exec(compile(source, file, "exec", dont_inherit=True), module.__dict__)
    return module


def called(module: types.ModuleType, name: str, arguments: list[Any]) -> Any:
    """Call `solve`, or `Solution.solve` on a new object."""
    target: Any = module
    for part in name.split("."):
        target = getattr(target() if isinstance(target, type) else target, part)
    return target(*arguments)


def packed(value: Any) -> str:
    return json.dumps(["value", value], allow_nan=False)


def attempt(call: Callable[..., Any], *arguments: Any) -> tuple[str | None, Any]:
    """Call a function; return `(None, value)`, or what it raised as a text."""
    try:
        return None, call(*arguments)
    except BaseException as error:  # noqa: BLE001 - the code is a model's
        return described(error), None


def described(error: BaseException) -> str:
    try:
        message = str(error)
    except BaseException:  # noqa: BLE001 - the class is the model's
        message = ""
    return f"{type(error).__name__}: {message}"[:MAX_TEXT]


def report(kind: str, text: str) -> None:
    write(json.dumps([kind, text]))


def write(line: str) -> None:
    left = line.encode() + b"\n"
    while left:
        left = left[os.write(ANSWER, left) :]


def guarded(call: Callable[[], Any]) -> int:
    """Run a call; return the exit code that Python has for how it ends."""
    try:
        call()
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    except BaseException as error:  # noqa: BLE001 - the code is a model's
        if isinstance(error, MemoryError):
            report("memory", "MemoryError")
        show(error)
        return 1
    return 0


def show(error: BaseException) -> None:
    """Print the traceback, without the frames of this file."""
    import linecache
    import traceback

    for file, source in SOURCES.items():
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    trace = error.__traceback__
    for _ in range(3):
        trace = trace.tb_next if trace is not None else None
    traceback.print_exception(type(error), error, trace)


def finished(code: int) -> int:
    """Do what an interpreter does at its end: wait for threads, call exit functions, empty its buffers."""
    threading = sys.modules.get("threading")
    if threading is not None:
        guarded(threading.__dict__["_shutdown"])
    guarded(atexit._run_exitfuncs)
    flushed = [guarded(stream.flush) for stream in (sys.stdout, sys.stderr, sys.__stdout__) if stream is not None]
    return code or max(flushed)


def rehearse() -> None:
    """Run once what executions run, so that forks find what these load and adapt, instead of each doing it."""
    for _ in range(20):
        request = json.loads(json.dumps({"source": "def f(x):\n    return [x]\n", "function": "f", "calls": [[1]]}))
        _, module = attempt(execute, request["source"], "candidate")
        attempt(packed, called(module, "f", [1]))
        attempt(execute, "1 / 0", "candidate")
    sys.modules.pop("candidate")
    SOURCES.clear()
    import traceback

    traceback.format_exception(ValueError())


def guard_devices(devices: list[str]) -> None:
    """Protect the times of device nodes, which all fences see; the devices can be read and written as before. bwrap has
    no option for it: what it remounts read-only is no device any more."""
    for device in devices:
        checked("mount", None, device.encode(), None, READ_ONLY_AS_IT_IS, None)


def main() -> None:
    options = json.loads(sys.argv[1])
    del sys.argv[1:]
    os.environ.clear()
    control = _socket.socket(fileno=options["control"])
    os.set_inheritable(options["control"], False)
    if "workspace" in options:
        sys.modules["penstock.workers.sandbox.inside"] = sys.modules["__main__"]
        source = options["workspace"]["source"]
        keeper: Keeper = execute(source, "workspace").__dict__["WorkspaceKeeper"](control, options)
    else:
        keeper = Keeper(control, options["limits"], options["programs"])
    if "counted" not in options:
        guard_devices(options["devices"])
    if options["rehearse"]:
        rehearse()
    gc.collect()
    gc.freeze()  # else the collector of a fork writes to these objects, and their pages are copied
    keeper.serve()


if __name__ == "__main__":
    main()
