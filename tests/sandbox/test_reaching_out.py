"""Code that tries to get at the host: network, files, processes, the kernel's rarer calls. Nothing of it works."""

import errno
import os
import platform
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.workers.sandbox.execution import Failed, Value
from penstock.workers.sandbox.fence import DEVICES

pytestmark = pytest.mark.real

PRELUDE = """
import ctypes, errno, os, socket, struct, subprocess, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(*arguments):
    libc.syscall.restype = ctypes.c_long
    result = libc.syscall(*[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments])
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
"""
X86, ARM = "x86_64", "aarch64"
COLUMN = {X86: 0, ARM: 1}[platform.machine()]


@pytest.fixture
def reached(fence):
    """Whether code reached what it tried to: it returns, and does not raise and is not ended."""

    def reached(body: str, *arguments: object) -> bool:
        lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
        source = f"{PRELUDE}\ndef attack(*given):\n{lines}\n    return 'reached'\n"
        result = fence.call(source, "attack", [list(arguments)])[0]
        if isinstance(result, Failed) and result.reason in ("unready", "not_data"):
            raise AssertionError(f"the attack itself is wrong: {result}")
        assert not (isinstance(result, Failed) and "NameError" in result.text), result
        assert not (isinstance(result, Failed) and "SyntaxError" in result.text), result
        (again,) = fence.call("def f(): return 1", "f", [[]])
        assert again == Value(1)
        return isinstance(result, Value)

    return reached


@pytest.fixture
def listeners() -> Iterator[dict[str, object]]:
    """What an attack would like to speak to, on this host."""
    directory = tempfile.mkdtemp(prefix="ray-attack-", dir="/tmp")
    path = f"{directory}/raylet"
    name = f"penstock-attack-{os.getpid()}"
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket(socket.AF_UNIX) as file,
    ):
        abstract.bind(f"\0{name}")
        abstract.listen()
        file.bind(path)
        os.chmod(path, 0o777)
        os.chmod(directory, 0o755)
        file.listen()
        yield {"port": tcp.getsockname()[1], "abstract": name, "path": path}
    os.unlink(path)
    os.rmdir(directory)


def test_the_way_to_write_attacks_lets_an_innocent_one_through(reached):
    assert reached(f"os.getcwd()\ncall({(39, 172)[COLUMN]})")


def test_no_connection_leads_out(reached, listeners):
    port, name, path = listeners["port"], listeners["abstract"], listeners["path"]
    assert not reached(f"socket.create_connection(('127.0.0.1', {port}), 1)")
    assert not reached(f"s = socket.socket(socket.AF_UNIX)\ns.connect('\\0{name}')")
    assert not reached(f"s = socket.socket(socket.AF_UNIX)\ns.connect({path!r})")
    assert not reached("s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\ns.sendto(b'x', ('127.0.0.1', 53))")


@pytest.mark.parametrize(
    "family", [1, 2, 10, 16, 17, 38, 40], ids=["unix", "inet", "inet6", "netlink", "packet", "alg", "vsock"]
)
def test_no_socket_of_any_family_is_made_even_by_ctypes(reached, family):
    assert not reached(f"if libc.socket({family}, 1, 0) < 0: raise OSError(ctypes.get_errno(), 'refused')")
    assert not reached(f"call({(41, 198)[COLUMN]}, {family}, 3, 0)")


@pytest.mark.parametrize("family", [2, 10, 16, 40], ids=["inet", "inet6", "netlink", "vsock"])
@pytest.mark.parametrize("kind", [1, 2, 3, 5], ids=["stream", "dgram", "raw", "seqpacket"])
def test_no_pair_of_another_family_is_made(fence, family, kind):
    """The filter refuses it: EPERM comes before the kernel looks for the family, whose module it might load."""
    attack = f"try:\n        return call({(53, 199)[COLUMN]}, {family}, {kind}, 0, (ctypes.c_int * 2)())"
    source = f"{PRELUDE}\ndef attack():\n    {attack}\n    except OSError as error:\n        return error.errno"
    assert fence.call(source, "attack", [[]]) == [Value(errno.EPERM)]


