"""A rank's place among the ranks of one trainer: how they meet, what they exchange, failures of collectives by name.

    rank 0: Meeting(host) ─▶ address ─▶ the controller ─▶ every rank: Ranks.join(config, rank, num_ranks, address)

The ranks meet at a TCPStore that one process holds. Its port is bound before any rank is told of it, so that no other
process can take it meanwhile, and on the node's own address alone. Process groups then make connections of their own,
over the interface that `use_interface_of` has chosen.

torch.distributed gives every collective the ranks' deadline (`trainer.collective_timeout_s`) and reports what happens
as a bare RuntimeError. One rank that hangs or dies shows in all the others, each in the collective that it waits for.
`phase` says which phase, which rank, which part of the model. What NCCL does instead: `collective_errors.py`.
"""

import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from penstock.conf.errors import (
    ConfigError,
    DeadlineExceeded,
    PartnerGone,
    PenstockError,
    ResourceError,
    is_device_failure,
)
from penstock.conf.trainer import TrainerConfig
from penstock.network.host import interface_of
from penstock.workers.trainer.collective_errors import LOST, gone_error, late_error

LATE = ("timed out", "timeout")


@dataclass
class Ranks:
    """Lifecycle: `join`, then any collective, then `leave`. `owned`: made here, so closed here."""

    rank: int
    num_ranks: int
    device: torch.device
    owned: bool
    timeout: timedelta
    num_peers: int = 1
    """Number of ranks that have the same rows and split the work on them: ranks 0 to num_peers - 1, and so on."""
    data_ranks: dist.ProcessGroup | None = None
    """The process group of one rank of each such block, this one among them. None: all ranks."""
    block: dist.ProcessGroup | None = None
    """The process group of the ranks of this one's block that may split rows otherwise in each micro-batch
    (`trainer.sequence_parallel_size=auto`). None: all ranks of a block compute all of its rows."""
    group: dist.ProcessGroup | None = None
    """The process group of these ranks, where they are some of the process's. None: they are all of them."""
    first: int = 0
    """Number of their first rank among all."""

    @classmethod
    def join(cls, config: TrainerConfig, rank: int = 0, num_ranks: int = 1, address: str | None = None) -> "Ranks":
        """Meet the other ranks at `address` (host:port of a `Meeting`). One rank alone needs none. Collective.

        A process is one rank: a second trainer of one rank in the same process shares it. Raises `ConfigError` if
        sizes differ, `DeadlineExceeded` with the ranks that do not come in time, `PartnerGone`, `ResourceError` where
        ranks cannot connect.
        """
        on_gpu = config.num_gpus_per_rank > 0
        timeout = timedelta(seconds=config.collective_timeout_s)
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        owned = not dist.is_initialized()
        if owned:
            if num_ranks > 1 and address is None:
                raise ConfigError(
                    f"trainer.num_ranks={num_ranks} needs the address where the ranks meet; none was given."
                )
            backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
            store = dist.HashStore() if address is None else store_of(rank, num_ranks, address, timeout)
            try:
                dist.init_process_group(backend, rank=rank, world_size=num_ranks, timeout=timeout, store=store)
            except RuntimeError as error:
                raise ResourceError(
                    f"rank {rank} of {num_ranks} could not connect to the others ({first_line(error)}). See that none "
                    "of them has died, that their nodes let each other connect to any port, and that "
                    "GLOO_SOCKET_IFNAME, if it is set, names the interface between them."
                ) from None
        elif dist.get_world_size() != num_ranks:
            raise ConfigError(
                f"trainer.num_ranks={num_ranks}, but this process is already one of {dist.get_world_size()} ranks. "
                "Start each rank in a process of its own."
            )
        ranks = cls(rank, num_ranks, device, owned, timeout)
        if config.policy_ranks:
            ranks.num_peers = num_ranks  # all have the rows of a step, and those of each policy compute its own
        else:
            ranks._split_rows(config)
        return ranks

    def part(self, members: range, config: TrainerConfig) -> "Ranks":
        """Some of these ranks, this one among them, as the ranks of a trainer with this configuration. They outlive
        it: leave the whole. Collective over the members."""
        group = dist.new_group([*members], timeout=self.timeout, use_local_synchronization=True)
        rank = self.rank - members.start
        part = Ranks(rank, len(members), self.device, False, self.timeout, group=group, first=members.start)
        part._split_rows(config)
        return part

    def _split_rows(self, config: TrainerConfig) -> None:
        """Make the process groups of ranks that split the work on rows. Collective."""
        self.num_peers = config.ranks_per_row
        if self.num_peers > 1:
            self.data_ranks = self.process_group(self.num_peers, self.num_data_ranks)
        if config.splits_by_length and config.sequence_ranks > 1:
            self.block = self.process_group(config.tensor_parallel_size, config.sequence_ranks)

    @property
    def data_rank(self) -> int:
        """Index of this rank's share of the rows."""
        return self.rank // self.num_peers

    @property
    def num_data_ranks(self) -> int:
        return self.num_ranks // self.num_peers

    @property
    def reports_rows(self) -> bool:
        """True if this rank is the one of its peers that reports their rows, so that each row is counted once."""
        return self.rank % self.num_peers == 0

    @property
    def computes_for_others(self) -> bool:
        """True if this rank may compute rows that the one that reports them does not compute."""
        return self.block is not None

    def process_group(self, stride: int, size: int) -> dist.ProcessGroup:
        """Make process groups of `size` ranks, `stride` apart, and return the one with this rank; blocks of `stride *
        size` ranks are cut alike. Collective over all ranks, since each takes part in making every process group."""
        mine = None
        for start in range(0, self.num_ranks, stride * size):
            for offset in range(start, start + stride):
                ranks = range(offset, offset + stride * size, stride)
                members = [self.first + rank for rank in ranks]
                is_part = self.group is not None
                made = dist.new_group(members, timeout=self.timeout, use_local_synchronization=is_part)
                mine = made if self.rank in ranks else mine
        assert mine is not None
        return mine

    def gather(self, value: Any) -> list[Any]:
        """Gather a small picklable value of each data rank, in order of data rank. Collective."""
        return _gather(value, self.num_data_ranks, self.data_ranks or self.group)

    def gather_block(self, value: Any) -> list[Any]:
        """Gather a small picklable value of each rank of the block that may have computed other rows than this one,
        in order of rank: of this rank alone where all compute the same. Collective."""
        return _gather(value, 1 if self.block is None else self.block.size(), self.block)

    def gather_ranks(self, value: Any) -> list[Any]:
        """Gather a small picklable value of every rank, in order of rank. Collective."""
        return _gather(value, self.num_ranks, self.group)

    def gather_first(self, values: list[Any]) -> list[Any]:
        """Gather the lists of every rank, one after the other, on rank 0; the others get an empty one. Collective."""
        if self.num_ranks == 1:
            return values
        lists: list[list[Any]] | None = [[]] * self.num_ranks if self.rank == 0 else None
        dist.gather_object(values, lists, group=self.group, group_dst=0)
        return [value for some in lists or [] for value in some]

    def barrier(self, group: dist.ProcessGroup | None = None) -> None:
        """Wait for all ranks. `group`: a process group of all of them, from `group_beside`."""
        if self.num_ranks > 1:
            dist.barrier(group=group or self.group)

    def group_beside(self, timeout: timedelta | None = None) -> dist.ProcessGroup | None:
        """Make a process group of all ranks for another thread: its collectives come between no others. `timeout`: of
        each; None: as of all others. None where there is one rank. Collective."""
        if self.num_ranks == 1:
            return None
        assert self.group is None, "publications and checkpoints are of all ranks"
        return dist.new_group(backend="gloo", timeout=timeout or self.timeout)

    def leave(self) -> None:
        if self.owned:
            leave_process_group()
        self.owned = False


