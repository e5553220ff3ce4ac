"""The times of a `minidsa bench` run as a picture: a curve a measure, of the share within a time.

One SVG file, written by hand: four curves need no plotting library, and any browser shows it.
"""

from collections.abc import Sequence
from html import escape
from typing import Any

_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 320, 180, 50, 60, 70
_NAMES = (
    ("ttft", "time to first token"),
    ("tpot", "time of a token behind the first"),
    ("itl", "between two pieces"),
    ("e2e", "whole answer"),
)
_STYLE = (
    "text{font:12px sans-serif;fill:#222}.t{font-size:14px;font-weight:600}"
    "rect,line{fill:none;stroke:#ccc}polyline{fill:none;stroke:#1f5fbf;stroke-width:2}"
)


def plot(report: dict[str, Any]) -> str:
    """The SVG of a report of `bench`."""
    load = report["load"]
    arrivals = f"{load['rate']:g} requests/s" if load["rate"] else f"{load['concurrency']} at once"
    title = (
        f"{report['completed']} answers, {arrivals}: {report['tokens_per_second']:.1f} tokens/s, "
        f"{report['requests_per_second']:.2f} requests/s"
    )
    panels = [
        _panel(index, name, text, report["quantiles_milliseconds"][name])
        for index, (name, text) in enumerate(_NAMES)
    ]
    width, height = 2 * (_WIDTH + _GAP) + _LEFT, 2 * (_HEIGHT + _GAP) + _TOP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">'
        f'<style>{_STYLE}</style><rect width="{width}" height="{height}" style="fill:#fff"/>'
        f'<text class="t" x="{_LEFT}" y="24">{escape(title)}</text>{"".join(panels)}</svg>\n'
    )


def _panel(index: int, name: str, text: str, quantiles: Sequence[float]) -> str:
    """A curve over milliseconds; quantiles: equally spaced, the least first, empty for none."""
    left, top = _LEFT + index % 2 * (_WIDTH + _GAP), _TOP + index // 2 * (_HEIGHT + _GAP)
    most = max(quantiles, default=0.0) or 1.0
    steps = max(len(quantiles) - 1, 1)
    points = " ".join(
        f"{left + _WIDTH * value / most:.1f},{top + _HEIGHT * (1 - place / steps):.1f}"
        for place, value in enumerate(quantiles)
    )
    right, bottom = left + _WIDTH, top + _HEIGHT
    lines = [
        f'<rect x="{left}" y="{top}" width="{_WIDTH}" height="{_HEIGHT}"/>',
        f'<polyline points="{points}"/>',
        _label(left, top - 8, f"{name.upper()}, {text}"),
        _label(left, bottom + 16, "0"),
        _label(right, bottom + 16, f"{most:.1f} ms", "end"),
    ]
    # p99 lies too close to p90 for a word of its own.
    for share, word in ((0.5, "p50"), (0.9, "p90"), (0.99, "")):
        y = bottom - _HEIGHT * share
        lines.append(f'<line x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        lines.append(_label(left - 6, y + 4, word, "end"))
    return "".join(lines)


def _label(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'
