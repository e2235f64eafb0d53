"""Several machines on this one, for tests and benchmarks of what two machines say to each other.

    with machines(3, rate="1gbit", shm="1g") as cluster:
        cluster[1].run(["ping", …])
        cluster.start_ray(num_cpus=4)
        cluster[1].run([sys.executable, "-m", "penstock.cli.main", "run", …], timeout_s=900)
        cluster[2].cut()

Each has its own network, processes, host name, `/dev/shm` and `/tmp` (`machine.py`); a switch joins them (`switch.py`).
Nothing of it is seen by the host or by other clusters, and nothing is left after the block, nor after the end of this
process, however it ends: all of it hangs on processes that end with it (`namespaces.py`). Needs root; tests say so with
the marker `machines`, and ask for the fixture `ray_machines` for a cluster of Ray.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.machines import ray_nodes
from tests.machines.first_process import SHM, TMP
from tests.machines.machine import Machine, hostname_of
from tests.machines.privileges import what_is_missing
from tests.machines.switch import Switch, address_of

ROOT = Path(__file__).resolve().parents[2]
MOST = 3
"""Machines of a cluster: two cores, which all of them share, do not serve more."""


class MachinesUnavailable(RuntimeError):
    """This process may not make machines."""


class Cluster:
    """Machines, numbered from 1."""

    def __init__(self, members: Sequence[Machine]) -> None:
        self._members = list(members)

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Machine]:
        return iter(self._members)

    def __getitem__(self, number: int) -> Machine:
        if not 1 <= number <= len(self):
            raise IndexError(f"there is no machine {number}: they are numbered from 1 to {len(self)}")
        return self._members[number - 1]

    def start_ray(
        self,
        num_cpus: int | Sequence[int] = 4,
        num_gpus: int | Sequence[int] = 0,
        *,
        num_nodes: int | None = None,
        takes_jobs: bool = False,
        warm: Path | None = None,
        environment: Mapping[str, str] | None = None,
        object_store_bytes: int = ray_nodes.OBJECT_STORE_BYTES,
        head_options: Sequence[str] = (),
        timeout_s: float = ray_nodes.START_S,
    ) -> str:
        """A Ray cluster of all machines, its head on the first; its address, when all are there.

        Ray asks for a token, as it does where a user made one. What is run on the machines from now on has it, and
        `RAY_ADDRESS`, in its environment.

        Args:
            num_cpus, num_gpus: as Ray counts them, of each machine or of all.
            num_nodes: leave the machines after so many out; they have its token.
            takes_jobs: with the dashboard, to which `ray job submit` speaks.
            warm: folder of the tests' warm Python (`tests/warm_workers.py`), which must be among `keep`: Ray's
                processes are forks. None: they start as they do for users.
            environment: of everything on the machines from now on, such as `RAY_health_check_period_ms`.
            object_store_bytes: of each machine, in its `/dev/shm`.
            head_options: further options of `ray start --head`.
        """
        cpus, gpus = of_each(num_cpus, len(self), "num_cpus"), of_each(num_gpus, len(self), "num_gpus")
        nodes = [(member, *numbers) for member, *numbers in zip(self, cpus, gpus, strict=True)][:num_nodes]
        return ray_nodes.start(
            self._members, nodes, warm, environment or {}, timeout_s, takes_jobs, object_store_bytes, head_options
        )  # fmt: skip


@contextmanager
def machines(
    num_machines: int, *, rate: str | None = None, keep: Sequence[Path | str] = (), shm: str | Sequence[str] = "2g"
) -> Iterator[Cluster]:
    """A cluster as long as the block lasts.

    Args:
        num_machines: up to 3.
        rate: of each link in each direction, such as `1gbit`; None: as fast as memory.
        keep: folders below `/tmp` that the machines share with this process. This checkout and its Python are among
            them; what lies elsewhere is shared in any case.
        shm: size of each `/dev/shm`, or of all; used memory counts, not this.

    Raises:
        MachinesUnavailable: with what is missing.
    """
    if not 1 <= num_machines <= MOST:
        raise ValueError(f"{num_machines} machines: 1 to {MOST} share two cores")
    sizes = of_each(shm, num_machines, "shm")
    if missing := what_is_missing():
        raise MachinesUnavailable(f"machines need {missing}")

    numbers = range(1, num_machines + 1)
    # Also as torch's store asks for it, over IPv6: the machines have no name server, and would wait 5 s for one.
    hosts = "".join(
        f"{prefix}{address_of(number)} {hostname_of(number)}\n" for prefix in ("", "::ffff:") for number in numbers
    )
    kept = kept_folders([ROOT, sys.prefix, sys.base_prefix, Path(sys.executable).parent, *keep])
    with ExitStack() as stack:
        switch = Switch()
        stack.callback(switch.end)
        members = []
        for number, size in zip(numbers, sizes, strict=True):
            members.append(Machine(number, f"127.0.0.1 localhost\n{hosts}", size, kept, switch))
            stack.callback(members[-1].kill)
        switch.open({member.number: member.wait_until_ready() for member in members}, rate)
        for member in members:
            member.connect(rate)
        yield Cluster(members)


def of_each(value: Any, num_machines: int, name: str) -> list[Any]:
    """The value of each machine, of one for all or of a sequence."""
    values = [value] * num_machines if isinstance(value, str | int) else list(value)
    if len(values) != num_machines:
        raise ValueError(f"{name} has {len(values)} values for {num_machines} machines: say one, or one for each")
    return values


def kept_folders(folders: Sequence[Path | str]) -> list[Path]:
    """Those that a private `/tmp` would hide, each once, and none that lies within another."""
    resolved = {Path(folder).resolve() for folder in folders}
    for folder in resolved:
        if folder == Path(TMP) or folder.is_relative_to(SHM):
            raise ValueError(f"{folder} cannot be kept: each machine has its own; name a folder below {TMP}")
    hidden = {folder for folder in resolved if folder.is_relative_to(TMP)}
    return sorted(folder for folder in hidden if not hidden & set(folder.parents))
