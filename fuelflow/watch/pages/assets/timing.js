// Where the time of each epoch went, and what held it back.

const PARTS = {
  compute: ["compute_ms", "devices at work"],
  input: ["input_ms", "waiting for data"],
  host: ["host_ms", "devices idle otherwise"],
  evaluation: ["eval_ms", "evaluation"],
  callbacks: ["callback_ms", "callbacks"],
  compiling: ["compile_ms", "compiling"],
};
const MOST_BARS = 120;

function timingChart(run) {
  const { epochs } = run;
  if (!(epochs.compute_ms || []).length) return null;
  const isMany = epochs.epoch.length > MOST_BARS;
  const data = Object.entries(PARTS).filter(([, [column]]) => (epochs[column] || []).some(Boolean))
    .map(([part, [column, name]]) => ({
      x: epochs.epoch, y: epochs[column].map((ms) => (ms || 0) / 1000), name,
      key: name, colour: theme().parts[part], dash: "block",
      hovertemplate: `%{y:.3~g} s<extra>${name}</extra>`,
      ...(isMany
        ? { type: "scatter", mode: "none", stackgroup: "all", fillcolor: theme().parts[part] }
        : { type: "bar", marker: { color: theme().parts[part], line: { width: 0 } } }),
    }));
  const layout = rankLayout(epochs.epoch.length, { barmode: "stack", bargap: 0.15, yaxis: { title: { text: "seconds" } } });
  return { data, layout };
}

const KINDS = { input: "data", callback: "callbacks", rank: "one slow rank", compute: "compute", nothing: "nothing stood out" };

// Stretches of epochs with the same cause, each with its worst epoch.
function stretches({ held, held_kind: kinds, held_share: shares, epoch, epoch_ms: ms }) {
  const found = [];
  (held || []).forEach((text, row) => {
    if (text === null) return;
    let last = found[found.length - 1];
    if (!last || last.kind !== kinds[row]) {
      last = { kind: kinds[row], first: epoch[row], num: 0, lost: 0, worst: row };
      found.push(last);
    }
    last.last = epoch[row];
    last.num += 1;
    last.lost += shares[row] * ms[row];
    if (shares[row] > shares[last.worst]) last.worst = row;
  });
  return found;
}

// How often each cause was found, the newest epoch's, and where most was lost.
function heldBack({ epochs }) {
  const all = stretches(epochs);
  if (!all.length) return null;
  const counts = new Map();
  for (const { kind, num } of all) counts.set(kind, (counts.get(kind) || 0) + num);
  const chips = [...counts].sort((a, b) => b[1] - a[1]).map(([kind, count]) =>
    el("li", { class: "chip" }, `${plural(count, "epoch")}: ${KINDS[kind] || kind}`));
  const newest = epochs.held.reduce((found, text, row) => (text === null ? found : row), 0);
  const worst = all.filter(({ kind }) => ["input", "rank", "callback"].includes(kind))
    .sort((a, b) => b.lost - a.lost).slice(0, 5);
  return el("div", { class: "panel" },
    el("p", { class: "lead" }, `Newest, epoch ${epochs.epoch[newest]}: ${epochs.held[newest]}.`),
    el("ul", { class: "chips", "aria-label": "Epochs by cause" }, ...chips),
    worst.length ? el("h3", {}, "Where most was lost") : null,
    worst.length ? el("ol", { class: "plain" }, ...worst.map((each) => stretchItem(each, epochs))) : null);
}

function stretchItem({ first, last, num, worst }, { held, epoch }) {
  const where = num === 1 ? `epoch ${first}: ` : `epochs ${first} to ${last}, at worst in ${epoch[worst]}: `;
  return el("li", {}, el("span", { class: "soft" }, where), held[worst]);
}
