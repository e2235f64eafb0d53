"""Whether this process may make machines."""

import os
import shutil
import subprocess
from functools import cache

NEEDS = "root (CAP_SYS_ADMIN and CAP_NET_ADMIN), and the kernel's bridge, veth and tbf"
TOOLS = {"unshare": "util-linux", "ip": "iproute2", "tc": "iproute2"}
"""Commands, and the package of Debian that has each."""
PROBE = """
ip link add br0 type bridge
ip link add p1 type veth peer name eth0
tc qdisc add dev p1 root tbf rate 1mbit burst 256kb latency 50ms
mount -t sysfs sysfs /sys
"""
OPTIONS = ("--net", "--mount", "--pid", "--ipc", "--uts", "--time", "--monotonic=1", "--fork", "--mount-proc")


@cache
def what_is_missing() -> str | None:
    """What is missing, in words. None: nothing is."""
    for tool, package in TOOLS.items():
        if shutil.which(tool) is None:
            return f"the command {tool!r} of the package {package}"
    if os.geteuid():
        return f"{NEEDS}: this process's user is {os.geteuid()}"
    probe = subprocess.run(["unshare", *OPTIONS, "sh", "-ec", PROBE], capture_output=True, text=True)
    if probe.returncode:
        return f"{NEEDS}: {' '.join(probe.stderr.split())}"
    return None
