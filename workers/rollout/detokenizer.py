"""Text of sampled tokens. Special tokens are left out, but for those that mark the thinking: rewards and people see by
them where it ends.

    <|channel|>analysis<|message|>2+2<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>        sampled
    <|channel|>analysis<|message|>2+2assistant<|channel|>final<|message|>4                                  text
"""

from collections.abc import Iterable, Sequence
from typing import Any

from penstock.workers.models.tokenizer import MARKS


class Detokenizer:
    """Decoder of one tokenizer of transformers, or of an object with the same methods."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._special_ids = {str(token): id for id, token in added.items() if token.special}
        marks = "".join(mark for pair in MARKS for mark in pair)
        self._kept = frozenset(id for text, id in self._special_ids.items() if text in marks)
        self._left_out = frozenset(self._special_ids.values()) - self._kept

    def text(self, token_ids: Sequence[int]) -> str:
        """The text of a response."""
        if self._kept.isdisjoint(token_ids):
            return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))
        shown = [id for id in token_ids if id not in self._left_out]
        return str(self._tokenizer.decode(shown, skip_special_tokens=False))

    def cut(self, token_ids: Sequence[int], text: str) -> str:
        """The text of a response that ends at a stop string. `text`: what the engine has decoded up to there, without
        any special token."""
        if self._kept.isdisjoint(token_ids):
            return text
        num_cut = len(str(self._tokenizer.decode(token_ids, skip_special_tokens=True))) - len(text)
        whole = self.text(token_ids)
        return whole[: len(whole) - max(0, num_cut)]

    def stop_ids(self, stops: Iterable[str]) -> frozenset[int]:
        """Ids of the stop strings that are special tokens, which no text shows."""
        return frozenset(self._special_ids[stop] for stop in stops if stop in self._special_ids)


NO_TOKENIZER = Detokenizer(None)
"""For engines that have not loaded theirs yet."""
