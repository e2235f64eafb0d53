"""The text of single tokens, by the tokenizer that a run left: read by `tokenizers`, without transformers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.orchestrator.ui.runs.found import section

PLACES = ("model", "initial_model")
"""In a run's directory."""
FILE = "tokenizer.json"


class TokenTexts:
    """Of one run."""

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        own = section(config, "model").get("path")
        places = [path / name for name in PLACES] + ([Path(str(own)).expanduser()] if own else [])
        self._file = next((place / FILE for place in places if (place / FILE).is_file()), None)
        self._tokenizer: Any = None

    def of(self, ids: Sequence[int]) -> list[str]:
        """One text a token; its number where there is no tokenizer to read. What is no whole character by itself is
        shown as the sign for that."""
        if self._tokenizer is None and self._file is not None:
            from tokenizers import Tokenizer

            try:
                self._tokenizer = Tokenizer.from_file(str(self._file))
            except Exception:  # noqa: BLE001 - whatever the package makes of a file of another version
                self._file = None
        if self._tokenizer is None:
            return [f"[{token}]" for token in ids]
        texts: list[str] = self._tokenizer.decode_batch([[token] for token in ids], skip_special_tokens=False)
        return texts