def _gather(value: Any, count: int, group: dist.ProcessGroup | None = None) -> list[Any]:
    if count == 1:
        return [value]
    values: list[Any] = [None] * count
    dist.all_gather_object(values, value, group=group)
    return values


def leave_process_group() -> None:
    """Leave the process group of all ranks, if this process is in one. DeepSpeed keeps process groups for the whole
    process, even if another trainer made the first one: they end with it."""
    if not dist.is_initialized():
        return
    deepspeed = sys.modules.get("deepspeed")
    if deepspeed is not None and deepspeed.comm.is_initialized():
        deepspeed.comm.destroy_process_group()
    else:
        dist.destroy_process_group()


@contextmanager
def phase(name: str, ranks: Ranks, where: Callable[[], str] = str) -> Iterator[None]:
    """Name failures of collectives in the block: one that does not end in time raises `DeadlineExceeded`, and one whose
    partner is gone `PartnerGone`. `where`: the part of the model that was under way."""
    try:
        yield
    except PenstockError:
        raise
    except RuntimeError as error:
        found = collective_error(error, name, ranks, where())
        if found is None:
            raise
        raise found from None


def collective_error(error: RuntimeError, phase: str, ranks: Ranks, where: str) -> PenstockError | None:
    """The error under its own name; None if it is no collective's."""
    text = str(error).lower()
    place = f"{phase}, rank {ranks.rank} of {ranks.num_ranks}" + (f", at {where}" if where else "")
    last = str(error).strip().splitlines()[-1][:200]
    if any(word in text for word in LOST):
        return gone_error(place, last)
    if any(word in text for word in LATE) and not is_device_failure(error):  # of a kernel: "the launch timed out"
        return late_error(place, "another rank", ranks.timeout.total_seconds(), last)
    return None


