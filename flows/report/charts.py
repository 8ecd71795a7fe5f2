"""Line and stacked-bar charts as inline SVG, with axes, ticks, bands and what the pointer needs to read values off.

All coordinates are in units of a 380 x 190 box that scales with its card; at phone width the scale is near 1, so that
text stays readable.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flows.report.markup import Markup, join, tag

WIDTH, HEIGHT = 380, 190
LEFT, RIGHT, TOP, BOTTOM = 48, 12, 10, 28
MAX_POINTS = 400  # a point per pixel; more would only make the page heavy
MAX_BARS = 80
MARKED_POINTS = 40  # up to so many points carry a dot

Value = float | None


@dataclass(frozen=True)
class Series:
    """One line: values aligned with the chart's x. A None is a gap. `low` and `high` are the edges of its band."""

    name: str
    values: Sequence[Value]
    low: Sequence[Value] | None = None
    high: Sequence[Value] | None = None


@dataclass(frozen=True)
class Chart:
    """A figure. `limits` are values that the axis never passes, such as 0 and 1 for a share."""

    title: str
    metric: str
    explanation: str
    x: Sequence[float]
    series: Sequence[Series]
    unit: str = ""
    limits: tuple[Value, Value] = (None, None)
    x_label: str = "step"
    is_stacked: bool = False

    @property
    def has_values(self) -> bool:
        return any(value is not None for series in self.series for value in series.values)


@dataclass(frozen=True)
class _Scale:
    """Maps data to the box."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float
    ticks: Sequence[float]

    def x(self, value: float) -> float:
        span = self.x_high - self.x_low or 1.0
        return LEFT + (value - self.x_low) / span * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        span = self.y_high - self.y_low or 1.0
        return HEIGHT - BOTTOM - (value - self.y_low) / span * (HEIGHT - TOP - BOTTOM)


def draw(chart: Chart) -> Markup:
    """The figure: title with the newest value, plot, legend, explanation. Empty text when there is nothing to draw."""
    if not chart.has_values:
        return Markup("")
    thinned = _thin(chart)
    plot = _draw_bars(thinned) if thinned.is_stacked else _draw_lines(thinned)
    newest = None if chart.is_stacked else _newest(chart)
    head = tag(
        "figcaption",
        tag("b", chart.title),
        tag("span", newest, class_="newest") if newest else None,
        tag("code", chart.metric),
    )
    legend = _legend(chart) if len(chart.series) > 1 else None
    return tag("figure", head, plot, legend, tag("p", chart.explanation, class_="note"), class_="chart")


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round values (1, 2, 2.5 or 5 times a power of ten) that cover low..high with about `count` ticks.

    >>> nice_ticks(0.0, 1.0)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    span = (high - low) or 1.0
    power = 10.0 ** math.floor(math.log10(span / count))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if span / (power * factor) <= count)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    decimals = max(0, 2 - math.floor(math.log10(step)))
    return [round(index * step, decimals) for index in range(first, last + 1)]


def format_value(value: float) -> str:
    """A number for people: 3 significant digits, k and M for thousands and millions, 2.5e-6 for tiny ones.

    >>> [format_value(x) for x in (0, 0.123456, 12.5, 15_300, 2_000_000, 0.0000025, -0.5)]
    ['0', '0.123', '12.5', '15.3k', '2M', '2.5e-6', '-0.5']
    """
    size = abs(value)
    if size == 0:
        return "0"
    if size < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    if size >= 1e6:
        return f"{value / 1e6:.3g}M"
    if size >= 1e4:
        return f"{value / 1e3:.3g}k"
    return f"{value:.0f}" if size >= 1000 else f"{value:.3g}"


def _draw_lines(chart: Chart) -> Markup:
    scale = _line_scale(chart)
    shapes = [_axes(chart, scale)]
    for index, series in enumerate(chart.series):
        shapes.append(_band(chart.x, series, scale, index))
        shapes.append(_line(chart.x, series, scale, index))
    return _svg(chart, scale, shapes)


def _draw_bars(chart: Chart) -> Markup:
    totals = [sum(series.values[i] or 0.0 for series in chart.series) for i in range(len(chart.x))]
    ticks = nice_ticks(0.0, max(totals) or 1.0, 4)
    step = min((b - a for a, b in zip(chart.x, chart.x[1:], strict=False)), default=1.0)
    scale = _Scale(chart.x[0] - step / 2, chart.x[-1] + step / 2, 0.0, ticks[-1], ticks)
    width = max(0.8, (scale.x(step) - scale.x(0.0)) * 0.78)
    shapes = [_axes(chart, scale)]
    for i, x in enumerate(chart.x):
        base = 0.0
        for index, series in enumerate(chart.series):
            value = series.values[i] or 0.0
            if value <= 0:
                continue
            top = scale.y(base + value)
            height = scale.y(base) - top
            shapes.append(
                tag(
                    "rect",
                    x=_px(scale.x(x) - width / 2),
                    y=_px(top),
                    width=_px(width),
                    height=_px(height),
                    class_=f"f{index}",
                )
            )
            base += value
    return _svg(chart, scale, shapes)


def _svg(chart: Chart, scale: _Scale, shapes: list[Markup]) -> Markup:
    cross = tag("line", class_="cross", y1=TOP, y2=HEIGHT - BOTTOM, x1=-9, x2=-9)
    return tag(
        "svg",
        tag("title", f"{chart.title} ({chart.metric}) by {chart.x_label}"),
        *shapes,
        cross,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        tabindex="0",
        data_chart=_pointer_data(chart, scale),
    )


def _pointer_data(chart: Chart, scale: _Scale) -> str:
    """What the page's script shows at the pointer: pixel positions and a ready text per point."""
    points = []
    for i, x in enumerate(chart.x):
        lines = [f"{chart.x_label} {format_x(x)}"]
        for series in chart.series:
            value = series.values[i]
            if value is None:
                continue
            text = f"{series.name}  {format_value(value)}{_spaced(chart.unit)}"
            if series.low is not None and series.high is not None:
                low, high = series.low[i], series.high[i]
                if low is not None and high is not None:
                    text += f"  [{format_value(low)}, {format_value(high)}]"
            lines.append(text)
        if len(lines) > 1:
            points.append([round(scale.x(x), 1), "\n".join(lines)])
    return json.dumps(points, ensure_ascii=False, separators=(",", ":"))


