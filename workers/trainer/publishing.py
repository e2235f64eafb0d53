"""The trainer's weights to publications in shared memory, for the engines. Every rank writes its own elements. Rank 0
seals, or, where engines are on other nodes, the nodes' relays do. Models for people: `exporting.py`.
"""

from collections.abc import Callable, Iterable
from functools import cached_property

from penstock.workers.protocols import Publication
from penstock.workers.trainer.ranks import Ranks
from penstock.workers.weights.chain.plan import ChunkPlan, choose_chunk_bytes, make_plan
from penstock.workers.weights.chain.reports import Reporter
from penstock.workers.weights.piece import Piece
from penstock.workers.weights.publication.layout import Layout, compute_layout
from penstock.workers.weights.publication.publication import PublicationWriter, seal
from penstock.workers.weights.publication.reused_files import publication_directory


class Publisher:
    """The publications of one rank. All ranks make the same calls; all are collective."""

    def __init__(self, ranks: Ranks, pieces: Callable[[], Iterable[Piece]], dtype: str) -> None:
        """`pieces`: an engine's `pieces` or `adapter_pieces`, of the same names and shapes for every version. `dtype`:
        of the engines."""
        self._ranks, self._pieces, self._dtype = ranks, pieces, dtype
        self._plan: ChunkPlan | None = None
        """Plan of publications that go to other nodes."""

    @cached_property
    def layout(self) -> Layout:
        """Layout of every publication: names and shapes as `save_pretrained` has them, tied weights once. Collective
        where it is first asked for."""
        return compute_layout((piece.name, piece.shape, piece.dtype_in(self._dtype)) for piece in self._pieces())

    def plan_chunks(self, node: str, num_receivers: int) -> ChunkPlan:
        """Publish to other nodes from now on; return what each rank will publish in every version, the same on all of
        them. `node`: this rank's, as its relay is called; `num_receivers`: nodes with engines. Raises `WeightError` if
        the pieces are not the whole layout."""
        layout = self.layout
        own = [(piece.name, piece.first, len(piece.values)) for piece in self._pieces() if len(piece.values)]
        nodes, pieces_of_ranks = zip(*self._ranks.gather_ranks((node, own)), strict=True)
        chunk_bytes = choose_chunk_bytes(layout.num_bytes, len(set(nodes)), num_receivers)
        self._plan = make_plan(layout, pieces_of_ranks, nodes, chunk_bytes)
        return self._plan

    def publish(self, directory: str, version: int) -> Publication:
        """Write version `version` under the root `directory`. Every rank returns once it is sealed, or where it goes to
        other nodes, once all ranks have written. Raises `WeightError`, e.g. when shared memory is full."""
        if self._plan is None:
            layout = self.layout
            self._write_and_seal(directory, version, layout)
        else:
            layout = self._plan.layout
            self._write_to_relay(directory, version, self._plan)
        self._ranks.barrier()
        return Publication(str(publication_directory(directory, version)), version, layout.num_bytes)

    def _write_and_seal(self, directory: str, version: int, layout: Layout) -> None:
        writer = PublicationWriter(directory, version, layout, self._ranks.rank, self._ranks.num_ranks)
        self._write(writer)
        writer.finish()
        self._ranks.barrier()
        if self._ranks.rank == 0:
            seal(directory, version, layout, self._ranks.num_ranks)

    def _write_to_relay(self, directory: str, version: int, plan: ChunkPlan) -> None:
        """Write for nodes whose relays have begun the version: each chunk goes on as soon as it is written."""
        ranks = self._ranks
        with Reporter(directory, plan, version, ranks.rank) as reporter:
            writer = PublicationWriter(directory, version, plan.layout, ranks.rank, ranks.num_ranks, reporter.outlet)
            self._write(writer)
            writer.close()
            reporter.finish()

    def _write(self, writer: PublicationWriter) -> None:
        for piece in self._pieces():
            writer.write_elements(piece.name, piece.first, piece.values)
