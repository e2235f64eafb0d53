"""Refusals of the store, by kind. Each names the column, row or stage and what was expected; nothing has changed.

`StoreError`, `LeaseExpired` and `StalenessViolation`, which other packages handle too, are in `conf/errors.py`. All are
built from their message alone, so they pickle and cross Ray, and travel by name between processes (`data/codec.py`).
"""

from penstock.conf.errors import LeaseExpired as LeaseExpired
from penstock.conf.errors import StalenessViolation as StalenessViolation
from penstock.conf.errors import StoreError as StoreError


def error_named(name: str, message: str) -> StoreError:
    """The error of that name, or a `StoreError` that says it."""
    kind = globals().get(name)
    if isinstance(kind, type) and issubclass(kind, StoreError):
        return kind(message)
    return StoreError(f"{name}: {message}")


class StoreClosed(StoreError):
    """The store takes no more groups; the message has the reason that it was closed with."""


class StoreUnreachable(StoreError):
    """The store's machine cannot be reached, or could not for so long that this client counts as gone. Whether a call
    that was under way was carried out is not known."""


class RowsUnreachable(StoreError):
    """The node that rows lie on cannot be reached. The rows are as they were."""


class UnknownColumn(StoreError):
    """A column that the dataflow does not declare, or that this stage does not write."""


class MissingColumn(StoreError):
    """A group comes without one of the source's columns."""


class WrongType(StoreError):
    """A value that does not fit the column's dtype or shape."""


class WrongLength(StoreError):
    """A column without exactly one value a row, or token columns of one row that differ in length."""


class NotFinite(StoreError):
    """NaN or infinity in a column that forbids it."""


class UnknownRow(StoreError):
    """A row that was never admitted."""


class DuplicateRow(StoreError):
    """A row that one call has twice."""


class RowNotLeased(StoreError):
    """A row that the lease does not hold."""


class LeaseSuperseded(LeaseExpired):
    """A write of rows that another lease has written first: two engines had sampled them."""


class RowsLost(StoreError):
    """Rows that can be read no more: the node that they were on is gone, or the store that had granted them. They are
    asked for again; a rank without its part of a batch cannot compute its step."""


class UnknownStage(StoreError):
    """A stage that the dataflow does not have, or that cannot be leased this way."""


class TooLarge(StoreError):
    """A row, or a group, larger than the whole store may be."""


class CorruptSnapshot(StoreError):
    """A snapshot that cannot be restored; the message names the file, and the snapshot before if there is one."""
