"""The places of tokens in a micro-batch, by how its sequences lie: padded, packed or as trees. Pure.

padded  `[S, L]`, each sequence in a row of its own
packed  `[1, L]`, one after the other (`blocks.py`)
trees   `[1, L]`, what several of them begin with once (`trees.py`)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from penstock.workers.trainer.update.blocks import Blocks
from penstock.workers.trainer.update.trees import Trees

PAD_ID = 0
"""Id of padding; any that exists: attention is causal, so what pads on the right is never seen."""


@dataclass(frozen=True)
class Layout:
    """Sequences laid out.

    layout = Layout.padded(token_ids)
    layout.places(sequence_N, place_N)    # places in the flattened `ids_SL` of tokens of sequences
    """

    ids_SL: np.ndarray
    lengths_S: np.ndarray
    starts_S: np.ndarray
    """Place of the first token of each sequence."""
    blocks: Blocks | Trees | None = None
    paths: np.ndarray | None = None
    """Places of the tokens of all sequences, one sequence after the other; None: each stands in one piece."""

    @classmethod
    def padded(cls, token_ids: Sequence[np.ndarray]) -> Self:
        lengths_S = _lengths(token_ids)
        width = max(1, int(lengths_S.max()))
        return cls._filled(token_ids, (len(lengths_S), width), lengths_S, np.arange(len(lengths_S)) * width)

    @classmethod
    def packed(cls, token_ids: Sequence[np.ndarray]) -> Self:
        """The longest sequence first."""
        lengths_S = _lengths(token_ids)
        order = np.argsort(-lengths_S, kind="stable")
        starts_S = np.zeros_like(lengths_S)
        starts_S[order] = np.cumsum(lengths_S[order]) - lengths_S[order]
        return cls._filled(token_ids, (1, int(lengths_S.sum())), lengths_S, starts_S, Blocks.of(lengths_S[order]))

    @classmethod
    def trees(cls, token_ids: Sequence[np.ndarray], group_S: np.ndarray) -> Self:
        """`group_S`: sequences of one group alone share what they begin with."""
        trees, places = Trees.of(token_ids, group_S)
        paths, lengths_S = np.concatenate(places), _lengths(token_ids)
        ids_1L = np.full((1, trees.num_tokens), PAD_ID, np.int64)
        ids_1L[0, paths] = np.concatenate(token_ids)
        return cls(ids_1L, lengths_S, np.array([of_one[0] for of_one in places], np.int64), trees, paths)

    @classmethod
    def _filled(
        cls, token_ids: Sequence[np.ndarray], shape: tuple[int, int], lengths_S: np.ndarray, starts_S: np.ndarray,
        blocks: Blocks | None = None,
    ) -> Self:  # fmt: skip
        ids_flat = np.full(shape[0] * shape[1], PAD_ID, np.int64)
        for start, ids in zip(starts_S.tolist(), token_ids, strict=True):
            ids_flat[start : start + len(ids)] = ids
        return cls(ids_flat.reshape(shape), lengths_S, starts_S, blocks)

    @property
    def num_tokens(self) -> int:
        """Tokens that are there: those of all sequences, less what is shared."""
        return self.ids_SL.size if self.paths is not None else int(self.lengths_S.sum())

    @property
    def num_shared(self) -> int:
        """Tokens of sequences that others have computed."""
        return int(self.lengths_S.sum()) - self.num_tokens

    def places(self, sequence_N: np.ndarray, place_N: np.ndarray) -> np.ndarray:
        """Places in the flattened `ids_SL` of the tokens at `place_N` of their sequences, int64."""
        if self.paths is None:
            return self.starts_S[sequence_N] + place_N
        firsts_S = np.cumsum(self.lengths_S) - self.lengths_S
        return self.paths[firsts_S[sequence_N] + place_N]


def _lengths(token_ids: Sequence[np.ndarray]) -> np.ndarray:
    return np.array([len(ids) for ids in token_ids], np.int64)
