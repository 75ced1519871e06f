"""Numbers as a person reads them."""


def number_text(value: float | None) -> str:
    """A value to four digits; a dash where there is none."""
    return "—" if value is None else f"{value:.4g}"


def secs_text(ms: float) -> str:
    """A time to three digits: in seconds, or where it is short in ms or µs."""
    if 0 < ms < 0.9995:
        return f"{1000 * ms:.3g} µs"
    if 0 < ms < 9.995:
        return f"{ms:.3g} ms"
    secs = ms / 1000
    return f"{secs:.0f} s" if secs >= 100 else f"{secs:.3g} s"


def share_text(share: float) -> str:
    """A fraction in percent."""
    return f"{100 * share:.0f} %"


def rate_text(samples: float, ms: float) -> str:
    """Samples per second, three digits at least."""
    rate = 1000 * samples / ms if ms > 0 else 0.0
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}"
