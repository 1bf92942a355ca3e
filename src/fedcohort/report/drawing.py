"""Pictures for a page, as SVG that loads nothing; a matrix is a PNG of one pixel per number."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

RAMP = ("#f7fbff", "#d6e6f4", "#abcfe6", "#6aaed6", "#3787c0", "#105ba4", "#08306b")


def matrix_image(values: NDArray[np.float64], most: float) -> str:
    """Return a PNG of the values from 0 to `most`, one pixel each, as a data URI.

    Examples
    --------
    >>> matrix_image(np.zeros((2, 2)), 1.0)[:22]
    'data:image/png;base64,'
    """
    levels = np.clip(np.rint(values / (most or 1) * 255), 0, 255).astype(np.uint8)
    height, width = levels.shape
    raw = np.zeros((height, width + 1), np.uint8)  # each line begins with its filter, 0
    raw[:, 1:] = levels
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
        (b"PLTE", ramp().tobytes()),
        (b"IDAT", zlib.compress(raw.tobytes(), 9)),
        (b"IEND", b""),
    ]
    png = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
    return "data:image/png;base64," + base64.b64encode(png).decode()


def ramp() -> NDArray[np.uint8]:
    """Return 256 colors from alike to far."""
    stops = np.array([[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in RAMP], float)
    where = np.linspace(0, len(RAMP) - 1, 256)
    mixed = [np.interp(where, np.arange(len(RAMP)), stops[:, k]) for k in range(3)]
    colors: NDArray[np.uint8] = np.rint(np.stack(mixed, axis=1)).astype(np.uint8)
    return colors


Floats = NDArray[np.float64]
COLORS = (
    "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9",
    "#d55e00", "#8c6bb1", "#7f7f7f", "#b5a400", "#5b4636",
)  # fmt: skip
MOST_COVERED = 12.0  # square pixels of other marks and names
NAMED = 40  # clients; beyond, the names at a matrix would not be readable


class Mark(NamedTuple):
    """One client in a picture."""

    name: str
    value: float
    low: float
    high: float
    color: str
    strong: bool
    tip: str


def short(name: str, most: int = 22) -> str:
    """Cut a long name in the middle."""
    return name if len(name) <= most else f"{name[: most - 9]}…{name[-8:]}"


def bars(marks: Sequence[Mark], lines: Mapping[str, float] | None = None) -> str:
    """Draw labeled bars from the largest, with their standard errors and lines to compare with."""
    left, width, step = 170, 960, 20
    lines = lines or {}
    most = max(*(m.high for m in marks), *lines.values(), 1e-12)
    scale = (width - left - 70) / most
    height = step * len(marks) + 30 + 16 * bool(lines)
    parts = [_axis(left, height - 24, scale, most, height)]
    for name, value in lines.items():
        x = left + scale * value
        parts.append(
            f'<path d="M{x:.1f} 0V{height - 38}" stroke="#d55e00" stroke-dasharray="5 4"/>'
            f'<text x="{x + 4:.1f}" y="{height - 28}" fill="#d55e00">{escape(name)}</text>'
        )
    for i, m in enumerate(marks):
        y = i * step + 4
        x, low, high = (left + scale * v for v in (m.value, m.low, m.high))
        weight = ' font-weight="600"' if m.strong else ""
        parts.append(
            f"<g><title>{escape(m.tip)}</title>"
            f'<text x="{left - 8}" y="{y + 11}" text-anchor="end"{weight}>'
            f"{escape(short(m.name))}</text>"
            f'<rect x="{left}" y="{y}" width="{max(x - left, 0.5):.1f}" height="14" rx="2" '
            f'fill="{m.color}" fill-opacity="0.85"/>'
            f'<path d="M{low:.1f} {y + 7}H{high:.1f}M{low:.1f} {y + 4}v6M{high:.1f} {y + 4}v6" '
            'stroke="#333" stroke-width="1" fill="none" stroke-opacity="0.6"/>'
            f'<text x="{high + 6:.1f}" y="{y + 11}" class="value">{m.value:.3f}</text></g>'
        )
    return _svg(width, height, parts, "Distance of each client to all data together")


def dots(marks: Sequence[Mark], lines: Mapping[str, float] | None = None) -> str:
    """Draw many clients side by side, from the largest, naming the strong ones where it fits."""
    left, width, height = 50, 960, 320
    lines = lines or {}
    most = max(*(m.high for m in marks), *lines.values(), 1e-12)
    up = (height - 50) / most
    right = (width - left - 20) / max(len(marks), 1)
    floor = height - 30
    parts = [
        f'<path d="M{left} {floor - up * v:.1f}H{width}" stroke="#e3e6ea"/>'
        f'<text x="{left - 6}" y="{floor - up * v + 4:.1f}" text-anchor="end">{v:g}</text>'
        for v in _ticks(most)
    ]
    for name, value in lines.items():
        y = floor - up * value
        parts.append(
            f'<path d="M{left} {y:.1f}H{width}" stroke="#d55e00" stroke-dasharray="5 4"/>'
            f'<text x="{width - 4}" y="{y - 4:.1f}" text-anchor="end" fill="#d55e00">'
            f"{escape(name)}</text>"
        )
    boxes: list[tuple[float, ...]] = []
    named = []
    for i, m in enumerate(marks):
        x, y = left + right * (i + 0.5), floor - up * m.value
        parts.append(
            f'<g><title>{escape(m.tip)}</title><path d="M{x:.1f} {floor - up * m.low:.1f}'
            f'V{floor - up * m.high:.1f}" stroke="#cdd3da" stroke-width="0.8"/>'
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{4 if m.strong else 2.4}" fill="{m.color}"/>'
            "</g>"
        )
        if m.strong and len(boxes) < NAMED:
            named.append(_name(short(m.name), x, y, boxes, width))
    parts.append(f'<text x="{left}" y="{height - 8}">clients, the farthest first</text>')
    return _svg(width, height, [*parts, *named], "Distance of each client to all data together")


def scatter(marks: Sequence[Mark], positions: Floats, name_all: bool) -> str:
    """Draw a map with equal scales on both axes; names are placed where they cover least."""
    width, height, rim = 560, 460, 46
    span = float(np.ptp(positions, axis=0).max()) or 1.0
    scale = min(width - 2 * rim, height - 2 * rim) / span
    middle = (positions.max(axis=0) + positions.min(axis=0)) / 2
    at = (positions - middle) * [scale, -scale] + [width / 2, height / 2]
    boxes: list[tuple[float, ...]] = [(x - 5, y - 5, x + 5, y + 5) for x, y in at.tolist()]
    parts = []
    for m, (x, y) in zip(marks, at.tolist(), strict=True):
        ring = ' stroke="#111" stroke-width="2"' if m.strong else ' stroke="#fff"'
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{6 if m.strong else 4.5}" fill="{m.color}" '
            f'fill-opacity="0.85"{ring}><title>{escape(m.tip)}</title></circle>'
        )
    for m, (x, y) in zip(marks, at.tolist(), strict=True):
        if name_all or m.strong:
            parts.append(_name(short(m.name, 18), x, y, boxes, width))
    length = _ticks(span)[1]
    parts.append(
        f'<path d="M16 {height - 16}h{length * scale:.1f}M16 {height - 20}v8'
        f'M{16 + length * scale:.1f} {height - 20}v8" stroke="#555" fill="none"/>'
        f'<text x="16" y="{height - 24}">{length:g}</text>'
    )
    return _svg(width, height, parts, "Map of the clients")


def matrix(values: Floats, names: Sequence[str], colors: Sequence[str]) -> str:
    """Draw a matrix as one picture, with a strip of the clients' colors and a scale."""
    n, named = len(values), len(values) <= NAMED
    left, top, side = (140 if named else 24), 18, 400
    most = float(np.quantile(values, 0.99))  # a few extreme pairs must not pale all others
    cell = side / n
    parts = [
        f'<image x="{left}" y="{top}" width="{side}" height="{side}" '
        f'preserveAspectRatio="none" style="image-rendering:pixelated" '
        f'href="{matrix_image(values, most)}"/>'
        f'<rect x="{left}" y="{top}" width="{side}" height="{side}" fill="none" stroke="#c8ccd2"/>'
    ]
    for i, (name, color) in enumerate(zip(names, colors, strict=True)):
        y = top + i * cell
        parts.append(
            f'<rect x="{left - 10}" y="{y:.2f}" width="7" height="{cell + 0.1:.2f}" '
            f'fill="{color}"/>'
        )
        if named:
            size = min(11.0, cell)
            parts.append(
                f'<text x="{left - 14}" y="{y + cell / 2 + size / 3:.1f}" text-anchor="end" '
                f'font-size="{size:.1f}">{escape(short(name, 18))}</text>'
            )
    parts.append(_color_scale(left, top + side + 14, side, most))
    return _svg(left + side + 20, top + side + 50, parts, "Distance between every two clients")