def _axes(chart: Chart, scale: _Scale) -> Markup:
    shapes = []
    for value in scale.ticks:
        y = _px(scale.y(value))
        shapes.append(tag("line", class_="grid", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y))
        shapes.append(tag("text", format_value(value), x=LEFT - 6, y=_px(scale.y(value) + 3.5), class_="tick end"))
    for value in _x_ticks(chart.x):
        shapes.append(tag("text", format_x(value), x=_px(scale.x(value)), y=HEIGHT - BOTTOM + 14, class_="tick mid"))
    shapes.append(tag("text", chart.x_label, x=WIDTH - RIGHT, y=HEIGHT - 2, class_="tick end"))
    if chart.unit:
        shapes.append(tag("text", chart.unit, x=LEFT - 6, y=HEIGHT - 2, class_="tick end"))
    shapes.append(tag("line", class_="axis", x1=LEFT, x2=WIDTH - RIGHT, y1=HEIGHT - BOTTOM, y2=HEIGHT - BOTTOM))
    return tag("g", *shapes)


def _line(x: Sequence[float], series: Series, scale: _Scale, index: int) -> Markup:
    parts: list[str] = []
    is_pen_down = False
    dots = []
    for position, value in zip(x, series.values, strict=True):
        if value is None:
            is_pen_down = False
            continue
        px, py = _px(scale.x(position)), _px(scale.y(value))
        parts.append(f"{'L' if is_pen_down else 'M'}{px} {py}")
        is_pen_down = True
        dots.append(tag("circle", cx=px, cy=py, r=2.4, class_=f"f{index}"))
    shapes = [tag("path", d="".join(parts), class_=f"line l{index}")]
    return join(shapes + dots if len(dots) <= MARKED_POINTS else shapes)


