// Histograms of one parameter over the steps, as a heat map.

const LEVELS = 60;
const chosen = { histogram: null };

function showHistograms(parent, run) {
  const chart = addChart(parent, "Values by step", () => histogramChart(run.histograms[chosen.histogram]));
  const choice = el("select", { "aria-label": "Parameter",
    onchange: (event) => { chosen.histogram = event.target.value; draw([chart]); } });
  chart.card.querySelector("figcaption").append(choice);
  return () => {
    const names = Object.keys(run.histograms);
    if (choice.options.length === names.length) return;
    chosen.histogram = chosen.histogram || names[0] || null;
    choice.replaceChildren(...names.map((name) => el("option", { value: name, selected: name === chosen.histogram }, name)));
  };
}

// All histograms on the same levels, each bar's count spread over those it covers.
function histogramChart(rows) {
  if (!rows || !rows.length) return null;
  const usable = rows.filter(({ low, high }) => typeof low === "number" && typeof high === "number");
  if (!usable.length) return null;
  const low = Math.min(...usable.map((row) => row.low));
  const high = Math.max(...usable.map((row) => row.high));
  const width = (high - low || 1) / LEVELS;
  const data = [{
    type: "heatmap", x: usable.map((row) => row.taken),
    y: Array.from({ length: LEVELS }, (_, level) => low + (level + 0.5) * width),
    z: usable.map((row) => spreadCounts(row, low, width)), transpose: true, colorscale: "Cividis",
    hovertemplate: "step %{x}, near %{y:.3~g}: %{z:.3~g} values<extra></extra>",
    colorbar: { thickness: 10, outlinewidth: 0, tickfont: { size: 10, color: theme().soft } },
  }];
  return { data, layout: layoutFor({ hovermode: "closest", uirevision: chosen.histogram, margin: { l: 62, r: 70, t: 10, b: 38 },
    xaxis: stepAxis(usable.map((row) => row.taken)), yaxis: { title: { text: "value" }, showgrid: false } }) };
}

function spreadCounts({ low, high, counts }, start, width) {
  const levels = new Array(LEVELS).fill(0);
  const bar = (high - low) / counts.length;
  counts.forEach((count, index) => {
    const from = (low + index * bar - start) / width;
    const to = (low + (index + 1) * bar - start) / width;
    const first = Math.min(Math.floor(from), LEVELS - 1);
    const last = Math.min(Math.max(Math.ceil(to) - 1, first), LEVELS - 1);
    for (let level = first; level <= last; level += 1) {
      const covered = to > from ? (Math.min(level + 1, to) - Math.max(level, from)) / (to - from) : 1;
      levels[level] += count * covered;
    }
  });
  return levels;
}
