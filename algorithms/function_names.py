"""Names of an algorithm's functions, in graphs and in messages."""


def name_of(function: object, otherwise: str) -> str:
    """The function's own name, or that of the function that a `functools.partial` binds."""
    return str(getattr(getattr(function, "func", function), "__name__", otherwise))
