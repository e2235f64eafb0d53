"""Number of random cases of a property, a history or a run with kills.

The environment variable `PENSTOCK_AMOUNT` selects it: `few`, the default and that of `make test`, is a tenth; `make
verify` sets `all`, `make soak` sets `many`.
"""

import os

LEVEL = os.environ.get("PENSTOCK_AMOUNT", "few")
IS_MANY = LEVEL == "many"


def amount(everything: int, many: int | None = None) -> int:
    """`everything`: the number for `make verify`. `many`: the number for `make soak`, if it is larger."""
    return {"few": max(1, everything // 10), "all": everything, "many": many or everything}[LEVEL]
