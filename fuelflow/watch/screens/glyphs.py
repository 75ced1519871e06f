"""The letters that bars and rules are made of, for terminals with and without them."""

from dataclasses import dataclass

_REPLACED = str.maketrans({"—": "-", "×": "x", "→": ">", "·": ",", "…": "~", "µ": "u"})


@dataclass(frozen=True, kw_only=True)
class Glyphs:
    """A set of letters.

    Attributes:
        full: A done part of a bar.
        half: The half of one; empty if there is none.
        waiting: A part of a bar that was spent waiting.
        track: What is left of a bar.
        rule: A rule across the screen.
        ellipsis: What stands for what was left out.
        is_ascii: Whether nothing else can be shown.
    """

    full: str
    half: str
    waiting: str
    track: str
    rule: str
    ellipsis: str
    is_ascii: bool

    def shown(self, text: str) -> str:
        """The text in letters that can be shown, of the same length."""
        if not self.is_ascii or text.isascii():
            return text
        return text.translate(_REPLACED).encode("ascii", "replace").decode()


UNICODE = Glyphs(
    full="━",
    half="╸",
    waiting="╍",
    track="─",
    rule="─",
    ellipsis="…",
    is_ascii=False,
)
ASCII = Glyphs(
    full="#",
    half="",
    waiting="~",
    track="-",
    rule="-",
    ellipsis="..",
    is_ascii=True,
)
