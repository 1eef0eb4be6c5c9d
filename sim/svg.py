"""Plots as SVG text, for a browser, a page or an editor.

What always holds: the text is self-contained (no script, no font, no link), the same data give the same bytes, each
axis has its unit, and a panel without data says so.

What it doesn't do: anything interactive, or any format but SVG. It is small on purpose: a plotting library
would be twenty times the rest of the simulator, to install and to start.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["COLOURS", "Bars", "Chart", "Series", "bytes_label", "figure", "seconds_label", "si"]

# Distinguishable by people who can't distinguish red and green, too.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")

_WIDTH, _HEIGHT = 600, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 20, 62, 54
_INK, _FAINT, _GRID = "#222222", "#666666", "#e4e4e4"
_TICKS = 6
_LEGEND_CHARACTER_PX = 6.6
_CAPTION_CHARACTER_PX = 6.3
_LINE_PX = 18
_BAR_PX, _BARS_SHARE = 11, 0.82  # a bar's minimum thickness, and the share of a group's height that is bars


def si(value: float, unit: str = "") -> str:
    """A number in at most four characters and a prefix: 1.5 M, 20 k, 300 m."""
    if value == 0:
        return f"0 {unit}".strip()
    rounded = abs(float(f"{value:.3g}"))  # 999.9 is 1 k
    power = min(5, max(-4, math.floor(math.log10(rounded) / 3 + 1e-9)))
    prefix = {-4: "p", -3: "n", -2: "u", -1: "m", 0: "", 1: "k", 2: "M", 3: "G", 4: "T", 5: "P"}[power]
    return f"{value / 1000.0**power:.3g} {prefix}{unit}".strip()


def bytes_label(value: float) -> str:
    """A label for an axis of bytes."""
    return si(value, "B")


def seconds_label(value: float) -> str:
    """A label for an axis of seconds, without kiloseconds."""
    return f"{value:,.0f} s" if value >= 1000 else si(value, "s")  # noqa: PLR2004 - where the prefix would begin


@dataclass(frozen=True, slots=True)
class Series:
    """One line, or its points, with its name in the legend."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    dashed: bool = False
    points: bool = False  # points instead of a line
    marked: bool = False  # points on the line
    colour: str = ""  # empty: the next of COLOURS


