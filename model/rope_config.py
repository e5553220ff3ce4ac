"""How positions turn into angles: theta, YaRN, and which dimensions form a rotated pair.

Published configurations spell this in two ways, `rope_parameters {rope_type, rope_theta, ...}` and
`rope_theta` beside `rope_scaling {type, ...}`. Both end here.
"""

import math
from dataclasses import dataclass

from .keys import ConfigError, Keys

YARN_DEFAULTS = {
    "factor": None,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": None,
    "mscale_all_dim": None,
    "attention_factor": None,
    "truncate": True,
}


@dataclass(frozen=True)
class YarnConfig:
    """YaRN (arXiv 2309.00071) as DeepSeek uses it.

    `rotation_scale` multiplies cos and sin, `softmax_scale` multiplies the attention scale.
    """

    factor: float
    original_context: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    rotation_scale: float
    softmax_scale: float


@dataclass(frozen=True)
class RopeConfig:
    """`interleaved` tells how the checkpoint pairs dimensions: (2i, 2i+1) or (i, i + width/2)."""

    theta: float
    interleaved: bool
    yarn: YarnConfig | None


def read_rope(keys: Keys, max_position: int) -> RopeConfig:
    """Parse either spelling; raises ConfigError, also when no theta is given."""
    parameters = keys.section("rope_parameters", YARN_DEFAULTS)
    scaling = keys.section("rope_scaling", YARN_DEFAULTS)
    section = scaling if parameters is None else parameters
    return RopeConfig(
        theta=_theta(keys, parameters),
        interleaved=keys.flag("rope_interleave"),
        yarn=None if section is None else _read_yarn(section, max_position),
    )


def _theta(keys: Keys, parameters: Keys | None) -> float:
    holders = [h for h in (parameters, keys) if h is not None and "rope_theta" in h]
    if not holders:
        raise ConfigError("rope_theta is missing, both at top level and in rope_parameters")
    thetas = {holder.number("rope_theta", 1.0001, 1e12) for holder in holders}
    if len(thetas) > 1:
        raise keys.fail("rope_theta", sorted(thetas), "two spellings disagree")
    return thetas.pop()


def _read_yarn(section: Keys, max_position: int) -> YarnConfig | None:
    kind = "rope_type" if "rope_type" in section else "type"
    if section.choice(kind, ("yarn", "default")) == "default":
        return None
    if "partial_rotary_factor" in section:
        section.number("partial_rotary_factor", 1.0, 1.0)
    original = section.integer("original_max_position_embeddings", 1, 1 << 24)
    factor = _optional(section, "factor", 1.0, 1e6)
    factor = max_position / original if factor is None else factor
    mscale = _optional(section, "mscale", 0.0, 1e3)
    mscale_all = _optional(section, "mscale_all_dim", 0.0, 1e3)
    rotation = _optional(section, "attention_factor", 1e-3, 1e3)
    if rotation is None:
        both = bool(mscale and mscale_all)
        rotation = (
            yarn_mscale(factor, mscale or 1.0) / yarn_mscale(factor, mscale_all or 1.0)
            if both
            else yarn_mscale(factor, 1.0)
        )
    return YarnConfig(
        factor=factor,
        original_context=original,
        beta_fast=_optional(section, "beta_fast", 0.0, 1e6) or 32.0,
        beta_slow=_optional(section, "beta_slow", 0.0, 1e6) or 1.0,
        truncate=section.flag("truncate"),
        rotation_scale=rotation,
        softmax_scale=yarn_mscale(factor, mscale_all) ** 2 if mscale_all else 1.0,
    )


def _optional(section: Keys, key: str, low: float, high: float) -> float | None:
    return None if section.value(key) is None else section.number(key, low, high)


def yarn_mscale(factor: float, mscale: float) -> float:
    """Length-dependent temperature of YaRN: 0.1 * mscale * ln(factor) + 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
