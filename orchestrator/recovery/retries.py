"""`penstock run --retries N`: the run in a process of its own, and another that continues it when that one dies, or
ends by a failure that a new process may help with. `resume=auto` decides what it continues from.

An error of the configuration, the data or the user's code is not retried: it would come again.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from types import FrameType

from penstock.conf.errors import ConfigError, how_ended
from penstock.conf.run import RunConfig
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.orchestrator.run_directory.run_place import RunPlace
from penstock.orchestrator.signals import ending

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Seconds between two tries, twice as long each time: a dead process may still hold ports and memory for a while."""
LONG_S = 600.0
"""Least seconds of a try after which the pause is the first one again."""


def run_with_retries(overrides: Sequence[str], retries: int) -> int:
    """Run with up to so many retries. Returns the exit code of the last try."""
    words, config = list(overrides), load_config(overrides)
    if config.name is None:  # tries are of one run
        words.append(f"name={config.recipe_name}-{datetime.now():%Y%m%d-%H%M%S}")
        config = load_config(words)
    pause_s = FIRST_PAUSE_S
    for left in range(retries, -1, -1):
        began = time.monotonic()
        code, is_wanted = run_once(words)
        pause_s = FIRST_PAUSE_S if time.monotonic() - began >= LONG_S else pause_s
        if code == 0 or is_wanted or not left or not may_help(config, code):
            return code
        print(
            f"{config.name} has ended ({how_ended(code)}); continuing it in {pause_s:g} s, {left} of "
            f"--retries {retries} left.",
            file=sys.stderr,
        )
        time.sleep(pause_s)
        pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
        words = [word for word in words if not word.startswith("resume=")] + ["resume=auto"]
    raise AssertionError("the last try returns")


def run_once(words: Sequence[str]) -> tuple[int, bool]:
    """Make one try. Returns its exit code, negative for a signal, and whether it was asked to end. Ctrl-C reaches it by
    itself, unless it is ignored here. SIGTERM and SIGHUP are passed on: a process that has no handler for them yet dies
    of them."""
    wanted: list[int] = []
    process = subprocess.Popen([sys.executable, "-m", "penstock.cli.main", "run", *words])

    def heard(number: int, _: FrameType | None) -> None:
        wanted.append(number)
        if number != signal.SIGINT:
            process.send_signal(number)

    interrupting = [signal.SIGINT] if signal.getsignal(signal.SIGINT) != signal.SIG_IGN else []
    before = {number: signal.signal(number, heard) for number in [*ending(), *interrupting]}
    try:
        return process.wait(), bool(wanted)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def may_help(config: RunConfig, code: int) -> bool:
    """Return whether a new process may help: the last one was killed, or said so itself."""
    if code < 0:
        return True
    try:
        events = RunDirectory.open(RunPlace.of_run(config).path).read_events()
    except ConfigError:
        return False
    return bool(events) and events[-1]["kind"] == "failed" and bool(events[-1].get("may_recover"))