def _color_scale(x: float, y: float, width: float, most: float) -> str:
    stops = "".join(
        f'<stop offset="{i / (len(RAMP) - 1):.3f}" stop-color="{color}"/>'
        for i, color in enumerate(RAMP)
    )
    return (
        f'<defs><linearGradient id="scale">{stops}</linearGradient></defs>'
        f'<rect x="{x}" y="{y}" width="{width}" height="8" fill="url(#scale)"/>'
        f'<text x="{x}" y="{y + 22}">0, alike</text>'
        f'<text x="{x + width}" y="{y + 22}" text-anchor="end">{most:.3f} or more</text>'
    )


def _name(name: str, x: float, y: float, boxes: list[tuple[float, ...]], width: float) -> str:
    """Place a name right, left, above or below its mark; none where it would cover another."""
    long = 6.2 * len(name)
    places = [(x + 8, y + 4), (x - 8 - long, y + 4), (x - long / 2, y - 9), (x - long / 2, y + 17)]
    covered = []
    for px, py in places:
        box = px, py - 9, px + long, py + 2
        outside = 1000.0 if px < 0 or px + long > width else 0.0
        covered.append((outside + sum(_overlap(box, other) for other in boxes), box))
    best = min(range(4), key=lambda i: covered[i][0])
    if covered[best][0] > MOST_COVERED:
        return ""
    boxes.append(covered[best][1])
    px, py = places[best]
    return f'<text class="name" x="{px:.1f}" y="{py:.1f}">{escape(name)}</text>'


def _overlap(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    wide = min(a[2], b[2]) - max(a[0], b[0])
    high = min(a[3], b[3]) - max(a[1], b[1])
    return wide * high if wide > 0 and high > 0 else 0.0


def _axis(left: float, y: float, scale: float, most: float, height: float) -> str:
    return "".join(
        f'<path d="M{left + scale * v:.1f} 0V{y}" stroke="#e3e6ea"/>'
        f'<text x="{left + scale * v:.1f}" y="{height - 8}" text-anchor="middle">{v:g}</text>'
        for v in _ticks(most)
    )


def _ticks(most: float) -> list[float]:
    """Return round numbers from 0 to `most`, about four of them.

    Examples
    --------
    >>> _ticks(0.35)
    [0.0, 0.1, 0.2, 0.3]
    """
    rough = most / 4
    power = 10.0 ** np.floor(np.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    return [float(f"{i * step:.6g}") for i in range(int(most / step * 1.0001) + 1)]


def _svg(width: float, height: float, parts: Sequence[str], label: str) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}" '
        f'style="max-width:{width}px">{"".join(parts)}</svg>'
    )
