// Curves along steps, epochs or time, for one run or several.

const MEASURES = {
  grad_norm: "Gradient norm, before clipping",
  lr: "Learning rate",
  steps_per_sec: "Steps per second",
  samples_per_sec: "Samples per second",
  data_wait: "Waiting for data, share of the time",
  "host/rss": "Memory of the host process, GB",
  "host/cpu": "Processor of the host, share of all cores",
};
const GIGABYTES = { "host/rss": 1e-9 };
const FROM_ZERO = new Set(["data_wait", "host/rss", "host/cpu", "steps_per_sec", "samples_per_sec"]);
const curvesShown = new Map();

// One line, with gaps where its values are no finite numbers, and marks there.
function lineTraces(found, style, what, factor = 1) {
  const x = onAxis(found.x);
  const isWord = found.y.map((value) => WORDS.has(value));
  const short = found.x.length <= style.dotsUpTo;
  const line = {
    x, y: found.y.map((value, row) => (isWord[row] || value === null ? null : value * factor)),
    type: "scatter", mode: short ? "lines+markers" : "lines", name: plotlyText(style.name),
    line: { color: style.colour, width: style.width, dash: style.dash || "solid" },
    marker: { color: style.colour, size: 5 },
    key: style.key || style.name, colour: style.colour, dash: style.dash,
    hovertemplate: `%{y:.6~g}<extra>${plotlyText(style.name)}</extra>`,
  };
  const rows = isWord.flatMap((is, row) => (is ? [row] : []));
  if (!rows.length) return [line];
  return [line, { key: line.key, ...markTrace(rows.map((row) => x[row]), rows.map((row) => found.y[row]),
    rows.map((row) => `${what} is ${numberText(found.y[row])}`)) }];
}

// Where values are no finite numbers: a mark at the edge, whatever the scale.
function markTrace(x, words, texts) {
  const symbols = { NaN: "x", Infinity: "triangle-up", "-Infinity": "triangle-down" };
  return {
    x, y: words.map((word) => (word === "Infinity" ? 0.96 : 0.04)), yaxis: "y2",
    type: "scatter", mode: "markers", name: "not finite",
    marker: { symbol: words.map((word) => symbols[word]), color: theme().bad, size: 9,
      line: { color: theme().paper, width: 1 } },
    text: texts.map(plotlyText), hovertemplate: "%{text}<extra></extra>",
  };
}

function curveLayout(traces, extra = {}) {
  const onOwnScale = traces.filter((trace) => trace.yaxis !== "y2");
  const y = onOwnScale.flatMap((trace) => trace.y);
  return layoutFor({
    xaxis: xAxis(traces.flatMap((trace) => trace.x)),
    yaxis: { type: view.scale, exponentformat: "e", uirevision: view.scale,
      ...(view.scale === "log" && { tickformat: ".3~g", nticks: 3 }),
      ...(extra.rangemode !== "tozero" && rangeAround(y)), ...extra },
    yaxis2: { overlaying: "y", range: [0, 1], fixedrange: true, visible: false },
    uirevision: "kept",
  });
}

const KINDS_OF_LINES = {
  steps: { table: "steps", name: "steps", width: 1, dotsUpTo: 1 },
  mean: { table: "epochs", name: "epoch mean", width: 2, dotsUpTo: 40 },
  evaluation: { table: "epochs", name: "evaluation", width: 2, dotsUpTo: 40 },
};

// Alone, a run has a colour for each kind of line, and its steps are pale beside means.
function styleAlone(kind, columns) {
  if (kind === "evaluation") return { colour: runColour(1) };
  const isPale = kind === "steps" && columns.mean;
  return { colour: isPale ? theme().faint : runColour(0), ...(kind === "steps" && !isPale && { width: 1.3 }) };
}

// Among others, a run has one colour.
function styleAmong(run, index, kind, columns) {
  const dash = runDash(index) === "solid" && kind === "evaluation" ? "dot" : runDash(index);
  return { colour: runColour(index), dash, key: run.label, isPale: kind === "steps" && columns.mean,
    name: kind === "mean" || !columns.mean ? run.label : `${run.label}, ${KINDS_OF_LINES[kind].name}` };
}

function runTraces(run, index, several, columns) {
  return Object.entries(KINDS_OF_LINES).flatMap(([kind, basic]) => {
    if (!columns[kind]) return [];
    const found = series(run, basic.table, columns[kind], view.axis);
    if (!found.x.length) return [];
    const style = { ...basic, ...(several ? styleAmong(run, index, kind, columns) : styleAlone(kind, columns)) };
    const traces = lineTraces(found, style, `${style.name}: ${columns.title}`, columns.factor);
    if (style.isPale) traces[0].opacity = 0.35;
    return traces;
  });
}

