"""The choice of groups for the next batch: strict FIFO, or within a window past a straggler. Pure."""

from collections.abc import Callable


def choose_groups(
    first: int, end: int, count: int, window: int, is_waiting: Callable[[int], bool], is_complete: Callable[[int], bool]
) -> list[int] | None:
    """The `count` oldest complete groups that may be taken one after the other, or None if there are not so many.

    Groups are numbered in the order of admission; those waiting lie in `[first, end)`. A group may be taken while its
    number is less than `window` above that of the oldest one that still waits. So whichever group lags, at most
    `window - 1` later ones overtake it: the window does not slide on while its oldest group stays. 1 is strict FIFO.

        complete = {1, 2, 3}; choose_groups(0, 4, 2, 3, ...)  # [1, 2]: group 0 lags and is overtaken by two
        complete = {1, 2, 3}; choose_groups(0, 4, 3, 3, ...)  # None: group 3 would be the third to overtake it
    """
    chosen: list[int] = []
    group, limit, lags = first, end, False
    while len(chosen) < count:
        if group >= limit:
            return None
        if is_waiting(group):
            if is_complete(group):
                chosen.append(group)
            elif not lags:
                limit, lags = min(end, group + window), True
        group += 1
    return chosen
