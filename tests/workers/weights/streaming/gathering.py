"""One rank of `test_weight_stream.py`, in a process of its own:
`python -m tests.workers.weights.streaming.gathering RANK NUM_RANKS ADDRESS DIRECTORY`.

Gathers a stream of whole tensors twice, once as the rank that sends and once, on other ranks, through vLLM's own
sender, which only joins in.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import torch

from penstock.conf.trainer import TrainerConfig
from penstock.workers.trainer.ranks import Ranks
from penstock.workers.weights.piece import Piece
from penstock.workers.weights.weight_senders import SendingRank, StreamTransport, WeightStream

SHAPES = {"embed": (7, 3), "bias": (5,), "scale": (), "one_row": (1, 4), "steps": (3,)}
CUTS = {"embed": 10, "bias": 3, "scale": 1, "one_row": 4, "steps": 3}
"""Elements of the first rank of two; the second has the rest, which may be none, and need not begin at a row."""


def full(name: str) -> torch.Tensor:
    count = torch.Size(SHAPES[name]).numel()
    values = torch.arange(count) if name == "steps" else torch.arange(count) / 3 + len(name)
    return values.reshape(SHAPES[name])


def pieces(rank: int, num_ranks: int) -> list[Piece]:
    """Flat pieces of this rank, float32 but for `steps`."""
    found = []
    for name, shape in SHAPES.items():
        flat = full(name).reshape(-1)
        cut = CUTS[name] if num_ranks == 2 else flat.numel()
        first, last = (0, cut) if rank == 0 else (cut, flat.numel())
        found.append(Piece(name, shape, first, flat[first:last].clone()))
    return found


class Sender:
    """A stand-in for vLLM's engine on the rank that sends."""

    def __init__(self, source: WeightStream) -> None:
        self.source, self.sent = source, {}

    def send_weights(self) -> None:
        self.sent = {name: tensor.clone() for name, tensor in self.source}

    def shutdown(self) -> None:
        pass


def run(rank: int, num_ranks: int, address: str, directory: Path) -> None:
    ranks = Ranks.join(TrainerConfig(), rank, num_ranks, address)
    device = torch.device("cpu")
    side = SendingRank(
        rank, num_ranks, device, lambda: pieces(rank, num_ranks), ranks.gather_ranks, torch.nn.Module(), "bfloat16",
    )  # fmt: skip
    torch.save(dict(WeightStream(side)), directory / f"gathered.{rank}.pt")
    transport = StreamTransport("nccl", side, bucket_mib=1, timeout_s=60.0)
    if rank == 0:
        transport.trainer_init = lambda info, *, client, source: Sender(source)
    transport.connect(SimpleNamespace(num_engines=1, workers_per_engine=1), "127.0.0.1:1")
    transport.send(1)
    torch.save(transport.engine.sent if rank == 0 else {}, directory / f"sent.{rank}.pt")
    transport.close()
    ranks.leave()


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
