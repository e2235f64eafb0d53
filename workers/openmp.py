"""How OpenMP's threads wait for each other in a process that computes on CPUs. Called before torch is imported, since
OpenMP reads it once.

Threads that meet at a barrier spin by default. Engines, ranks and everything else of a run share the cores, so the one
that all wait for may have none while the others spin on theirs: beside one busy process two spinning threads take 1.5
times as long as two that sleep, which alone are as fast.
"""

import os


def let_waiting_threads_sleep() -> None:
    """What the user has set stays."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
