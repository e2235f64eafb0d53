"""The tracker Weights & Biases. WANDB_* variables and `wandb login` keep their meaning."""

import os
import re
from collections.abc import Mapping
from typing import Any

from penstock.conf.tracking import WandbConfig
from penstock.orchestrator.observability.reporting.sinks.tracker import (
    DEFAULT_PROJECT,
    FAILED,
    INTERRUPTED,
    About,
    End,
    Opened,
)  # fmt: skip

EXIT_CODES = {FAILED: 1, INTERRUPTED: 255}
"""Exit codes that W&B shows as failed and as killed."""
MAX_TAG_CHARS = 64


class Wandb:
    def __init__(self, config: WandbConfig, timeout_s: float) -> None:
        """`timeout_s`: deadline of W&B's uploads at the end."""
        self._config, self._timeout_s = config, timeout_s
        self._run: Any = None

    def open(self, about: About, id: str | None) -> Opened:
        import wandb  # late: half a second, and only where it is asked for

        mode: Any = self._config.mode or os.environ.get("WANDB_MODE")  # wandb looks at it once in a process
        self._run = wandb.init(
            entity=self._config.entity,
            project=about.project or os.environ.get("WANDB_PROJECT") or DEFAULT_PROJECT,
            dir=self._config.directory or os.environ.get("WANDB_DIR") or about.directory,
            mode=mode,
            id=id,
            resume="allow" if id else None,
            reinit="create_new",  # a program may have a run of its own
            name=about.name,
            group=about.group,
            tags=tags_of(about.tags),
            config=dict(about.config),
            allow_val_change=True,  # a run may go on for more steps
            # A console that is captured is no terminal, and the display needs one.
            settings=wandb.Settings(console="off", silent=True, finish_timeout=self._timeout_s),
        )
        place = f"wandb sync {self._run.settings.sync_dir}" if self._run.offline else str(self._run.url)
        return Opened(self._run.id, place)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def finish(self, end: End) -> None:
        self._run.summary.update(end.facts())
        self._run.finish(exit_code=EXIT_CODES.get(end.state, 0))


def tags_of(tags: Mapping[str, str]) -> list[str]:
    """Tags for W&B, whose tags have no names.

    >>> tags_of({"recipe": "arithmetic", "team": "blue"})
    ['recipe: arithmetic', 'team: blue']
    """
    return [re.sub(r"\s+", " ", f"{name}: {value}")[:MAX_TAG_CHARS] for name, value in tags.items()]
