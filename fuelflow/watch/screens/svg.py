"""Small charts as SVG that stand in a page's own text, on light and on dark."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from fuelflow.metrics.wording import number_text
from fuelflow.watch.screens.curves import Curve, Scale, scale_of

_MOST_POINTS = 300
_MOST_MARKS = 20
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 8, 24, 18
_TEXT = 'fill="currentColor" font-size="10"'
_WARNING = "#d9534f"


@dataclass(frozen=True)
class Stroke:
    """A curve and how it is drawn.

    Attributes:
        curve: What is drawn.
        name: What it is called beside its colour; empty for no entry.
        colour: Its colour.
        width: How thick it is.
        opacity: How strong it is.
    """

    curve: Curve
    name: str
    colour: str
    width: float = 1.8
    opacity: float = 1.0


def chart_svg(
    title: str, strokes: Sequence[Stroke], *, width: int = 430, height: int = 190
) -> str:
    """A chart of curves over steps; where one is not finite it has a gap and a mark.

    Args:
        title: What it shows; all text is escaped.
        strokes: The curves, those in front last.
        width: Its width, in pixels.
        height: Its height, in pixels.

    Returns:
        An ``svg`` element; a note if no value is finite, and nothing if no curve has a
        point.
    """
    thin = [each.curve.thinned(_MOST_POINTS) for each in strokes]
    steps = [step for curve in thin for step in curve.steps]
    scale = scale_of(value for curve in thin for value in curve.values)
    if not steps:
        return ""
    if scale is None:
        return _note(title, [value for curve in thin for value in curve.values])
    field = _Field(
        low_step=min(steps),
        high_step=max(steps),
        scale=_widened(scale),
        width=width,
        height=height,
    )
    drawn = [field.axes()]
    drawn += [
        field.line(curve, each) for curve, each in zip(thin, strokes, strict=True)
    ]
    drawn += [
        field.marks(each.curve, each.name or title)
        for each in strokes
        if not all(map(math.isfinite, each.curve.values))
    ]
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}" '
        f'style="width:{width}px;max-width:100%;height:auto;display:block;'
        f'font-family:inherit">{_heading(title, strokes, width)}{"".join(drawn)}</svg>'
    )


@dataclass(frozen=True, kw_only=True)
class _Field:
    """Where steps and values are on the paper."""

    low_step: float
    high_step: float
    scale: Scale
    width: int
    height: int

    def x(self, step: float) -> float:
        way = self.high_step - self.low_step
        part = (step - self.low_step) / way if way else 0.5
        return _LEFT + part * (self.width - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        room = self.height - _TOP - _BOTTOM
        return _TOP + (1 - self.scale.height(value)) * room

    def axes(self) -> str:
        """Lines across with their values, and the first and the last step."""
        ticks = _ticks(self.scale)
        lines = "".join(
            f'<path d="M{_LEFT} {self.y(tick):.1f}H{self.width - _RIGHT}" '
            'stroke="currentColor" stroke-opacity="0.13"/>'
            f'<text x="{_LEFT - 6}" y="{self.y(tick) + 3.5:.1f}" text-anchor="end" '
            f'{_TEXT} opacity="0.65">{number_text(tick)}</text>'
            for tick in ticks
        )
        ends = [(_LEFT, "start", f"{self.low_step:,.0f}")]
        if self.high_step > self.low_step:
            ends.append((self.width - _RIGHT, "end", f"step {self.high_step:,.0f}"))
        return lines + "".join(
            f'<text x="{x}" y="{self.height - 4}" text-anchor="{anchor}" {_TEXT} '
            f'opacity="0.65">{text}</text>'
            for x, anchor, text in ends
        )

    def line(self, curve: Curve, stroke: Stroke) -> str:
        """The curve; a single point is a dot."""
        path, is_down = [], False
        for step, value in zip(curve.steps, curve.values, strict=True):
            if math.isfinite(value):
                letter = "L" if is_down else "M"
                path.append(f"{letter}{self.x(step):.1f} {self.y(value):.1f}")
                # A point between two gaps is a line of no length: its ends are round.
                path += [] if is_down else ["h0"]
            is_down = math.isfinite(value)
        look = (
            f'stroke="{stroke.colour}" stroke-width="{stroke.width}" '
            f'stroke-opacity="{stroke.opacity}"'
        )
        return (
            f'<path d="{"".join(path)}" fill="none" {look} stroke-linejoin="round" '
            'stroke-linecap="round"/>'
        )

    def marks(self, curve: Curve, name: str) -> str:
        """A mark at the bottom for the first values that are not finite."""
        places = [
            (step, value)
            for step, value in zip(curve.steps, curve.values, strict=True)
            if not math.isfinite(value)
        ]
        return "".join(
            f'<text x="{self.x(step):.1f}" y="{self.height - _BOTTOM:.1f}" '
            f'text-anchor="middle" font-size="13" font-weight="bold" fill="{_WARNING}">'
            f"×<title>{escape(name)} is {value} at step {step:,.0f}</title></text>"
            for step, value in places[:_MOST_MARKS]
        )


def _note(title: str, values: Sequence[float]) -> str:
    """What is said of curves that have nothing to draw."""
    words = ", ".join(dict.fromkeys(number_text(value) for value in values))
    return (
        f'<div style="font-size:12px"><b>{escape(title)}</b> '
        f'<span style="color:{_WARNING}">no finite value yet ({words})</span></div>'
    )


def _heading(title: str, strokes: Sequence[Stroke], width: int) -> str:
    legend = "&#8195;".join(
        f'<tspan fill="{each.colour}">{escape(each.name)}</tspan>'
        for each in strokes
        if each.name
    )
    return (
        f'<text x="0" y="13" fill="currentColor" font-size="12" font-weight="600">'
        f"{escape(title)}</text>"
        f'<text x="{width - _RIGHT}" y="13" text-anchor="end" font-size="11">'
        f"{legend}</text>"
    )


def _widened(scale: Scale) -> Scale:
    """The scale with some air above and below."""
    low, high = scale.low, scale.high
    if scale.is_log:
        air = (high / low) ** 0.04
        return Scale(low / air, high * air, is_log=True)
    air = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return Scale(low - air, high + air, is_log=False)


def _ticks(scale: Scale) -> list[float]:
    """Round values between the ends of a scale, about four."""
    if scale.is_log:
        low, high = math.log10(scale.low), math.log10(scale.high)
        factors = (1, 3) if high - low < 3 else (1,)
        every = max(round((high - low) / 4), 1)
        powers = range(math.floor(low), math.ceil(high) + 1)
        return [
            factor * 10.0**power
            for power in powers
            for factor in factors
            if power % every == 0 and scale.low <= factor * 10.0**power <= scale.high
        ]
    way = scale.high - scale.low
    size = 10.0 ** math.floor(math.log10(way / 3))
    step = next(size * f for f in (1, 2, 5, 10) if way / (size * f) <= 4.5)
    first = math.ceil(scale.low / step)
    # Rounded, since 3 * 0.1 is not 0.3.
    return [
        float(f"{at * step:.12g}")
        for at in range(first, math.floor(scale.high / step) + 1)
    ]