def test_descriptors_are_not_passed(reached):
    pair = "import array\na, b = socket.socketpair()\n"
    rights = "[(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [0]))]"
    assert not reached(pair + f"a.sendmsg([b'x'], {rights})")
    assert not reached(pair + "a.send(b'x')\nb.recvmsg(1)")


def test_no_fence_tells_another_anything_by_a_device(reached):
    for device in DEVICES:
        assert not reached(f"os.utime({device!r})"), device
    assert not reached("open('/dev/null', 'w').close()\nos.utime(os.open('/dev/null', os.O_WRONLY))")
    assert reached("open('/dev/null', 'w').write('x')\nassert len(open('/dev/urandom', 'rb').read(8)) == 8")
    assert reached("assert open('/dev/zero', 'rb').read(2) == bytes(2)\nopen('/dev/random', 'wb').write(b'x')")


def test_files_of_the_host_are_not_locked_leased_or_watched(reached):
    file = f"import fcntl\nfile = os.open({os.__file__!r}, os.O_RDONLY)\n"
    assert not reached(file + "fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)")
    assert not reached(file + "fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)")
    assert not reached(file + "fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)")
    assert not reached(file + "fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)")
    assert not reached(file + "fcntl.fcntl(file, 1036, bytes(8))")  # F_SET_RW_HINT
    watch = "fcntl.fcntl(os.open('/usr/lib', os.O_RDONLY), fcntl.F_NOTIFY, fcntl.DN_ACCESS)"
    assert not reached(f"import fcntl\n{watch}")
    assert reached("import sqlite3\nbase = sqlite3.connect('/tmp/x.db')\nbase.execute('create table t (a)')")


def test_of_usr_only_programs_and_libraries_are_there(reached):
    for path in ("/usr/share/doc", "/usr/src", "/usr/include", "/usr/games", "/usr/sbin", "/usr/local/src"):
        assert not reached(f"os.lstat({path!r})"), path
    assert reached("import zoneinfo\nos.listdir('/usr/bin'), os.listdir('/usr/lib')")


def test_a_pair_of_sockets_reaches_nobody_else(reached, listeners):
    assert reached("a, b = socket.socketpair()\na.send(b'x')\nassert b.recv(1) == b'x'")
    port, path = listeners["port"], listeners["path"]
    assert not reached(f"a, b = socket.socketpair()\na.close()\nb.connect({path!r})")
    datagrams = "a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
    assert not reached(datagrams + f"a.sendto(b'x', '\\0{listeners['abstract']}')")
    assert not reached(datagrams + f"a.sendto(b'x', ('127.0.0.1', {port}))")


def test_sockets_and_files_answer_what_programs_ask_them(reached):
    assert reached(
        """
import fcntl, shutil
a, b = socket.socketpair()
a.settimeout(1)
a.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack('ll', 1, 0))
b.send(b'xy')
assert struct.unpack('i', fcntl.ioctl(a, 0x541B, bytes(4))) == (2,)
os.set_inheritable(a.fileno(), True)
os.set_inheritable(a.fileno(), False)
assert not os.isatty(1)
shutil.get_terminal_size()
try: fcntl.ioctl(1, 0x40049409, 0)
except OSError as error: assert error.errno != errno.EPERM
"""
    )


@pytest.mark.parametrize("place", ["/tmp", "/dev/shm", "/var/tmp", str(Path.cwd())])
def test_files_of_the_host_are_not_there(reached, place):
    with tempfile.NamedTemporaryFile(dir=place, prefix="penstock-canary-") as canary:
        os.chmod(canary.name, 0o666)
        name = canary.name
        assert not reached(f"open({name!r}).read()")
        assert not reached(f"open({name!r}, 'r+').write('x')")
        assert not reached(f"os.symlink({name!r}, '/tmp/link')\nopen('/tmp/link').read()")
        assert not reached(f"os.symlink('/', '/tmp/root')\nopen('/tmp/root' + {name!r}).read()")
        assert not reached(f"os.link({name!r}, '/tmp/link')")
        assert not reached(f"open('/usr/../../../..' + {name!r}).read()")
        assert Path(name).read_bytes() == b""


