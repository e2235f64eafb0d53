"""The tiny model and the prompts of other whole runs."""

from tests.orchestrator.conftest import small_run

__all__ = ["small_run"]
