"""A run as one screen of a terminal: what is drawn, and what gives way to what."""

from collections.abc import Sequence
from dataclasses import dataclass

from fuelflow.metrics.epoch import EpochMetrics
from fuelflow.watch.record.story import Story
from fuelflow.watch.screens.curves import Curves, eval_names, train_names
from fuelflow.watch.screens.facts import (
    elapsed_secs,
    end_text,
    figures_of,
    phase_of,
    sum_text,
    title_of,
)
from fuelflow.watch.screens.glyphs import UNICODE, Glyphs
from fuelflow.watch.screens.newest import NewestMetrics
from fuelflow.watch.screens.notes import foremost, notes_of
from fuelflow.watch.screens.rank_bars import rank_bars
from fuelflow.watch.screens.sections import (
    LABEL,
    chart_block,
    figure_block,
    note_block,
    progress_block,
    rank_block,
    value_block,
)
from fuelflow.watch.screens.styled import Line, beside, fitted, separated, width_of
from fuelflow.watch.screens.text import clipped

_MARGIN = 2
_GAP = 4
_WIDEST = 220
_LEAST_FOR_TWO = 116


@dataclass(frozen=True)
class _Plan:
    """How much of each part is shown.

    Attributes:
        chart: Rows of the loss's chart.
        values: Losses and metrics.
        ranks: Bars of ranks.
        notes: Notes.
        is_airy: Whether blank lines set the parts apart.
    """

    chart: int
    values: int
    ranks: int
    notes: int
    is_airy: bool = True


# From the one for a large screen to the one for the smallest.
_PLANS = (
    _Plan(8, 12, 16, 6),
    _Plan(6, 10, 8, 5),
    _Plan(5, 6, 8, 3),
    _Plan(0, 6, 8, 3),
    _Plan(0, 6, 3, 3),
    _Plan(0, 4, 3, 2),
    _Plan(0, 4, 3, 2, is_airy=False),
    _Plan(0, 2, 1, 1, is_airy=False),
    _Plan(0, 1, 0, 0, is_airy=False),
)
_LAST = _PLANS[-1]
_LAST_VALUES = 6


class Frame:
    """Draws a story, again and again.

    Args:
        glyphs: What it draws with.
    """

    def __init__(self, glyphs: Glyphs = UNICODE) -> None:
        self._glyphs = glyphs
        self._newest = NewestMetrics()
        self._curves = Curves()

    def draw(self, story: Story, now: float, width: int, height: int) -> list[Line]:
        """The run as it stands, in fewer rows than there are.

        Args:
            story: The run.
            now: The time, in seconds since 1970.
            width: Columns of the terminal; the last one stays free.
            height: Rows of the terminal, of which a few are left to what scrolls by.
        """
        usable = min(width - 1, _WIDEST)
        inner = max(usable - 2 * _MARGIN, 1)
        is_wide = usable >= _LEAST_FOR_TWO
        half = (inner - _GAP) // 2 if is_wide else inner
        room = max(height - 2 - (2 if height < 30 else height // 5), 1)
        metrics = self._newest.of(story)
        curves = self._curves.of(story)
        parts = _Parts(story, curves, metrics, half, self._glyphs)
        plan = next(
            (p for p in _PLANS if parts.rows(p, is_wide=is_wide) <= room), _LAST
        )
        columns = parts.left(plan, now), parts.right(plan)
        if is_wide:
            left, right = (separated(each, is_airy=plan.is_airy) for each in columns)
            lines = beside(left, right, half + _GAP)
        else:
            lines = separated([*columns[0], *columns[1]], is_airy=plan.is_airy)
        return [self._rule(story, usable), *_indented(lines[:room], usable)]

    def draw_end(self, story: Story, now: float, width: int) -> list[Line]:
        """What stays of it when it is over: what it came to, and what happened."""
        usable = min(width - 1, _LEAST_FOR_TWO)
        inner = max(usable - 2 * _MARGIN, 1)
        parts = _Parts(story, self._curves.of(story), None, inner, self._glyphs)
        blocks = [[_summary(story, now)], parts.values(_LAST_VALUES), parts.notes(5)]
        lines = separated(blocks, is_airy=True)
        return [self._rule(story, usable), *_indented(lines, usable)]

    def _rule(self, story: Story, width: int) -> Line:
        rule, phase = self._glyphs.rule, phase_of(story)
        right: Line = [(f" {phase} ", _phase_style(story)), (rule, LABEL)]
        right = right if phase else []
        most = max(width - width_of(right) - 6, 1)
        name = clipped(title_of(story), most, self._glyphs.ellipsis)
        left: Line = [(rule, LABEL), (f" {name} ", "bold")]
        across = max(width - width_of(left) - width_of(right), 0)
        return fitted([*left, (rule * across, LABEL), *right], width)


class _Parts:
    """The parts of one drawing."""

    def __init__(
        self,
        story: Story,
        curves: Curves,
        metrics: EpochMetrics | None,
        width: int,
        glyphs: Glyphs,
    ) -> None:
        self._story = story
        self._curves = curves
        self._metrics = metrics
        self._width = width
        self._glyphs = glyphs
        self._evals = eval_names(story)
        trained = train_names(story)
        self._names = [*trained, *(n for n in self._evals if n not in trained)]
        self._figures = figure_block(figures_of(story), width)
        self._notes = notes_of(story, _PLANS[0].notes)

    def rows(self, plan: _Plan, *, is_wide: bool) -> int:
        """How many rows a plan takes."""
        left = [2, min(plan.values, len(self._names)) + 1, plan.chart]
        right = [
            len(self._figures),
            len(self._bars(plan.ranks)),
            len(self.notes(plan.notes)),
        ]
        sides = [left, right] if is_wide else [left + right]
        return max(sum(side) + plan.is_airy * (len(side) - 1) for side in sides)

    def left(self, plan: _Plan, now: float) -> list[list[Line]]:
        """Progress, and how losses and metrics go."""
        elapsed = elapsed_secs(self._story, now)
        glyphs, chart = self._glyphs, 0 if self._glyphs.is_ascii else plan.chart
        return [
            progress_block(self._story, now, elapsed, self._width, glyphs),
            self.values(plan.values),
            chart_block(self._curves, self._width, chart),
        ]

    def right(self, plan: _Plan) -> list[list[Line]]:
        """The figures, the ranks, and what happened."""
        return [self._figures, self._bars(plan.ranks), self.notes(plan.notes)]

    def values(self, most: int) -> list[Line]:
        """The first few of the losses and metrics."""
        names = self._names[:most]
        return value_block(
            self._curves,
            names,
            self._evals,
            self._width,
            self._glyphs,
            is_over=self._story.end is not None,
        )

    def notes(self, most: int) -> list[Line]:
        """A few of the notes."""
        notes = foremost(self._notes, most)
        return note_block(notes, self._width, self._glyphs)

    def _bars(self, most: int) -> list[Line]:
        if self._metrics is None or self._story.run is None or most == 0:
            return []
        bars = rank_bars(self._metrics, self._story.run["ranks"], most)
        return rank_block(self._metrics, bars, self._width, self._glyphs)


def _indented(lines: Sequence[Line], width: int) -> list[Line]:
    return [
        fitted([(" " * _MARGIN, ""), *line], width) if line else [] for line in lines
    ]


def _phase_style(story: Story) -> str:
    if story.end is None:
        return "cyan"
    return {"done": "bold green", "error": "bold red"}.get(
        story.end["reason"], "yellow"
    )


def _summary(story: Story, now: float) -> Line:
    text = end_text(story)
    return [(sum_text(story, now), ""), (f"; {text}" if text else "", "")]
