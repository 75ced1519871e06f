"""The parts of a terminal's screen, each as lines."""

from collections.abc import Sequence
from itertools import zip_longest

from rich.cells import cell_len

from fuelflow.metrics.epoch import EpochMetrics
from fuelflow.watch.record.story import Story
from fuelflow.watch.screens.curves import Curve, Curves
from fuelflow.watch.screens.facts import num_epochs_done
from fuelflow.watch.screens.glyphs import Glyphs
from fuelflow.watch.screens.notes import Note
from fuelflow.watch.screens.rank_bars import RankBar
from fuelflow.watch.screens.spark import dotted, sparkline
from fuelflow.watch.screens.styled import Line, Span, column, spread
from fuelflow.watch.screens.text import (
    clean,
    clipped,
    clock_text,
    figure,
    percent_text,
    speed_text,
    wrapped,
)

TRAIN, EVAL = "cyan", "yellow"
LABEL = "dim"
LEVELS = {"info": "dim", "warning": "yellow", "error": "bold red"}
_VALUE_WIDTH = 10
_MOST_FIGURES = 4


def bar(part: float, width: int, glyphs: Glyphs, style: str) -> Line:
    """A bar of some columns, a part of it done."""
    halves = round(2 * width * min(max(part, 0.0), 1.0))
    done = glyphs.full * (halves // 2) + (glyphs.half if halves % 2 else "")
    return [(done, style), (glyphs.track * (width - len(done)), LABEL)]


def progress_block(
    story: Story, now: float, elapsed: float, width: int, glyphs: Glyphs
) -> list[Line]:
    """How far the run and its epoch are, how long it took and how long it takes yet."""
    at = story.progress
    left = story.eta_secs(now)
    done = num_epochs_done(story)
    of_run = at.fraction
    if of_run is None and at.epochs:
        of_run = done / at.epochs
    of_epoch = at.epoch_step / at.steps_per_epoch if at.steps_per_epoch else None
    epoch = f"epochs  {done:,}" + (f" of {at.epochs:,}" if at.epochs else "")
    step = f"steps   {at.epoch_step:,}"
    step += f" of {at.steps_per_epoch:,}" if at.steps_per_epoch else ""
    times = (
        "" if left is None else f"{clock_text(left)} left",
        f"{clock_text(elapsed)} elapsed",
    )
    labels = max(len(epoch), len(step))
    clocks = max(map(len, times))
    rows = ((epoch, of_run, times[0]), (step, of_epoch, times[1]))
    return [
        _progress_line(column(label, labels), part, time.rjust(clocks), width, glyphs)
        for label, part, time in rows
    ]


def _progress_line(
    label: Span, part: float | None, time: str, width: int, glyphs: Glyphs
) -> Line:
    percent = "" if part is None else f"{int(100 * part):>3} %"
    right: Line = [(f"  {percent:>5}", ""), (f"   {time}", LABEL)]
    room = width - len(label[0]) - sum(len(text) for text, _ in right) - 2
    if part is None or room < 4:
        return spread([label], right, width)
    return [label, ("  ", ""), *bar(part, room, glyphs, TRAIN), *right]


def value_block(
    curves: Curves,
    names: Sequence[str],
    evals: Sequence[str],
    width: int,
    glyphs: Glyphs,
    *,
    is_over: bool = False,
) -> list[Line]:
    """The loss and the metrics, in training and in evaluation, with how they went.

    Of a run that goes on they are those of its last step; of one that is over, the
    means of its last epoch.
    """
    longest = max(cell_len(clean(name)) for name in names)
    labels = min(longest, max(width // 4, 8))
    columns = 2 if evals else 1
    room = (width - labels) // columns - _VALUE_WIDTH - 4
    head, training = curves.training(names, is_over=is_over)
    lines: list[Line] = [
        [
            (" " * labels, ""),
            column("  " + head.rjust(_VALUE_WIDTH), _VALUE_WIDTH + room + 4, LABEL),
        ]
    ]
    if evals:
        lines[0].append(("  " + "evaluation".rjust(_VALUE_WIDTH), LABEL))
    for name in names:
        label = clipped(clean(name), labels, glyphs.ellipsis)
        line: Line = [column(label, labels)]
        line += _value(training(name), room, glyphs)
        if name in evals:
            line += _value(curves.evals(name), room, glyphs, EVAL)
        lines.append(line)
    return lines


def _value(curve: Curve, room: int, glyphs: Glyphs, style: str = TRAIN) -> Line:
    newest = figure(curve.values[-1]) if curve.values else "—"
    spark = sparkline(curve, room, is_ascii=glyphs.is_ascii) if room >= 4 else ""
    return [
        (f"  {newest:>{_VALUE_WIDTH}}", "bold"),
        column(f"  {spark}", max(room, 0) + 2, style),
    ]


def chart_block(curves: Curves, width: int, rows: int) -> list[Line]:
    """The loss of all steps as a field of dots, its largest and least beside it."""
    curve = curves.steps("loss").thinned(2 * width)
    finite = [value for value in curve.values if abs(value) < float("inf")]
    if rows < 2 or len(finite) < 2:
        return []
    labels = [figure(max(finite)), *[""] * (rows - 2), figure(min(finite))]
    margin = max(map(len, labels)) + 2
    fields = dotted(curve, max(width - margin, 1), rows)
    return [
        [(f"{label:>{margin - 2}}  ", LABEL), (field, TRAIN)]
        for label, field in zip(labels, fields, strict=True)
    ]


def figure_block(figures: Sequence[tuple[str, str]], width: int) -> list[Line]:
    """Names and figures in columns, as many as there is room for."""
    for count in range(min(_MOST_FIGURES, len(figures)), 0, -1):
        rows = -(-len(figures) // count)
        # Down the columns, so that each holds what belongs together.
        columns = [figures[at : at + rows] for at in range(0, len(figures), rows)]
        names = [max(cell_len(name) for name, _ in each) for each in columns]
        texts = [max(cell_len(text) for _, text in each) for each in columns]
        taken = sum(names) + sum(texts) + len(columns)
        gap = (width - taken) // max(len(columns) - 1, 1)
        if gap >= 3 or count == 1:
            break
    else:
        return []
    lines: list[Line] = []
    for row in zip_longest(*columns, fillvalue=("", "")):
        line: Line = []
        for (name, text), wide, far in zip(row, names, texts, strict=True):
            line += [column(name, wide + 1, LABEL), column(text, far, to_right=True)]
            line.append((" " * min(gap, 6), ""))
        lines.append(line)
    return lines


def rank_block(
    metrics: EpochMetrics, bars: Sequence[RankBar], width: int, glyphs: Glyphs
) -> list[Line]:
    """How the ranks spent the last epoch, and what held it back."""
    lines: list[Line] = []
    if bars and metrics.num_ranks > 1:
        head: Line = [(f"{metrics.num_ranks} ranks in epoch {metrics.epoch}", LABEL)]
        legend: Line = [
            *((glyphs.full, TRAIN), (" steps  ", LABEL)),
            *((glyphs.waiting, EVAL), (" waiting for data  ", LABEL)),
            *((glyphs.track, LABEL), (" idle", LABEL)),
        ]
        lines.append(spread(head, legend, width))
        labels = [_rank_label(each, glyphs) for each in bars]
        wide = max(cell_len(label) for label in labels)
        for each, label in zip(bars, labels, strict=True):
            lines.append([column(label, wide), *_rank_bar(each, width - wide, glyphs)])
    style = LEVELS["warning" if metrics.bottleneck.is_notable else "info"]
    found = f"{metrics.bottleneck}"
    if len(found) > width:
        found = found.split("; ", maxsplit=1)[0]
    lines.append([(clipped(found, width, glyphs.ellipsis), style)])
    return lines


def _rank_label(rank: RankBar, glyphs: Glyphs) -> str:
    device = clipped(clean(rank.device), 12, glyphs.ellipsis)
    role = f"{rank.role:<7}" if rank.role else ""
    return "  ".join(filter(None, [role, f"rank {rank.rank}", device]))


def _rank_bar(rank: RankBar, width: int, glyphs: Glyphs) -> Line:
    right = (
        f"  {percent_text(rank.steps):>5} busy  {speed_text(rank.samples_per_sec):>9}/s"
    )
    room = width - len(right) - 2
    if room < 4:
        return [(right, "")]
    steps = round(room * min(rank.steps, 1.0))
    waiting = min(round(room * rank.waiting), room - steps)
    return [
        ("  ", ""),
        (glyphs.full * steps, TRAIN),
        (glyphs.waiting * waiting, EVAL),
        (glyphs.track * (room - steps - waiting), LABEL),
        (right, ""),
    ]


def note_block(notes: Sequence[Note], width: int, glyphs: Glyphs) -> list[Line]:
    """What happened last, one line each; two if one is not enough for a warning."""
    lines: list[Line] = []
    for note in notes:
        most = 1 if note.level == "info" else 2
        texts = wrapped(note.line, width - 10, most, glyphs.ellipsis)
        for at, text in enumerate(texts):
            left = f"{note.time}  " if at == 0 else " " * 10
            lines.append([(left, LABEL), (text, LEVELS[note.level])])
    return lines
