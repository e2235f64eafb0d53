"""The text of single tokens, by the tokenizer that a run left: read by `tokenizers`, without transformers."""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.orchestrator.observability.ui.runs.own_files import MOST_TOKENIZER_BYTES, read_own, section

PLACES = ("model", "initial_model")
"""Directories of a run in which a tokenizer may be."""
FILE = "tokenizer.json"


class TokenTexts:
    """Texts of tokens, by the tokenizer of one run."""

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        self._path, self._config = path, config
        self._tokenizer: Any = None
        self._is_sought = False

    def of(self, ids: Sequence[int]) -> list[str]:
        """Texts of tokens; the token's number where there is no tokenizer to read, or it is no token. What is no whole
        character by itself is shown as the replacement character."""
        if not self._is_sought:
            self._is_sought, self._tokenizer = True, self._found()
        if self._tokenizer is None:
            return [f"[{token}]" for token in ids]
        try:
            texts: list[str] = self._tokenizer.decode_batch([[token] for token in ids], skip_special_tokens=False)
        except (TypeError, OverflowError):  # a token that is no number, or one below 0
            return [f"[{token}]" for token in ids]
        return texts

    def _found(self) -> Any:
        text = self._text()
        if text is None:
            return None
        from tokenizers import Tokenizer

        try:
            return Tokenizer.from_str(text)
        except Exception:  # noqa: BLE001 - whatever the package makes of a file of another version
            return None

    def _text(self) -> str | None:
        """The text of the first file that can be read. The run's own model is where its configuration says, and may be
        a link, as in a hub's cache."""
        for name in PLACES:
            with contextlib.suppress(OSError, ValueError):
                return read_own(self._path, f"{name}/{FILE}", MOST_TOKENIZER_BYTES).decode()
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # RuntimeError: ~ of nobody
            if own := section(self._config, "model").get("path"):
                file = (Path(str(own)).expanduser() / FILE).resolve()
                return read_own(file.parent, file.name, MOST_TOKENIZER_BYTES).decode()
        return None