// Steps without epochs' means beside them get a moving mean, if there are many.
const MANY_STEPS = 150;

function smoothTraces(run, columns) {
  if (columns.mean || !columns.steps) return [];
  const found = series(run, "steps", columns.steps, view.axis);
  const values = found.y.filter((value) => !WORDS.has(value));
  if (values.length < MANY_STEPS || new Set(values.slice(-MANY_STEPS)).size < 3) return [];
  const style = { name: "moving mean", width: 2, dotsUpTo: 0, colour: runColour(0) };
  return lineTraces({ x: found.x, y: movingMean(found.y, Math.ceil(values.length / 60)) }, style, columns.title, columns.factor);
}

// Over so many values on either side, those that are no finite numbers left out.
function movingMean(values, reach) {
  const sums = [0];
  const counts = [0];
  values.forEach((value, row) => {
    const isNumber = !WORDS.has(value);
    sums.push(sums[row] + (isNumber ? value : 0));
    counts.push(counts[row] + (isNumber ? 1 : 0));
  });
  return values.map((value, row) => {
    const [from, to] = [Math.max(row - reach, 0), Math.min(row + reach + 1, values.length)];
    return WORDS.has(value) ? null : (sums[to] - sums[from]) / (counts[to] - counts[from]);
  });
}

function curveOf(runs, columns) {
  return () => {
    const data = runs.flatMap((run, index) => runTraces(run, index, runs.length > 1, columns));
    if (runs.length === 1) {
      const smooth = smoothTraces(runs[0], columns);
      if (smooth.length) Object.assign(data[0].line, { color: theme().faint, width: 1 });
      if (smooth.length) data[0].colour = theme().faint;
      data.push(...smooth);
    }
    return data.length ? { data, layout: curveLayout(data, columns.axis) } : null;
  };
}

// All curves that there are values for, in the order in which they are shown.
function curvesThereAre(runs) {
  const there = (table, column) => (hasColumn(runs, table, column) ? column : null);
  const curves = [{ title: "Loss", steps: there("steps", "loss"), mean: there("epochs", "loss"),
    evaluation: there("epochs", "eval/loss") }];
  const metrics = new Set([...columnNames(runs, "epochs", "metric/"), ...columnNames(runs, "epochs", "eval/"),
    ...columnNames(runs, "steps", "metric/")].map((name) => name.slice(name.indexOf("/") + 1)));
  metrics.delete("loss");
  for (const name of metrics) {
    curves.push({ title: name, steps: there("steps", `metric/${name}`),
      mean: there("epochs", `metric/${name}`), evaluation: there("epochs", `eval/${name}`) });
  }
  for (const [column, title] of Object.entries(MEASURES)) {
    const mean = column === "lr" && !there("steps", "lr") ? there("epochs", "lr") : null;
    curves.push({ title, steps: there("steps", column), mean, factor: GIGABYTES[column],
      axis: FROM_ZERO.has(column) ? { rangemode: "tozero" } : {} });
  }
  return curves.filter((curve) => curve.steps || curve.mean || curve.evaluation);
}

function memoryCurve(runs) {
  return () => {
    const [run] = runs;
    const names = columnNames(runs, "steps", "memory/");
    const data = names.flatMap((name, index) => lineTraces(series(run, "steps", name, view.axis),
      { name: name.slice(7), colour: runColour(index), width: 1.5, dash: runDash(index), dotsUpTo: 1 }, name, 1e-9));
    return data.length ? { data, layout: curveLayout(data, { rangemode: "tozero" }) } : null;
  };
}

// Adds the curves that are not on the page yet; a live run may bring new ones.
function showCurves(parent, runs) {
  for (const columns of curvesThereAre(runs)) {
    const shown = curvesShown.get(columns.title);
    if (shown) Object.assign(shown, columns);
    else {
      curvesShown.set(columns.title, columns);
      addChart(parent, columns.title, curveOf(runs, columns), curveNote(runs, columns));
    }
  }
  if (runs.length === 1 && columnNames(runs, "steps", "memory/").length && !curvesShown.has("memory/")) {
    curvesShown.set("memory/", {});
    addChart(parent, "Memory of the devices, GB", memoryCurve(runs));
  }
}

function curveNote(runs, { steps, mean, evaluation }) {
  if (runs.length === 1) return null;
  const parts = [mean && "strong: epoch mean", steps && mean && "pale: steps", evaluation && "dotted: evaluation"];
  return parts.filter(Boolean).join(" · ") || null;
}