@dataclass(frozen=True, slots=True)
class Chart:
    """One panel of lines or points over two axes."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    x_log: bool = False
    y_log: bool = False
    x_format: Callable[[float], str] = si
    y_format: Callable[[float], str] = si
    y_from_zero: bool = False
    rules: Sequence[tuple[float, str]] = field(default=())  # horizontal lines with a word each


@dataclass(frozen=True, slots=True)
class Bars:
    """One panel of horizontal bars; each group has one bar per series."""

    title: str
    x_label: str
    groups: Sequence[str]
    series: Sequence[tuple[str, Sequence[float]]]
    x_format: Callable[[float], str] = si
    x_log: bool = False
    rule: tuple[float, str] | None = None  # a vertical line with a word
    colours: Sequence[str] = COLOURS


class _Axis:
    """Values to pixels, and the ticks."""

    def __init__(
        self,
        values: Sequence[float],
        begin_px: float,
        end_px: float,
        *,
        log: bool,
        zero: bool,
        tight: bool = False,
    ) -> None:
        low, high = min(values), max(values)
        self.log = log
        if log:
            low, high = math.log10(low), math.log10(high)
            if high - low < 1e-6:  # noqa: PLR2004 - one value, or what rounds to one
                low, high = low - 0.5, high + 0.5
            elif zero:  # bars must begin somewhere below the smallest
                low = math.floor(low - 1e-9)
            margin = 0.02 * (high - low)
            low, high = low - (0 if zero else margin), high + margin
            self.ticks = self._log_ticks(low, high)
        else:
            low = min(low, 0.0) if zero else low
            if high - low < 1e-12 * max(1.0, abs(high)):
                low, high = (low - 0.5, high + 0.5) if low else (0.0, 1.0)
            step = self._step((high - low) / _TICKS)
            first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
            self.ticks = [i * step for i in range(first, last + 1)]
            if tight:  # a plot over time ends where time does
                self.ticks = [tick for tick in self.ticks if low - 1e-9 * step <= tick <= high + 1e-9 * step]
            else:
                low, high = first * step, last * step
        self._low, self._scale = low, (end_px - begin_px) / (high - low)
        self._begin_px = begin_px

    @staticmethod
    def _step(rough: float) -> float:
        power = 10.0 ** math.floor(math.log10(rough))
        return next(nice * power for nice in (1, 2, 2.5, 5, 10) if rough <= nice * power * (1 + 1e-9))

    @staticmethod
    def _log_ticks(low: float, high: float) -> list[float]:
        decades = range(math.ceil(low), math.floor(high) + 1)
        if len(decades) > 2 * _TICKS:
            decades = decades[:: math.ceil(len(decades) / (2 * _TICKS))]
        ticks = [10.0**power for power in decades]
        if len(ticks) < 3:  # noqa: PLR2004 - too few to read a scale by
            ticks = [
                digit * 10.0**power
                for power in range(math.floor(low), math.ceil(high) + 1)
                for digit in (1, 2, 5)
                if low <= math.log10(digit * 10.0**power) <= high
            ]
        return ticks

    def __call__(self, value: float) -> float:
        place = math.log10(value) if self.log else value
        return self._begin_px + (place - self._low) * self._scale


def _text(x: float, y: float, words: str, *, anchor: str = "start", size: int = 12, extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"{extra}>{escape(words)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, extra: str = "") -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{extra}/>'


def _legend(names: Sequence[tuple[str, str, bool]]) -> list[str]:
    """Entries of name, colour, dashed; in one row under the title, or two."""
    parts, x, y = [], float(_LEFT), 42.0
    for name, colour, dashed in names:
        width = 30 + _LEGEND_CHARACTER_PX * len(name)
        if x + width > _WIDTH and x > _LEFT:
            x, y = float(_LEFT), y + 15
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        parts += [
            _line(x, y - 4, x + 18, y - 4, colour, f' stroke-width="3"{dash}'),
            _text(x + 23, y, name, size=11),
        ]
        x += width
    return parts


def _usable(chart: Chart, one: Series) -> list[tuple[float, float]]:
    return [
        (x, y)
        for x, y in zip(one.xs, one.ys, strict=True)
        if math.isfinite(x) and math.isfinite(y) and (x > 0 or not chart.x_log) and (y > 0 or not chart.y_log)
    ]


def _height(chart: Chart | Bars) -> int:
    """The height of a panel: enough that the number after a bar doesn't touch the next one's."""
    if isinstance(chart, Chart):
        return _HEIGHT
    return max(
        _HEIGHT, _TOP + _BOTTOM + math.ceil(len(chart.groups) * len(chart.series) * _BAR_PX / _BARS_SHARE)
    )


def _frame(title: str, y_label: str, x_label: str, height: int = _HEIGHT) -> list[str]:
    middle = (_TOP + height - _BOTTOM) / 2
    parts = [
        _text(_LEFT, 22, title, size=14, extra=' font-weight="600"'),
        _text(
            (_LEFT + _WIDTH - _RIGHT) / 2, height - 14, x_label, anchor="middle", extra=f' fill="{_FAINT}"'
        ),
    ]
    if y_label:
        turn = f' fill="{_FAINT}" transform="rotate(-90 16 {middle:.1f})"'
        parts.append(_text(16, middle, y_label, anchor="middle", extra=turn))
    return parts


def _nothing() -> str:
    return _text(
        _WIDTH / 2, _HEIGHT / 2, "nothing to draw: no data", anchor="middle", extra=f' fill="{_FAINT}"'
    )


def _chart(chart: Chart) -> list[str]:
    parts = _frame(chart.title, chart.y_label, chart.x_label)
    drawn = [(one, _usable(chart, one)) for one in chart.series]
    everything = [pair for _, pairs in drawn for pair in pairs]
    if not everything:
        return [*parts, _nothing()]
    rules = [value for value, _ in chart.rules]
    x_axis = _Axis(
        [x for x, _ in everything], _LEFT, _WIDTH - _RIGHT, log=chart.x_log, zero=False, tight=True
    )
    y_axis = _Axis(
        [*(y for _, y in everything), *rules],
        _HEIGHT - _BOTTOM,
        _TOP,
        log=chart.y_log,
        zero=chart.y_from_zero and not chart.y_log,
    )
    for tick in y_axis.ticks:
        y = y_axis(tick)
        parts += [
            _line(_LEFT, y, _WIDTH - _RIGHT, y, _GRID),
            _text(_LEFT - 7, y + 4, chart.y_format(tick), anchor="end", size=11),
        ]
    for tick in x_axis.ticks:
        x = x_axis(tick)
        parts += [
            _line(x, _TOP, x, _HEIGHT - _BOTTOM, _GRID),
            _text(x, _HEIGHT - _BOTTOM + 17, chart.x_format(tick), anchor="middle", size=11),
        ]
    for value, word in chart.rules:
        y = y_axis(value)
        below = 13 if y + 13 < _HEIGHT - _BOTTOM else -5  # curves tend to lie above such a line
        parts += [
            _line(_LEFT, y, _WIDTH - _RIGHT, y, _FAINT, ' stroke-dasharray="2 3"'),
            _text(_WIDTH - _RIGHT - 4, y + below, word, anchor="end", size=11, extra=f' fill="{_FAINT}"'),
        ]
    names = []
    for i, (one, pairs) in enumerate(drawn):
        colour = one.colour or COLOURS[i % len(COLOURS)]
        if one.name:
            names.append((one.name, colour, one.dashed))
        pixels = [(x_axis(x), y_axis(y)) for x, y in pairs]
        if not one.points:
            dash = ' stroke-dasharray="5 4"' if one.dashed else ""
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in pixels)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        if one.points or one.marked:
            parts += [
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}" fill-opacity="0.75"/>'
                for x, y in pixels
            ]
    return [*parts, *_legend(names)]


def _bars(bars: Bars) -> list[str]:
    height = _height(bars)
    parts = _frame(bars.title, "", bars.x_label, height)
    values = [v for _, row in bars.series for v in row if math.isfinite(v) and (v > 0 or not bars.x_log)]
    if not values:
        return [*parts, _nothing()]
    left = _LEFT + max(0.0, _LEGEND_CHARACTER_PX * max(map(len, bars.groups)) - _LEFT + 14)
    at_rule = [bars.rule[0]] if bars.rule else []
    axis = _Axis([*values, *at_rule], left, _WIDTH - _RIGHT - 48, log=bars.x_log, zero=True)
    base = left if bars.x_log else axis(0.0)
    for tick in axis.ticks:
        x = axis(tick)
        parts += [
            _line(x, _TOP, x, height - _BOTTOM, _GRID),
            _text(x, height - _BOTTOM + 17, bars.x_format(tick), anchor="middle", size=11),
        ]
    step = (height - _BOTTOM - _TOP) / len(bars.groups)
    thick = min(18.0, step * _BARS_SHARE / len(bars.series))
    size = 11 if step > 13 else 9  # noqa: PLR2004 - below it, lines of 11 would touch
    for g, group in enumerate(bars.groups):
        top = _TOP + g * step + (step - thick * len(bars.series)) / 2
        parts.append(_text(left - 7, _TOP + (g + 0.5) * step + 4, group, anchor="end", size=size))
        for i, (_, row) in enumerate(bars.series):
            if not math.isfinite(row[g]) or (bars.x_log and row[g] <= 0):
                continue
            end, y = axis(row[g]), top + i * thick
            colour = bars.colours[i % len(bars.colours)]
            wide, tall = max(0.5, end - base), max(0.5, thick - 1)
            parts += [
                f'<rect x="{base:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{tall:.1f}" fill="{colour}"/>',
                _text(end + 4, y + thick / 2 + 3.5, bars.x_format(row[g]), size=min(10, round(thick) + 1)),
            ]
    if bars.rule:
        x = axis(bars.rule[0])
        parts += [
            _line(x, _TOP - 4, x, height - _BOTTOM, _INK, ' stroke-dasharray="4 3"'),
            _text(x + 4, _TOP - 4, bars.rule[1], size=11),
        ]
    colours = bars.colours
    names = [(name, colours[i % len(colours)], False) for i, (name, _) in enumerate(bars.series) if name]
    return [*parts, *_legend(names)]


def _wrapped(words: str, width_px: float) -> list[str]:
    lines, line = [], ""
    for word in words.split():
        if line and _CAPTION_CHARACTER_PX * (len(line) + 1 + len(word)) > width_px:
            lines.append(line)
            line = ""
        line = f"{line} {word}".strip()
    return [*lines, line]


def figure(charts: Sequence[Chart | Bars], *, columns: int = 2, caption: Sequence[str] = ()) -> str:
    """Panels side by side, with sentences under them."""
    columns = min(columns, len(charts))
    tops = [0]
    for first in range(0, len(charts), columns):
        tops.append(tops[-1] + max(map(_height, charts[first : first + columns])))
    lines = [line for sentence in caption for line in _wrapped(sentence, columns * _WIDTH - 2 * _RIGHT)]
    width, height = columns * _WIDTH, tops[-1] + (_LINE_PX * (len(lines) + 1) if lines else 0)
    font = "system-ui, Segoe UI, Helvetica, Arial, sans-serif"
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{font}" fill="{_INK}">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for i, chart in enumerate(charts):
        drawn = _chart(chart) if isinstance(chart, Chart) else _bars(chart)
        row, column = divmod(i, columns)
        parts += [f'<g transform="translate({column * _WIDTH} {tops[row]})">', *drawn, "</g>"]
    for i, line in enumerate(lines):
        parts.append(_text(_RIGHT, tops[-1] + _LINE_PX * (i + 1), line, extra=f' fill="{_FAINT}"'))
    return "\n".join([*parts, "</svg>\n"])
