"""A run as a panel of HTML: figures, charts, ranks and epochs, without a script."""

from html import escape

from fuelflow.metrics.epoch import EpochMetrics
from fuelflow.metrics.table import Bar, table_html
from fuelflow.metrics.wording import secs_text
from fuelflow.watch.record.records import number
from fuelflow.watch.record.story import Story
from fuelflow.watch.screens.curves import Curves, eval_names, train_names
from fuelflow.watch.screens.facts import (
    elapsed_secs,
    end_text,
    figures_of,
    num_epochs_done,
    phase_of,
    title_of,
)
from fuelflow.watch.screens.notes import notes_of
from fuelflow.watch.screens.rank_bars import RankBar, rank_bars
from fuelflow.watch.screens.svg import Stroke, chart_svg
from fuelflow.watch.screens.text import clipped, clock_text, figure, speed_text

_TRAIN, _EVAL, _OTHER = "#3d8bd4", "#e0912f", "#9a78c9"
_LEVELS = {"info": "inherit", "warning": "#c98a1b", "error": "#d9534f"}
_ENDED = {"done": "#3fa45b", "error": "#d9534f"}
_MOST_METRICS = 4
_MOST_EPOCHS = 6
_MOST_RANKS = 8
_MOST_NOTES = 4
_LONGEST_NAME = 32
_LARGE = {"width": 430, "height": 220}
_SMALL = {"width": 200, "height": 110}


def panel_html(
    story: Story, curves: Curves, metrics: EpochMetrics | None, now: float
) -> str:
    """The run as it stands; all names in it are escaped.

    Args:
        story: The run.
        curves: Its curves.
        metrics: Of its newest epoch, if there is one.
        now: The time, in seconds since 1970.
    """
    parts = (
        _head(story, now),
        _progress(story),
        _tiles(story, curves),
        _charts(story, curves),
        _tables(story, metrics),
        _notes(story),
    )
    return (
        '<div style="max-width:900px;line-height:1.4;font-size:13px;'
        'font-variant-numeric:tabular-nums;padding:4px 0">' + "".join(parts) + "</div>"
    )


def _head(story: Story, now: float) -> str:
    left = story.eta_secs(now)
    times = [f"{clock_text(elapsed_secs(story, now))} elapsed"]
    times += [] if left is None else [f"{clock_text(left)} left"]
    colour = _ENDED.get(story.end["reason"], _EVAL) if story.end else _TRAIN
    # An error that is among the notes is not said twice.
    phase = ": ".join(filter(None, [phase_of(story), end_text(story)]))
    return (
        '<div style="display:flex;flex-wrap:wrap;gap:0 12px;align-items:baseline">'
        f'<b style="font-size:15px">{escape(title_of(story))}</b>'
        f'<span style="color:{colour};font-weight:600">{escape(phase)}</span>'
        '<span style="margin-left:auto;opacity:0.75">'
        f"{escape(', '.join(times))}</span></div>"
    )


def _progress(story: Story) -> str:
    at = story.progress
    done = num_epochs_done(story)
    texts = [f"{done:,} of {at.epochs:,} epochs" if at.epochs else f"{done:,} epochs"]
    if story.end is None:
        of = f" of {at.steps_per_epoch:,}" if at.steps_per_epoch else ""
        texts.append(f"{at.epoch_step:,}{of} steps of this one")
    part = at.fraction
    if part is None and at.epochs:
        part = done / at.epochs
    bar = ""
    if part is not None:
        texts.append(f"{int(100 * part)} %")
        bar = (
            '<div style="height:6px;border-radius:3px;overflow:hidden;margin:5px 0 3px;'
            'background:rgba(128,128,128,0.22)"><div style="height:100%;'
            f'width:{100 * part:.1f}%;background:{_TRAIN}"></div></div>'
        )
    told = escape(", ".join(texts))
    return f'{bar}<div style="opacity:0.75;font-size:12px">{told}</div>'


def _tiles(story: Story, curves: Curves) -> str:
    tiles = []
    names = train_names(story)
    newest, training = curves.training(names, is_over=story.end is not None)
    for name in names[:_MOST_METRICS]:
        values = training(name).values
        told = figure(values[-1]) if values else "—"
        tiles.append((f"{_short(name)}, {newest}", told))
    for name in eval_names(story)[:_MOST_METRICS]:
        values = curves.evals(name).values
        tiles.append((f"eval {_short(name)}", figure(values[-1]) if values else "—"))
    tiles += [(_short(name), told) for name, told in figures_of(story)]
    shown = "".join(
        '<div style="white-space:nowrap">'
        f'<div style="opacity:0.65;font-size:11px">{escape(name)}</div>'
        f'<div style="font-size:15px;font-weight:600">{escape(text)}</div></div>'
        for name, text in tiles
    )
    return (
        '<div style="display:flex;flex-wrap:wrap;gap:6px 22px;margin:10px 0 8px">'
        f"{shown}</div>"
    )


