"""A table for a notebook that reads well on dark and on light."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

# Lines and bars are half transparent or of middling brightness, text is the page's.
_LINE = "1px solid rgba(128,128,128,0.45)"
_TABLE = (
    "border-collapse:collapse;border:none;font-variant-numeric:tabular-nums;"
    "font-size:0.92em;margin:0.3em 0"
)
_CELL = "text-align:right;padding:0.2em 0.7em;border:none;white-space:nowrap"
_COLOURS = ("#3d8bd4", "#e0912f", "#9a78c9")


@dataclass(frozen=True)
class Bar:
    """A cell that shows parts of a whole as lengths.

    Attributes:
        parts: The fraction and the name of each; the rest of the bar stays empty.
    """

    parts: Sequence[tuple[float, str]]

    def to_html(self) -> str:
        """The bar; its names and figures appear when it is pointed at."""
        title = ", ".join(f"{name} {100 * share:.0f} %" for share, name in self.parts)
        pieces = "".join(
            '<span style="display:inline-block;height:100%;vertical-align:top;'
            f'width:{100 * share:.1f}%;background:{colour}"></span>'
            for (share, _), colour in zip(self.parts, _COLOURS, strict=False)
        )
        return (
            f'<span title="{escape(title)}" style="display:inline-block;width:9em;'
            "height:0.8em;background:rgba(128,128,128,0.2);text-align:left;"
            f'line-height:0;overflow:hidden;vertical-align:middle">{pieces}</span>'
        )

    def legend(self) -> str:
        """The names of the parts beside their colours."""
        return "&ensp;".join(
            f'<span style="color:{colour}">&#9632;</span> {escape(name)}'
            for (_, name), colour in zip(self.parts, _COLOURS, strict=False)
        )


def table_html(
    title: str,
    headings: Sequence[str],
    rows: Sequence[Sequence[str | Bar]],
    notes: Sequence[str | Bar] = (),
    *,
    total: Sequence[str | Bar] | None = None,
) -> str:
    """A table as HTML that needs no style sheet; all text in it is escaped.

    Args:
        title: What it shows.
        headings: One for each column.
        rows: The cells of each row.
        notes: Lines below it; a bar stands for its legend.
        total: A last row, set apart.
    """
    head = _row("th", headings, f"border-bottom:{_LINE}")
    body = "".join(_row("td", row) for row in rows)
    if total is not None:
        body += _row("td", total, f"border-top:{_LINE}")
    below = "".join(
        '<div style="font-size:0.92em;opacity:0.85">'
        f"{note.legend() if isinstance(note, Bar) else escape(note)}</div>"
        for note in notes
    )
    return (
        f'<div style="overflow-x:auto"><div><b>{escape(title)}</b></div>'
        f'<table style="{_TABLE}"><thead>{head}</thead><tbody>{body}</tbody></table>'
        f"{below}</div>"
    )


def _row(tag: str, cells: Sequence[str | Bar], style: str = "") -> str:
    # Colour and background of a notebook's own table rows would hide the page's.
    shown = "".join(
        f'<{tag} style="{_CELL};{style}">'
        f"{cell.to_html() if isinstance(cell, Bar) else escape(cell)}</{tag}>"
        for cell in cells
    )
    return f'<tr style="background:none">{shown}</tr>'