INTERFACE_KEYS = {"GLOO_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}"}
"""Environment variable that each library reads, and how it wants an exact name."""
LOOPBACK = "lo"
TIMEOUT_KEY = "trainer.collective_timeout_s"


class Meeting:
    """Lifecycle: made before the ranks start, `close` once they have parted."""

    def __init__(self, host: str) -> None:
        """`host`: an address of this machine that all ranks can reach."""
        with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as listening:
            port = listening.getsockname()[1]
            self.address = f"{host}:{port}"
            self._store: dist.TCPStore | None = dist.TCPStore(
                host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
            )

    def close(self) -> None:
        self._store = None


def store_of(rank: int, num_ranks: int, address: str, timeout: timedelta) -> dist.TCPStore:
    """Connect to the meeting at `address` (host:port), once all ranks have come. Raises `DeadlineExceeded` with the
    ranks that have not, and `PartnerGone` where no process holds it any more."""
    host, _, port = address.rpartition(":")
    try:
        store = dist.TCPStore(host, int(port), is_master=False, timeout=timeout)
    except dist.DistError as error:
        raise DeadlineExceeded(
            f"rank {rank} of {num_ranks} could not reach rank 0 at {address} within {timeout.total_seconds():g} s "
            f"({first_line(error)}). See that rank 0 lives, and that its node lets this one connect to any port."
        ) from None
    keys = [f"here/{other}" for other in range(num_ranks)]
    try:
        store.set(keys[rank], "")
        store.wait(keys, timeout)
    except dist.DistError as error:
        raise _missing_ranks_error(error, store, keys, rank, address, timeout) from None
    return store


def _missing_ranks_error(
    error: Exception, store: dist.TCPStore, keys: list[str], rank: int, address: str, timeout: timedelta
) -> DeadlineExceeded | PartnerGone:
    try:
        missing = [str(other) for other, key in enumerate(keys) if not store.check([key])]
    except dist.DistError:
        return PartnerGone(
            f"rank {rank} of {len(keys)}: rank 0, who holds the ranks' meeting at {address}, is gone "
            f"({first_line(error)}). What ended it is in its own error."
        )
    who = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(missing)}"
    return DeadlineExceeded(
        f"rank {rank} of {len(keys)}: {who} did not come to {address} within {timeout.total_seconds():g} s. See what "
        f"became of {who}; if it was only slow, raise {TIMEOUT_KEY}."
    )


def use_interface_of(node_address: str) -> None:
    """Have process groups connect over the interface that has this node's address, where the environment names none.
    gloo would take the address that the host's name resolves to, often 127.0.1.1; NCCL whatever interface it finds
    first. A machine that Ray knows by its loopback address alone is the only one."""
    interface = interface_of(node_address)
    if interface is None or interface == LOOPBACK:
        return
    for key, form in INTERFACE_KEYS.items():
        os.environ.setdefault(key, form.format(interface))


def first_line(error: Exception) -> str:
    """First line of torch's message; stacks follow."""
    return str(error).strip().splitlines()[0][:200]
