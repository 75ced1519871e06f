// Each rank over the epochs: lines for few ranks, heat maps for many.

const MOST_LINES = 8;
const RANK_MEASURES = {
  throughput: ["Throughput of each rank", "samples per second"],
  share: ["Share of the samples", "fraction"],
  starve: ["Waiting for data", "share of the epoch"],
  compute: ["Device at work", "share of the epoch"],
  loss: ["Loss on the rank's own rows", "loss"],
  pass_ms: ["One pass on the rank's own rows", "ms"],
};

function showRanks(parent, run) {
  for (const [name, [title, unit]] of Object.entries(RANK_MEASURES)) {
    addChart(parent, title, () => rankChart(run.ranks, name, unit));
  }
}

function rankChart(ranks, name, unit) {
  const rows = ranks.measures[name] || [];
  const isMeasured = rows.some((row) => row.some((value) => value));
  if (ranks.num_ranks < 2 || !isMeasured) return null;
  const x = ranks.first.map((first, bin) => (first + ranks.last[bin]) / 2);
  return ranks.num_ranks <= MOST_LINES ? rankLines(ranks, rows, x, name, unit)
    : rankMap(ranks, rows, x, name, unit);
}

// The losses that are no finite numbers: [bin, rank, word] each.
function badLosses(ranks, name) {
  if (name !== "loss") return [];
  return ranks.bad.flatMap((bad, bin) => Object.entries(bad).map(([rank, word]) => [bin, Number(rank), word]));
}

function rankLayout(numEpochs, extra) {
  const epochs = { title: { text: "epoch" }, uirevision: "epoch", tickformat: ",~r",
    ...(numEpochs <= 8 && { dtick: 1 }) };
  return layoutFor({ xaxis: epochs, uirevision: "kept", margin: { l: 62, r: 14, t: 10, b: 38 }, ...extra });
}

function rankLines(ranks, rows, x, name, unit) {
  const data = Array.from({ length: ranks.num_ranks }, (_, rank) => ({
    x, y: rows.map((row) => row[rank]), type: "scatter",
    mode: x.length <= 40 ? "lines+markers" : "lines", name: `rank ${rank}`,
    key: `rank ${rank}`, colour: runColour(rank),
    line: { color: runColour(rank), width: 1.5 }, marker: { size: 5 },
    hovertemplate: `%{y:.4~g}<extra>rank ${rank}</extra>`,
  }));
  const bad = badLosses(ranks, name);
  if (bad.length) {
    data.push(markTrace(bad.map(([bin]) => x[bin]), bad.map(([, , word]) => word),
      bad.map(([, rank, word]) => `loss of rank ${rank} is ${numberText(word)}`)));
  }
  return { data, layout: rankLayout(x.length, { yaxis: { title: { text: unit }, rangemode: name === "loss" ? "normal" : "tozero" },
    yaxis2: { overlaying: "y", range: [0, 1], fixedrange: true, visible: false } }) };
}

function rankMap(ranks, rows, x, name, unit) {
  const size = Math.ceil(ranks.num_ranks / rows[0].length);
  const y = rows[0].map((_, group) => group * size + (Math.min(size, ranks.num_ranks - group * size) - 1) / 2);
  const data = [{
    type: "heatmap", x, y, z: rows, transpose: true, colorscale: "Cividis", hoverongaps: false, ...heatRange(rows),
    hovertemplate: `epoch %{x}, rank %{y}: %{z:.4~g}<extra></extra>`,
    colorbar: { thickness: 10, len: 1, outlinewidth: 0, title: { text: unit, side: "right", font: { size: 11, color: theme().soft } },
      tickfont: { size: 10, color: theme().soft } },
  }];
  const bad = badLosses(ranks, name);
  if (bad.length) {
    data.push({ type: "scatter", mode: "markers", x: bad.map(([bin]) => x[bin]), y: bad.map(([, rank]) => rank),
      marker: { symbol: "x", size: 6, color: theme().bad },
      text: bad.map(([, rank, word]) => `loss of rank ${rank} is ${numberText(word)}`),
      hovertemplate: "%{text}<extra></extra>" });
  }
  return { data, layout: rankLayout(x.length, { yaxis: { title: { text: "rank" }, showgrid: false }, hovermode: "closest",
    margin: { l: 54, r: 90, t: 10, b: 38 } }) };
}

// Values that are all the same are one colour in the middle of a range from zero.
function heatRange(rows) {
  let [least, most] = [Infinity, -Infinity];
  for (const row of rows) {
    for (const value of row) {
      if (value !== null && value < least) least = value;
      if (value !== null && value > most) most = value;
    }
  }
  return least === most && most > 0 ? { zmin: 0, zmax: 2 * most } : {};
}

function rankNote(run) {
  const { first, last, num_ranks: num } = run.ranks;
  const widest = Math.max(...first.map((epoch, bin) => last[bin] - epoch + 1), 1);
  const rows = Object.values(run.ranks.measures)[0] || [[]];
  const size = Math.ceil(num / rows[0].length);
  if (num <= MOST_LINES || (widest === 1 && size === 1)) return "";
  const cell = [widest > 1 && `up to ${widest} epochs`, size > 1 && `${size} ranks`].filter(Boolean).join(" and ");
  return `A cell stands for ${cell}, and shows of them what is farthest from the median.`;
}
