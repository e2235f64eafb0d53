"""Shows seconds as people read them."""


def elapsed(seconds: float | None) -> str:
    """Seconds as text: `0:07`, `12:30`, `1:02:03`."""
    total = int(seconds or 0)
    hours, minutes = divmod(total // 60, 60)
    return f"{hours}:{minutes:02}:{total % 60:02}" if hours else f"{minutes}:{total % 60:02}"
