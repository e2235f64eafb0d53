"""The trainer's weights to publications in shared memory, for the engines. Every rank writes its own elements. Rank 0
seals, or, where engines are on other nodes, the nodes' relays do. Models for people: `exporting.py`.
"""

from collections.abc import Iterable

from penstock.workers.protocols import Publication
from penstock.workers.trainer.ranks import Ranks
from penstock.workers.weights.chain.plan import ChunkPlan, choose_chunk_bytes, make_plan
from penstock.workers.weights.chain.reports import Reporter
from penstock.workers.weights.piece import Piece
from penstock.workers.weights.publication.layout import Layout, compute_layout
from penstock.workers.weights.publication.publication import PublicationWriter, seal
from penstock.workers.weights.publication.reused_files import publication_directory


def layout_of(pieces: Iterable[Piece], dtype: str) -> Layout:
    """Layout of an engine's `pieces`: names and shapes as `save_pretrained` has them, tied weights once. Or of its
    `adapter_pieces`."""
    return compute_layout((piece.name, piece.shape, dtype) for piece in pieces)


def plan_chunks(ranks: Ranks, pieces: Iterable[Piece], layout: Layout, node: str, num_receivers: int) -> ChunkPlan:
    """Plan what each rank will publish in every version, the same on all of them. `node`: this rank's, as its relay is
    called; `num_receivers`: nodes with engines. Collective. Raises `WeightError` if the pieces are not the whole
    layout."""
    told = [(piece.name, piece.first, len(piece.values)) for piece in pieces if len(piece.values)]
    nodes, pieces_of_ranks = zip(*ranks.gather_ranks((node, told)), strict=True)
    chunk_bytes = choose_chunk_bytes(layout.num_bytes, len(set(nodes)), num_receivers)
    return make_plan(layout, pieces_of_ranks, nodes, chunk_bytes)


def publish_between(
    ranks: Ranks, pieces: Iterable[Piece], directory: str, version: int, plan: ChunkPlan
) -> Publication:
    """Publish like `publish`, to nodes whose relays have begun the version: each chunk goes on as soon as it is
    written. Every rank returns once all have written; the relays seal. Collective."""
    with Reporter(directory, plan, version, ranks.rank) as reporter:
        writer = PublicationWriter(directory, version, plan.layout, ranks.rank, ranks.num_ranks, reporter.outlet)
        for piece in pieces:
            writer.write_elements(piece.name, piece.first, piece.values)
        writer.close()
        reporter.finish()
    ranks.barrier()
    return Publication(str(publication_directory(directory, version)), version, plan.layout.num_bytes)


def publish(ranks: Ranks, pieces: Iterable[Piece], directory: str, version: int, layout: Layout) -> Publication:
    """Write version `version` under the root `directory`, in the layout's dtype. Collective: every rank returns once it
    is sealed. `layout`: from `layout_of` such pieces, which is the same for every version.

    Raises `WeightError`, e.g. when shared memory is full.
    """
    writer = PublicationWriter(directory, version, layout, ranks.rank, ranks.num_ranks)
    for piece in pieces:
        writer.write_elements(piece.name, piece.first, piece.values)
    writer.finish()
    ranks.barrier()
    if ranks.rank == 0:
        seal(directory, version, layout, ranks.num_ranks)
    ranks.barrier()
    return Publication(str(publication_directory(directory, version)), version, layout.num_bytes)