def _charts(story: Story, curves: Curves) -> str:
    names = list(dict.fromkeys([*train_names(story), *eval_names(story)]))
    loss = _chart(curves, "loss", **_LARGE)
    small = [_chart(curves, name, **_SMALL) for name in names if name != "loss"]
    small = small[:_MOST_METRICS]
    small += [
        chart_svg(title, [Stroke(curves.steps(name), "", _OTHER)], **_SMALL)
        for name, title in (("lr", "lr"), ("grad_norm", "grad norm"))
    ]
    # They flow beside the loss and then below it, as many in a row as there is room.
    shown = "".join(
        f'<div style="display:inline-block;vertical-align:top;max-width:100%;'
        f'margin:0 8px 8px 0">{chart}</div>'
        for chart in small
        if chart
    )
    return (
        '<div style="display:flow-root;margin:6px 0">'
        '<div style="float:left;max-width:100%;margin:0 12px 8px 0">'
        f"{loss}</div>{shown}</div>"
    )


def _chart(curves: Curves, name: str, *, width: int, height: int) -> str:
    steps, means = curves.steps(name), curves.epochs(name)
    evals = curves.evals(name)
    strokes = [
        Stroke(steps, "steps" if not means.values else "", _TRAIN, 1.2, 0.45),
        Stroke(means, "epochs", _TRAIN),
        Stroke(evals, "evaluation", _EVAL),
    ]
    shown = [each for each in strokes if each.curve.values]
    return chart_svg(_short(name), shown, width=width, height=height)


def _tables(story: Story, metrics: EpochMetrics | None) -> str:
    """The last epochs and the ranks of the newest, side by side if there is room."""
    tables = [_epochs(story), _ranks(story, metrics)]
    shown = "".join(f'<div style="min-width:0">{each}</div>' for each in tables if each)
    return (
        '<div style="display:flex;flex-wrap:wrap;gap:10px 36px;margin:8px 0">'
        f"{shown}</div>"
    )


def _ranks(story: Story, metrics: EpochMetrics | None) -> str:
    if metrics is None or story.run is None:
        return ""
    if metrics.num_ranks == 1:
        return f'<div style="opacity:0.75">{escape(str(metrics.bottleneck))}</div>'
    bars = rank_bars(metrics, story.run["ranks"], _MOST_RANKS)
    return table_html(
        f"{metrics.num_ranks} ranks in epoch {metrics.epoch}",
        ["", "rank", "device", "samples/s", "time"],
        [
            [
                *(each.role, str(each.rank), _short(each.device)),
                *(speed_text(each.samples_per_sec), _bar(each)),
            ]
            for each in bars
        ],
        [_bar(bars[0]), str(metrics.bottleneck)],
    )


def _bar(rank: RankBar) -> Bar:
    idle = max(1 - rank.steps - rank.waiting, 0.0)
    parts = {"steps": rank.steps, "waiting for data": rank.waiting, "idle": idle}
    return Bar([(part, name) for name, part in parts.items()])


def _epochs(story: Story) -> str:
    last = story.epochs[-_MOST_EPOCHS:]
    if not last:
        return ""
    trained = train_names(story)[: _MOST_METRICS + 1]
    evaluated = eval_names(story)[: _MOST_METRICS + 1]
    headings = [
        "epoch",
        *map(_short, trained),
        *(_short(f"eval {n}") for n in evaluated),
    ]
    rows: list[list[str]] = []
    for record in last:
        if record["kind"] == "pass":
            means, evals, epoch = record["means"], {}, record["epoch"]
            secs = number(record["secs"])
        else:
            metrics = record["metrics"]
            means = {"loss": metrics["avg_loss"], **metrics["scalars"]}
            evals, epoch = metrics["evaluation"], metrics["epoch"]
            secs = number(metrics["epoch_ms"]) / 1e3
        figures = [means.get(name) for name in trained]
        figures += [evals.get(name) for name in evaluated]
        rows.append([str(epoch), *map(figure, figures), secs_text(1e3 * secs)])
    count = len(story.epochs)
    title = (
        f"the last {len(last)} of {count:,} epochs" if count > len(last) else "epochs"
    )
    return table_html(title, [*headings, "time"], rows)


def _notes(story: Story) -> str:
    return "".join(
        f'<div style="color:{_LEVELS[note.level]};font-size:12px">'
        f'<span style="opacity:0.65">{note.time}</span> {escape(note.line)}</div>'
        for note in notes_of(story, _MOST_NOTES)
    )


def _short(name: str) -> str:
    return clipped(name, _LONGEST_NAME)
