"""How amounts are written for people: bytes and large counts, to three figures."""

_BYTES = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_COUNTS = ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K"))


def shown_bytes(count: int) -> str:
    """Such as "3.25 GiB"."""
    for size, unit in _BYTES:
        # What would round to 1024 of the smaller unit is one of this.
        if count >= 0.9995 * size:
            return f"{_three_figures(count / size)} {unit}"
    return f"{count} bytes"


def shown_count(count: int) -> str:
    """Such as "671B"."""
    for size, unit in _COUNTS:
        if count >= size:
            return f"{_three_figures(count / size)}{unit}"
    return str(count)


def _three_figures(value: float) -> str:
    """At least the whole number: 1023.9 is four figures."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
