"""How many random cases a property, a history or a run with kills gets, by `PENSTOCK_AMOUNT`.

`few` is the default, also of `make test`: a tenth. `make verify` says `all` and `make soak` says `many`.
"""

import os

LEVEL = os.environ.get("PENSTOCK_AMOUNT", "few")
IS_MANY = LEVEL == "many"


def amount(everything: int, many: int | None = None) -> int:
    """`everything`: what `make verify` takes. `many`: what `make soak` takes, if it is more."""
    return {"few": max(1, everything // 10), "all": everything, "many": many or everything}[LEVEL]
