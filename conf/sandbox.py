"""Limits of the code that a model wrote: what it may use up before it is ended, and how much of it runs at once."""

from dataclasses import dataclass

from penstock.conf.checks import above, at_least


@dataclass
class SandboxConfig:
    cpu_s: float = 5.0
    """Processor time of one execution, of all its processes together, in seconds. 5: far more than tests of small
    programs need, and little enough that endless loops do not fill the cores. Each process alone is ended by the kernel
    after so many seconds, rounded up."""
    wall_s: float = 10.0
    """Time of one execution by the clock, in seconds. Twice cpu_s: machines are shared, and a sleep costs no CPU."""
    memory_mib: int = 512
    """Memory of one execution in MiB: address space of each process, and what all use together with /tmp. Python itself
    takes 30. Enough for tables of dynamic programming, and a hundred executions fit a server."""
    num_processes: int = 32
    """Processes and threads at once. Enough for a small thread pool; a fork bomb ends here."""
    file_mib: int = 16
    """Size of one file in MiB, and so of what is kept of an output before it is cut."""
    tmp_mib: int = 64
    """Size of the private /tmp in MiB. It is in memory, and counts as such where there is a cgroup."""
    tmp_files: int = 4096
    """Files and directories in /tmp."""
    output_mib: float = 1.0
    """Most that an execution may return, in MiB: standard output, standard error and results, each. More is a failure,
    as no honest answer to a test is so long."""
    require_cgroup: bool = False
    """True: refuse to run code where no control group holds its memory and counts its processor time. false: there they
    are looked at 20 times a second, and more may be used between two looks; the run says so when it starts."""
    num_workers: int = 1
    """Number of executions at once. Each worker keeps an interpreter ready inside its fence (about 15 MiB)."""

    def __post_init__(self) -> None:
        above("sandbox.cpu_s", self.cpu_s, 0)
        above("sandbox.wall_s", self.wall_s, 0)
        at_least("sandbox.memory_mib", self.memory_mib, 64)
        at_least("sandbox.num_processes", self.num_processes, 1)
        at_least("sandbox.file_mib", self.file_mib, 1)
        at_least("sandbox.tmp_mib", self.tmp_mib, 1)
        at_least("sandbox.tmp_files", self.tmp_files, 16)
        above("sandbox.output_mib", self.output_mib, 0)
        at_least("sandbox.num_workers", self.num_workers, 1)
