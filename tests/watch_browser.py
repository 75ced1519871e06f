"""Pages opened in headless Chromium, for tests."""

import contextlib
import os
import shutil

import pytest
from playwright.sync_api import sync_playwright

DRAWN = "body[data-ready=true]"
# What plotly was given to draw in the card with a title, and the axes it drew.
FIND_CHART = """async title => {
    const cards = [...document.querySelectorAll("figure.card:not([hidden])")];
    const card = cards.find(
        each => each.querySelector("figcaption").firstChild.textContent === title);
    if (!card) return null;
    const plot = card.querySelector(".plot");
    card.scrollIntoView();
    // What is out of sight is drawn when it is looked at, some frames later.
    const frame = () => new Promise(done => requestAnimationFrame(done));
    await frame();
    await frame();
    while (document.body.dataset.ready !== "true") await frame();
    return {
        traces: plot.data.map(({x, y, z, text, mode, key, colour, visible}) =>
            ({x, y, z, text, mode, key, colour, visible})),
        ink: plot.layout.font.color,
        xrange: plot._fullLayout.xaxis.range,
        yrange: plot._fullLayout.yaxis.range,
        xticks: [...plot.querySelectorAll(".xtick text")].map(each => each.textContent),
        yticks: [...plot.querySelectorAll(".ytick text")].map(each => each.textContent),
        scale: plot._fullLayout.yaxis.type,
    };
}"""


@contextlib.contextmanager
def chromium():
    """A headless Chromium; the test is skipped where there is none, but not in CI."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None and not os.environ.get("CI"):
        pytest.skip("needs chromium")
    assert path is not None, "CI has no chromium"
    # Its sandbox refuses root, as whom a container runs.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()


class Opened:
    """A page that is open, with all that it asked for and complained of."""

    def __init__(self, browser, url, *, width=1280, height=900, scheme="light"):
        self.requests = []
        self.complaints = []
        self.page = browser.new_page(
            viewport={"width": width, "height": height}, color_scheme=scheme
        )
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.goto(url)
        self.page.wait_for_selector(DRAWN)

    def chart(self, title):
        """What is drawn under a title; None if there is no such chart."""
        return self.page.evaluate(FIND_CHART, title)

    def trace(self, title, key):
        """One trace of a chart: that of `key`, as its legend has it."""
        traces = self.chart(title)["traces"]
        return next(each for each in traces if each["key"] == key)

    def text(self, selector):
        """What a reader sees there."""
        return self.page.inner_text(selector)