PATHS = (
    "/proc /proc/1/environ /proc/self/mem /proc/self/root/etc/passwd /sys /etc/passwd /etc/shadow /home /var /run "
    "/root/.bashrc /dev/kmsg /dev/mem /dev/fuse /dev/kvm /dev/tty /dev/pts /dev/fd/0 /oldroot /newroot /tmp/ray"
)


@pytest.mark.parametrize(
    "path", [path for path in PATHS.split() if not os.path.realpath(sys.base_prefix).startswith(path)]
)
def test_paths_of_the_host_are_not_there(reached, path):
    assert not reached(f"os.lstat({path!r})")


def test_nothing_but_tmp_can_be_written(reached):
    for path in ("/", "/usr", "/usr/lib", "/etc", "/dev", "/bin", os.path.dirname(os.__file__)):
        assert not reached(f"open({path!r} + '/x', 'w')"), path
        assert not reached(f"os.mkdir({path!r} + '/y')"), path
    assert not reached(f"open({os.__file__!r}, 'a')")
    assert not reached(f"os.chmod({os.__file__!r}, 0o777)")
    assert not reached(f"os.utime({os.__file__!r})")
    assert not reached("os.unlink(sys.executable)")
    assert reached("open('/tmp/x', 'w').write('x')\nopen('/dev/shm/y', 'w').write('y')")


def test_programs_and_devices_cannot_be_made(reached):
    copy = "import shutil\nshutil.copy('/bin/true', '/tmp/program')\nos.chmod('/tmp/program', 0o4777)\n"
    assert not reached(copy + "subprocess.run(['/tmp/program'], check=True)")
    assert not reached("os.mknod('/tmp/device', 0o020666, os.makedev(1, 1))\nopen('/tmp/device', 'rb').read(1)")


