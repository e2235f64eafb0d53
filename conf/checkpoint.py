"""Times at which a run is saved, the number of checkpoints that stay, and the place where they are kept."""

from dataclasses import dataclass

from penstock.conf.checks import above, at_least


@dataclass
class CheckpointConfig:
    """Checkpoints. Training goes on while one is written."""

    every_steps: int = 50
    """Steps between checkpoints; the last step has one, too. 0: never. A run that dies loses at most so many."""
    keep_last: int = 2
    """Number of the newest checkpoints that stay: the one before is there if the newest turns out damaged."""
    keep_every_steps: int = 0
    """Divisor of the steps whose checkpoints stay for good. 0: none does."""
    directory: str | None = None
    """Place of the checkpoints: a directory that all nodes see, or an fsspec URL such as s3://bucket/run. `null`:
    `checkpoints/` of the run, at its URL if output_dir is one. What is written there is read back once before the
    checkpoint counts. No two runs may share one: a directory is locked against a second run, a URL cannot be."""
    timeout_s: float = 1800.0
    """Deadline of writing one, and of reading one."""

    def __post_init__(self) -> None:
        at_least("checkpoint.every_steps", self.every_steps, 0)
        at_least("checkpoint.keep_last", self.keep_last, 1)
        at_least("checkpoint.keep_every_steps", self.keep_every_steps, 0)
        above("checkpoint.timeout_s", self.timeout_s, 0)
