"""Checking a decoder's settings: one clear sentence that names the setting, its value and what would be right."""


def whole(name: str, value: object, least: int) -> int:
    """Raises ValueError unless `value` is a whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is {value!r}; use a whole number of at least {least}")
    return value


def one_of(name: str, value: object, known: tuple[str, ...]) -> str:
    """Raises ValueError unless `value` is one of `known`."""
    if value not in known:
        raise ValueError(f"{name} is {value!r}; use one of {', '.join(known)}")
    return str(value)


def number(name: str, value: object, least: float, most: float = float("inf")) -> float:
    """Raises ValueError unless `value` is a number from `least` to `most`."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{name} is {value!r}; use a number from {least:g} to {most:g}")
    return float(value)
