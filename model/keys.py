"""Strict reading of a parsed JSON object: one line for whatever is wrong, naming key and value.

Configuration files come from strangers. Each value is checked for type and range as it is read, so
nothing is sized by a number that has not been looked at.
"""

import math
from collections.abc import Mapping, Sequence


class ConfigError(ValueError):
    """A configuration that cannot be served; the message names the key and the value."""


class Keys:
    """Typed access to one JSON object.

    `defaults` are documented defaults of absent keys; a key that is in neither is an error.
    `prefix` is how nested objects show up in messages (`rope_scaling.factor`).
    """

    def __init__(
        self, raw: Mapping[str, object], defaults: Mapping[str, object], prefix: str = ""
    ) -> None:
        self._raw = raw
        self._defaults = defaults
        self._prefix = prefix

    def __contains__(self, key: str) -> bool:
        return self._raw.get(key) is not None

    def value(self, key: str) -> object:
        """The raw value or its default; raises ConfigError when there is neither."""
        if key in self._raw:
            return self._raw[key]
        if key in self._defaults:
            return self._defaults[key]
        raise ConfigError(f"{self._prefix}{key} is missing from the configuration")

    def fail(self, key: str, value: object, why: str) -> ConfigError:
        """The error for a value that was read but cannot be used."""
        return ConfigError(f"{self._prefix}{key} = {value!r}: {why}"[:400])

    def integer(self, key: str, low: int, high: int) -> int:
        value = self.value(key)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(key, value, "an integer is expected")
        if not low <= value <= high:
            raise self.fail(key, value, f"out of range {low}..{high}")
        return value

    def optional_integer(self, key: str, low: int, high: int) -> int | None:
        return None if self.value(key) is None else self.integer(key, low, high)

    def number(self, key: str, low: float, high: float) -> float:
        value = self.value(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fail(key, value, "a number is expected")
        if not math.isfinite(value) or not low <= value <= high:
            raise self.fail(key, value, f"out of range {low:g}..{high:g}")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.value(key)
        if not isinstance(value, bool):
            raise self.fail(key, value, "true or false is expected")
        return value

    def choice(self, key: str, allowed: Sequence[object]) -> object:
        """One of `allowed`; the message lists them."""
        value = self.value(key)
        if value not in allowed or isinstance(value, bool) != isinstance(allowed[0], bool):
            names = ", ".join(repr(a) for a in allowed)
            raise self.fail(key, value, f"not supported, expected {names}")
        return value

    def integers(self, key: str, low: int, high: int) -> tuple[int, ...]:
        """An integer, a list of them or null, as a tuple."""
        value = self.value(key)
        if value is None:
            return ()
        listed = value if isinstance(value, list) else [value]
        return tuple(Keys({key: one}, {}, self._prefix).integer(key, low, high) for one in listed)

    def section(self, key: str, defaults: Mapping[str, object]) -> "Keys | None":
        """A nested object, or None where it is absent or null."""
        value = self._raw.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.fail(key, value, "an object is expected")
        return Keys(value, defaults, f"{self._prefix}{key}.")
