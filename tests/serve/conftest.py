"""The tiny model and the prompts of other whole runs."""

from tests.orchestrator.conftest import small_run, without_pngs

__all__ = ["small_run", "without_pngs"]
