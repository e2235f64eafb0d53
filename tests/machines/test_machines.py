"""Machines made of namespaces are as apart as real ones, and leave nothing behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.machines.cluster import ROOT, Cluster, machines
from tests.machines.machine import Machine
from tests.machines.namespaces import CommandFailed, CommandTimedOut, MachineEnded

pytestmark = [pytest.mark.real, pytest.mark.machines]

PYTHON = (sys.executable, "-IS")
PORT = 7000
CONNECT = """
import socket, sys
socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=float(sys.argv[3])).close()
"""
RECEIVE = """
import socket
listener = socket.create_server(("", 7000))
print("listening", flush=True)
while True:
    connection, _ = listener.accept()
    with connection:
        while connection.recv(1 << 16):
            pass
        connection.sendall(b"all")
"""
SEND = """
import socket, sys, time
begun = time.monotonic()
connection = socket.create_connection((sys.argv[1], 7000))
connection.sendall(bytes(int(sys.argv[2])))
connection.shutdown(socket.SHUT_WR)
assert connection.recv(3) == b"all"
print(time.monotonic() - begun)
"""


OWN_ADDRESS = """
import socket
way_out = socket.socket(type=socket.SOCK_DGRAM)
way_out.connect(("192.0.2.1", 1))
print(way_out.getsockname()[0])
"""
"""Program that finds this machine's address as Ray and others do, which works where there is a default route."""
BIND = """
import socket, time
listener = socket.socket(socket.AF_UNIX)
listener.bind("/tmp/socket")
print("bound", flush=True)
time.sleep(99)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    with machines(2, keep=[tmp_path_factory.getbasetemp()], shm=["8m", "16m"]) as cluster:
        yield cluster


@pytest.fixture
def receiver(cluster) -> Iterator[Machine]:
    """The first machine, where a program takes in what it is sent."""
    process = cluster[1].start([*PYTHON, "-c", RECEIVE], stdout=subprocess.PIPE)
    with process:
        assert process.stdout.readline() == "listening\n"
        yield cluster[1]
        process.kill()


def connect(machine: Machine, address: str, port: int = PORT, timeout_s: float = 20) -> int:
    """Exit status: 0 if it could."""
    command = [*PYTHON, "-c", CONNECT, address, str(port), str(timeout_s)]
    return machine.run(command, check=False).returncode


def send(machine: Machine, address: str, num_bytes: int) -> float:
    """Seconds until the other end had them."""
    return float(machine.run([*PYTHON, "-c", SEND, address, str(num_bytes)]).stdout)


def output(machine: Machine, command: str) -> str:
    return machine.run(["sh", "-c", command]).stdout.strip()


def devices(said: str) -> set[str]:
    return {link["ifname"] for link in json.loads(said)}


def test_machines_reach_each_other_by_address_and_by_name(cluster, receiver) -> None:
    assert connect(cluster[2], "10.77.0.1") == 0
    assert connect(cluster[2], "machine1") == 0


def test_a_machine_has_a_route_and_reaches_nothing_of_the_host(cluster) -> None:
    with socket.create_server(("", 0)) as listener:
        for entries in psutil.net_if_addrs().values():
            for entry in entries:
                if entry.family == socket.AF_INET:
                    assert connect(cluster[1], entry.address, listener.getsockname()[1]) != 0
        listener.settimeout(0)
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert devices(output(cluster[1], "ip -j link")) == {"lo", "eth0"}
    assert set(output(cluster[1], "ls /sys/class/net").split()) == {"lo", "eth0"}
    of_the_host = subprocess.run(["ip", "-j", "link"], capture_output=True, text=True, check=True).stdout
    assert not devices(of_the_host) & {"br0", "p1", "p2"}
    assert cluster[2].run([*PYTHON, "-c", OWN_ADDRESS]).stdout == "10.77.0.2\n"


def test_each_machine_has_its_own_name_files_memory_processes_and_uptime(cluster) -> None:
    for machine in cluster:
        output(machine, f"touch /tmp/{machine.number} /dev/shm/{machine.number}")
    for machine, shm in zip(cluster, ("8388608", "16777216"), strict=True):
        assert output(machine, "hostname") == machine.hostname == f"machine{machine.number}"
        assert output(machine, "ls /dev/shm") == str(machine.number)
        assert str(machine.number) in output(machine, "ls /tmp").split()
        assert output(machine, "df -B1 --output=size /dev/shm | tail -1") == shm
        assert output(machine, "echo /proc/[0-9]*").split()[0] == "/proc/1"
        assert len(output(machine, "echo /proc/[0-9]*").split()) < 6
    uptimes = [float(output(machine, "cat /proc/uptime").split()[0]) for machine in cluster]
    assert 86300 < uptimes[1] - uptimes[0] < 87000  # a day; of minutes that pass between the two, nothing depends
    assert not {"1", "2"} & set(os.listdir("/tmp"))


def test_kept_folders_are_shared_and_the_checkout_is_among_them(cluster, tmp_path) -> None:
    output(cluster[1], f"echo from the first >{tmp_path}/note")
    assert output(cluster[2], f"cat {tmp_path}/note") == "from the first"
    assert (tmp_path / "note").read_text() == "from the first\n"
    assert output(cluster[2], f"head -1 {__file__}") == f'"""{__doc__}"""'
    assert cluster[1].run(["pwd"], cwd=ROOT).stdout.strip() == str(ROOT)
    with pytest.raises(CommandFailed, match=r"below /tmp a machine has only what `keep` names"):
        cluster[1].run(["true"], cwd="/tmp/nobody/kept/this")


def test_sockets_of_the_private_tmp_are_the_machine_s_own(cluster) -> None:
    process = cluster[1].start([*PYTHON, "-c", BIND], stdout=subprocess.PIPE)
    with process:
        assert process.stdout.readline() == "bound\n"
        assert output(cluster[1], "test -S /tmp/socket && echo there") == "there"
        assert output(cluster[2], "test -e /tmp/socket || echo absent") == "absent"
        process.kill()


def test_a_limited_link_is_as_slow_as_said_in_both_directions(cluster, receiver) -> None:
    for limited in cluster:
        limited.rate("16mbit")
        assert "tbf" in output(limited, "tc qdisc show dev eth0")
        assert send(cluster[2], receiver.address, 4_000_000) >= 1.5  # 1.74 s, after the half MiB that may go at once
        limited.rate(None)
        assert "tbf" not in output(limited, "tc qdisc show dev eth0")


def test_the_bytes_of_a_link_are_counted(cluster, receiver) -> None:
    before = [machine.link_bytes() for machine in cluster]
    send(cluster[2], receiver.address, 4_000_000)
    after = [machine.link_bytes() for machine in cluster]
    (sent_1, received_1), (sent_2, received_2) = (
        (there[0] - then[0], there[1] - then[1]) for then, there in zip(before, after, strict=True)
    )
    assert 4_000_000 < sent_2 < 5_000_000
    assert 4_000_000 < received_1 < 5_000_000
    assert sent_1 < 1_000_000
    assert received_2 < 1_000_000


def test_what_is_sent_over_a_cut_link_is_lost_until_it_is_mended(cluster, receiver) -> None:
    cluster[2].rate("100mbit")
    cluster[2].cut()
    assert connect(cluster[2], receiver.address, timeout_s=1) != 0
    cluster[2].mend()
    assert connect(cluster[2], receiver.address) == 0
    assert "tbf" in output(cluster[2], "tc qdisc show dev eth0")
    cluster[2].rate(None)


def test_a_process_on_a_machine_is_dealt_with_like_any_other(cluster) -> None:
    assert cluster[1].run(["cat"], input="text").stdout == "text"
    assert cluster[1].run(["sh", "-c", 'echo "$A"'], env={"A": "said"}).stdout == "said\n"
    with pytest.raises(CommandFailed, match=r"exit status 3.\nwhy"):
        cluster[1].run(["sh", "-c", "echo why >&2; exit 3"])
    with pytest.raises(CommandFailed, match="absent-command does not start"):
        cluster[1].run(["absent-command"])
    assert cluster[1].run(["sh", "-c", "kill -SEGV $$"], check=False).returncode == -signal.SIGSEGV

    script = 'trap "echo got it; exit 5" TERM; echo begun; while :; do sleep 0.01; done'
    process = cluster[1].start(["sh", "-c", script], stdout=subprocess.PIPE)
    assert process.stdout.readline() == "begun\n"
    process.terminate()
    assert process.communicate(timeout=900) == ("got it\n", None)
    assert process.returncode == 5


def test_a_command_that_takes_too_long_is_killed_on_its_machine(cluster) -> None:
    with pytest.raises(CommandTimedOut, match="said before"):
        cluster[1].run(["sh", "-c", "echo said before; exec sleep 98765"], timeout_s=1)
    wait_until(lambda: "98765" not in output(cluster[1], "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"))


def test_a_killed_machine_takes_its_processes_with_it_and_no_others() -> None:
    with machines(2) as cluster:
        command = ["sh", "-c", "sleep 99 & echo; wait"]
        processes = [machine.start(command, stdout=subprocess.PIPE) for machine in cluster]
        for process in processes:
            process.stdout.readline()
        doomed, other = (list(psutil.Process(process.pid).children(recursive=True)) for process in processes)
        assert len(doomed) == len(other) == 2
        cluster[1].kill()
        assert not cluster[1].alive
        assert psutil.wait_procs(doomed, timeout=0)[1] == []
        assert psutil.wait_procs(other, timeout=0)[0] == []
        assert processes[0].wait(20) == -signal.SIGKILL
        for call in (cluster[1].link_bytes, cluster[1].cut, lambda: cluster[1].run(["true"])):
            with pytest.raises(MachineEnded, match="machine 1 has ended"):
                call()
        assert output(cluster[2], "hostname") == "machine2"


def test_two_clusters_know_nothing_of_each_other(cluster, receiver) -> None:
    with machines(2) as another:
        assert connect(cluster[2], "10.77.0.1") == 0
        assert connect(another[2], "10.77.0.1") != 0


OWNER = """
import sys
from tests.machines.cluster import machines
with machines(2) as cluster:
    cluster[1].start(["sh", "-c", "sleep 99 & sleep 99"])
    cluster[2].run(["sh", "-c", "setsid sleep 99 >/dev/null 2>&1 &"])
    print("up", flush=True)
    sys.stdin.readline()
    {end}
"""


@pytest.mark.parametrize("end", ["pass", "1 / 0", "sys.exit(3)", "KILL"])
def test_nothing_is_left_of_machines_however_their_block_ends(end) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", OWNER.format(end=end)], cwd=ROOT, text=True, **pipes) as owner:
        assert owner.stdout.readline() == "up\n"
        started = psutil.Process(owner.pid).children(recursive=True)
        networks = {network_of(process) for process in started} - {network_of(psutil.Process())}
        assert len(networks) == 3  # the switch has one too
        wait_until(lambda: [process.info["name"] for process in inside(networks)].count("sleep") == 3)
        living = inside(networks)
        if end == "KILL":
            owner.kill()
    assert psutil.wait_procs({*started, *living}, timeout=900)[1] == []


def inside(networks: set[int | None]) -> list[psutil.Process]:
    return [process for process in psutil.process_iter(["name"]) if network_of(process) in networks]


def network_of(process: psutil.Process) -> int | None:
    """None: it has ended."""
    try:
        return os.stat(f"/proc/{process.pid}/ns/net").st_ino
    except OSError:
        return None


def wait_until(condition) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
