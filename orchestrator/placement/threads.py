"""CPU threads of engines and ranks. Called by `fleet.py`."""

from penstock.conf.run import RunConfig


def threads_per_worker(role: str, config: RunConfig, num_cores: int) -> int:
    """CPU threads of an engine (`rollout`) or of a rank (`trainer`, `scorer`).

    With `max_staleness=0` generation and training take turns, so each side divides every core among its own kind;
    otherwise they run at the same time and all share them evenly.
    """
    engines, ranks = config.rollout.num_workers, config.trainer.num_ranks
    requested, workers = (
        (config.rollout.num_threads, engines) if role == "rollout" else (config.trainer.num_threads, ranks)
    )
    if config.max_staleness > 0:
        workers = engines + ranks
    return requested or max(1, num_cores // workers)
