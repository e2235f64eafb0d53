"""What a function of an algorithm is called, in graphs and in messages."""


def name_of(function: object, otherwise: str) -> str:
    """Its own name, or that of what a `functools.partial` binds."""
    return str(getattr(getattr(function, "func", function), "__name__", otherwise))