CALLS = {
    "unshare user": ((272, 97), 0x10000000),
    "unshare mount": ((272, 97), 0x00020000),
    "clone user": ((56, 220), 0x10000011, 0, 0, 0, 0),
    "clone network": ((56, 220), 0x40000011, 0, 0, 0, 0),
    "clone3": ((435, 435), 0, 88),
    "setns": ((308, 268), 0, 0),
    "umount": ((166, 39), "b'/tmp'", 2),
    "mount": ((165, 40), "b'x'", "b'/tmp'", "b'tmpfs'", 0, 0),
    "open_tree": ((428, 428), -100, "b'/'", 1),
    "fsopen": ((430, 430), "b'proc'", 0),
    "pivot_root": ((155, 41), "b'/tmp'", "b'/tmp'"),
    "chroot": ((161, 51), "b'/tmp'"),
    "setuid": ((105, 146), 0),
    "setgroups": ((116, 159), 0, 0),
    "capset": ((126, 91), 0, 0),
    "ptrace": ((101, 117), 0, 0, 0, 0),
    "process_vm_readv": ((310, 270), 1, 0, 0, 0, 0, 0),
    "process_vm_writev": ((311, 271), 1, 0, 0, 0, 0, 0),
    "kcmp": ((312, 272), 1, 1, 0, 0, 0),
    "pidfd_getfd": ((438, 438), 0, 0, 0),
    "bpf": ((321, 280), 0, 0, 0),
    "io_uring_setup": ((425, 425), 1, 0),
    "io_uring_enter": ((426, 426), 0, 0, 0, 0, 0, 0),
    "perf_event_open": ((298, 241), 0, 0, -1, -1, 0),
    "userfaultfd": ((323, 282), 0),
    "keyctl": ((250, 219), 0, -3, 1),
    "add_key": ((248, 217), "b'user'", "b'x'", "b'x'", 1, -4),
    "memfd_create": ((319, 279), "b'x'", 0),
    "memfd_secret": ((447, 447), 0),
    "shmget": ((29, 194), 0, 4096, 0o1600),
    "msgget": ((68, 186), 0, 0o1600),
    "semget": ((64, 190), 0, 1, 0o1600),
    "mq_open": ((240, 180), "b'x'", 0o102, 0o600, 0),
    "execveat": ((322, 281), 0, "b''", 0, 0, 0x1000),
    "open_by_handle_at": ((304, 265), -100, 0, 0),
    "personality": ((135, 92), 0x0040000),
    "reboot": ((169, 142), 0, 0, 0, 0),
    "swapon": ((167, 224), "b'/tmp'", 0),
    "init_module": ((175, 105), 0, 0, 0),
    "kexec_load": ((246, 104), 0, 0, 0, 0),
    "syslog": ((103, 116), 3, 0, 0),
    "acct": ((163, 89), 0),
    "quotactl": ((179, 60), 0, 0, 0, 0),
    "clock_settime": ((227, 112), 0, 0),
    "sethostname": ((170, 161), "b'x'", 1),
    "fanotify_init": ((300, 262), 0, 0),
    "splice": ((275, 76), 0, 0, 0, 0, 0, 0),
    "vmsplice": ((278, 75), 0, 0, 0, 0),
    "landlock_create_ruleset": ((444, 444), 0, 0, 1),
    "seccomp": ((317, 277), 2, 0, 0),
    "seccomp by prctl": ((157, 167), 22, 2, 0),
    "huge pages": ((9, 222), 0, 1 << 21, 3, 0x40022, -1, 0),
    "dumpable": ((157, 167), 4, 0, 0, 0, 0),
    "core scheduling": ((157, 167), 62, 1, 0, 0, 0),
    "filter of a socket": ((54, 208), 0, 1, 26, 0, 0),
    "bpf filter of a socket": ((54, 208), 0, 1, 50, 0, 0),
    "size of a buffer": ((54, 208), 0, 1, 7, 0, 0),
    "names of networks": ((16, 29), 0, 0x8910, 0),
    "a module for vlans": ((16, 29), 0, 0x8982, 0),
    "a module for bridges": ((16, 29), 0, 0x89A0, 0),
    "wireless networks": ((16, 29), 0, 0x8B01, 0),
    "one that does not exist yet": ((600, 600), 0),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_with_which_kernels_were_broken_are_refused(fence, name):
    numbers, *arguments = CALLS[name]
    words = ", ".join(map(str, [numbers[COLUMN], *arguments]))
    attack = f"try:\n        return call({words})\n    except OSError as error:\n        return error.errno"
    source = f"{PRELUDE}\ndef attack():\n    {attack}"
    number = {"clone3": 38}.get(name, 1)  # ENOSYS, EPERM: by the filter, before the kernel looks at what is given
    assert fence.call(source, "attack", [[]]) == [Value(number)]


@pytest.mark.skipif(platform.machine() != X86, reason="32-bit and x32 calls are x86's")
def test_calls_by_the_kernels_other_doors_do_not_pass(reached):
    """int 0x80 takes 32-bit numbers; numbers with bit 30 are those of x32."""
    machine_code = "b'\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\xc3'"
    body = f"""
import mmap
page = mmap.mmap(-1, 4096, prot=7)
page.write({machine_code})
ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
"""
    assert not reached(body)
    assert not reached("call(0x40000000 + 39)")


def test_no_capability_is_there_or_can_be_had(reached):
    assert not reached("if libc.prctl(47, 2, 21, 0, 0) < 0: raise OSError(ctypes.get_errno(), 'refused')")
    assert not reached("os.setuid(0)")
    assert not reached("os.setresuid(0, 0, 0)")
    assert not reached("os.nice(-5)")
    assert not reached("import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))")
    assert not reached("import resource\nresource.setrlimit(resource.RLIMIT_NPROC, (1000, 1000))")


def test_no_other_process_is_seen_or_hit(reached):
    assert reached("assert os.getpid() == 1 and os.getppid() == 0")
    assert not reached("os.kill(2, 9)")
    assert not reached("os.kill(os.getppid() or 3, 9)")
    reached("os.kill(-1, 9)")


def test_the_input_cannot_be_changed(reached):
    assert not reached("os.write(0, b'x')")
    assert not reached("os.ftruncate(0, 1 << 30)")


def test_nothing_of_the_runs_environment_is_visible(fence):
    look = "[dict(os.environ), os.listdir('/tmp'), os.getcwd(), sys.argv, os.uname().nodename]"
    source = f"import os, sys\ndef look(): return {look}"
    assert fence.call(source, "look", [[]]) == [Value([{}, [], "/tmp", ["-c"], "sandbox"])]