def _band(x: Sequence[float], series: Series, scale: _Scale, index: int) -> Markup:
    if series.low is None or series.high is None:
        return Markup("")
    edges = [
        (position, low, high)
        for position, low, high in zip(x, series.low, series.high, strict=True)
        if low is not None and high is not None
    ]
    if not edges:
        return Markup("")
    if len(edges) == 1:
        px = _px(scale.x(edges[0][0]))
        return tag(
            "line", x1=px, x2=px, y1=_px(scale.y(edges[0][1])), y2=_px(scale.y(edges[0][2])), class_=f"line l{index}"
        )
    upper = [f"{_px(scale.x(position))} {_px(scale.y(high))}" for position, _, high in edges]
    lower = [f"{_px(scale.x(position))} {_px(scale.y(low))}" for position, low, _ in reversed(edges)]
    return tag("path", d=f"M{'L'.join(upper + lower)}Z", class_=f"band f{index}")


def _line_scale(chart: Chart) -> _Scale:
    seen: list[float] = []
    for series in chart.series:
        for values in (series.values, series.low or (), series.high or ()):
            seen.extend(value for value in values if value is not None)
    low, high = min(seen), max(seen)
    if low == high:
        margin = abs(low) / 2 or 1.0
        low, high = low - margin, high + margin
    floor, ceiling = chart.limits
    low = low if floor is None else max(low, floor)
    high = high if ceiling is None else min(high, ceiling)
    if low >= high:
        low, high = (floor if floor is not None else high - 1.0), (ceiling if ceiling is not None else low + 1.0)
    ticks = nice_ticks(low, high, 4)
    bottom = ticks[0] if floor is None else max(ticks[0], floor)
    top = ticks[-1] if ceiling is None else min(ticks[-1], ceiling)
    x_low, x_high = chart.x[0], chart.x[-1]
    if x_low == x_high:
        x_low, x_high = x_low - 1, x_high + 1
    return _Scale(x_low, x_high, bottom, top, [tick for tick in ticks if bottom <= tick <= top])


def _x_ticks(x: Sequence[float]) -> list[float]:
    if len(x) <= 6:
        return list(x)
    return [tick for tick in nice_ticks(x[0], x[-1], 6) if x[0] <= tick <= x[-1] and tick == int(tick)]


def _thin(chart: Chart) -> Chart:
    """A long run's lines keep the lowest and highest value of each stretch, so that no spike is lost; bars average."""
    count = len(chart.x)
    if chart.is_stacked and count > MAX_BARS:
        size = math.ceil(count / MAX_BARS)
        stretches = [range(start, min(start + size, count)) for start in range(0, count, size)]
        series = [
            Series(s.name, [_mean([s.values[i] for i in stretch]) for stretch in stretches]) for s in chart.series
        ]
        return replace(chart, x=[chart.x[stretch[0]] for stretch in stretches], series=series)
    if chart.is_stacked or count <= MAX_POINTS:
        return chart
    size = math.ceil(2 * count / MAX_POINTS)
    kept: set[int] = {0, count - 1}
    for start in range(0, count, size):
        for line in chart.series:
            present = [
                (line.values[i], i) for i in range(start, min(start + size, count)) if line.values[i] is not None
            ]
            if present:
                kept.update((min(present)[1], max(present)[1]))
    chosen = sorted(kept)
    return replace(chart, x=[chart.x[i] for i in chosen], series=[_take(line, chosen) for line in chart.series])


def _take(series: Series, chosen: list[int]) -> Series:
    def pick(values: Sequence[Value] | None) -> list[Value] | None:
        return None if values is None else [values[i] for i in chosen]

    return Series(series.name, pick(series.values) or [], pick(series.low), pick(series.high))


def _mean(values: Sequence[Value]) -> Value:
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None


def _newest(chart: Chart) -> str | None:
    values = [value for value in chart.series[0].values if value is not None]
    return f"{format_value(values[-1])}{_spaced(chart.unit)}" if values else None


def _legend(chart: Chart) -> Markup:
    items = [tag("span", tag("i", class_=f"swatch b{index}"), series.name) for index, series in enumerate(chart.series)]
    return tag("div", *items, class_="legend")


def format_x(value: float) -> str:
    return f"{value:g}"


def _spaced(unit: str) -> str:
    return f" {unit}" if unit else ""


def _px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
