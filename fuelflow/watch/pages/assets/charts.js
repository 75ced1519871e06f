// Charts: each is a card with a title and a function that says what plotly draws.

const view = { axis: "step", scale: "linear" };
const charts = [];
const waiting = new Set();
let isDrawing = false;
let held = false;
let secsUnit = { secs: 1, name: "seconds" };

const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif';
const CONFIG = {
  displaylogo: false,
  responsive: true,
  displayModeBar: isTouched ? false : "hover",
  modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "zoomIn2d", "zoomOut2d"],
  doubleClick: "reset+autosize",
};

// A card on the page; `build` returns plotly's {data, layout}, or null for nothing.
function addChart(parent, title, build, note = null) {
  const plot = el("div", { class: "plot" });
  const legend = el("ul", { class: "legend" });
  const card = el("figure", { class: "card" }, el("figcaption", {}, title), legend, plot,
    note && el("p", { class: "note" }, note));
  parent.append(card);
  const chart = { card, legend, plot, build, left: new Set() };
  plot.setAttribute("role", "img");
  plot.setAttribute("aria-label", title);
  charts.push(chart);
  return chart;
}

function layoutFor(extra = {}) {
  const { ink, soft, grid, edge, paper } = theme();
  const axis = { gridcolor: grid, linecolor: edge, zeroline: false,
    tickfont: { color: soft, size: 11 }, title: { font: { color: soft, size: 11 }, standoff: 8 } };
  const { xaxis, yaxis, ...rest } = extra;
  return {
    height: 270,
    margin: { l: 54, r: 14, t: 10, b: 38 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: FONT, color: ink, size: 12 },
    hovermode: "x unified",
    hoverlabel: { bgcolor: paper, bordercolor: edge, font: { color: ink, size: 12 }, namelength: -1 },
    dragmode: isTouched ? false : "zoom",
    showlegend: false,
    xaxis: { ...axis, ...xaxis, title: { ...axis.title, ...(xaxis && xaxis.title) } },
    yaxis: { ...axis, ...yaxis, title: { ...axis.title, ...(yaxis && yaxis.title) } },
    ...rest,
  };
}

// The axis that all curves share; a zoom stays while the axis is the same.
function xAxis(x) {
  const title = { epoch: "epochs done", time: secsUnit.name }[view.axis];
  return { rangemode: "normal", hoverformat: ",.6~g", uirevision: view.axis,
    ...(view.axis === "step" ? stepAxis(x) : { title: { text: title } }) };
}

// Steps are whole: few of them have a tick each, and none is "500m".
function stepAxis(x) {
  const [least, most] = extent(x);
  return { title: { text: "step" }, ...(most - least <= 8 && { dtick: 1 }),
    tickformatstops: [{ dtickrange: [null, 0.99], value: ",.2~f" }, { dtickrange: [1, null], value: "~s" }] };
}

// What plotly makes of one value alone reaches one up and down, however small it is.
function rangeAround(values) {
  const [least, most] = extent(values);
  if (least !== most || least === 0) return {};
  const isLog = view.scale === "log";
  if (isLog && least < 0) return {};
  const ends = [0.9 * least, 1.1 * least].sort((a, b) => a - b);
  return { range: isLog ? ends.map(Math.log10) : ends };
}

function extent(values) {
  let [least, most] = [Infinity, -Infinity];
  for (const value of values) {
    if (typeof value !== "number") continue;
    if (value < least) least = value;
    if (value > most) most = value;
  }
  return [least, most];
}

function chooseSecsUnit(runs) {
  const longest = Math.max(...runs.map((run) => activeSecs(run, Infinity)), 0);
  const units = [[86400 * 3, 86400, "days"], [7200, 3600, "hours"], [180, 60, "minutes"]];
  const found = units.find(([least]) => longest >= least);
  secsUnit = found ? { secs: found[1], name: found[2] } : { secs: 1, name: "seconds" };
}

function onAxis(positionsOfRows) {
  if (view.axis !== "time") return positionsOfRows;
  return positionsOfRows.map((secs) => secs / secsUnit.secs);
}

// Marks several charts, or all, to be drawn soon.
function draw(some = charts) {
  for (const chart of some) waiting.add(chart);
  if (!isDrawing) drawNext();
}

// One chart at a time, those in sight first, so that the page stays responsive. While
// a run goes on, one that is out of sight and was drawn waits until it is looked at.
function drawNext() {
  const chart = nextChart();
  isDrawing = chart !== undefined;
  document.body.dataset.ready = String(!isDrawing && "Plotly" in window);
  if (!isDrawing) return;
  waiting.delete(chart);
  const drawn = chart.build();
  chart.card.hidden = drawn === null;
  chart.isDrawn = drawn !== null;
  if (drawn !== null) showLegend(chart, drawn.data);
  const done = drawn === null ? Promise.resolve()
    : Plotly.react(chart.plot, drawn.data, drawn.layout, CONFIG);
  done.then(() => setTimeout(drawNext, 0));
}

function nextChart() {
  // The page is shown before plotly is read, and nothing moves under a finger or a
  // mouse button that is down.
  if (!("Plotly" in window) || held || (document.hidden && page.live)) return undefined;
  const candidates = [...waiting];
  const isGoingOn = page.live && !runs[0].end;
  return candidates.find(isInSight) || candidates.find((chart) => !isGoingOn || !chart.isDrawn);
}

function isInSight({ card }) {
  const box = card.getBoundingClientRect();
  return !card.hidden && box.bottom > -100 && box.top < window.innerHeight + 100;
}

// A key for each group of traces; one that is pressed leaves its traces out.
function showLegend(chart, traces) {
  const named = traces.filter((trace) => trace.key);
  const keys = new Map();
  for (const { key, colour, dash } of named) if (!keys.has(key)) keys.set(key, { colour, dash });
  for (const trace of named) trace.visible = !chart.left.has(trace.key);
  const shown = keys.size > 1 ? [...keys] : [];
  const signature = JSON.stringify([shown, [...chart.left]]);
  if (chart.signature === signature) return;
  chart.signature = signature;
  chart.legend.replaceChildren(...shown.map(([key, { colour, dash }]) =>
    el("li", {}, el("button", { type: "button", "aria-pressed": String(!chart.left.has(key)),
      onclick: () => toggleKey(chart, key) }, keyMark(colour, dash), key))));
}

function keyMark(colour, dash) {
  const mark = el("span", { class: dash === "block" ? "mark block" : "mark" });
  mark.style.borderTopColor = colour;
  if (dash && dash !== "solid") mark.style.borderTopStyle = dash === "dot" ? "dotted" : "dashed";
  if (dash === "block") mark.style.borderTopStyle = "solid";
  return mark;
}

function toggleKey(chart, key) {
  if (!chart.left.delete(key)) chart.left.add(key);
  draw([chart]);
}
