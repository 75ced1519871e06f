// What the run is called, how it stands, and how far it is.

const connection = { state: "none" };
const ENDS = {
  done: ["done", "good"], stop: ["stopped", "good"], stop_when: ["stopped by its condition", "good"],
  SIGTERM: ["ended by SIGTERM", "warn"], interrupted: ["interrupted", "warn"], error: ["failed", "bad"],
};
const CONNECTIONS = {
  connecting: ["connecting", "warn", "The page waits for the first records."],
  live: ["live", "live", "The page follows the run."],
  lost: ["connection lost", "bad", "The page shows what it had, and tries again."],
};

const NOTHING = "Nothing has been recorded yet: curves and figures come with the first steps of the run.";
const NOTHING_AT_ALL = "The run ended before any of its steps was recorded.";

function hasRows(run) {
  return numRows(run.steps) > 0 || numRows(run.epochs) > 0;
}

function statusPill(run) {
  if (run.end) {
    const [text, kind] = ENDS[run.end.reason] || [run.end.reason, "warn"];
    return pill(text, kind, run.end.text || "");
  }
  if (connection.state in CONNECTIONS) return pill(...CONNECTIONS[connection.state]);
  if (!hasRows(run)) return pill("nothing recorded yet", "warn", "The run had only begun, or was killed.");
  return pill("no end recorded", "warn", "The run was still going on, or was killed.");
}

function pill(text, kind, title) {
  return el("span", { class: `pill ${kind}`, title, role: "status" }, text);
}

// Epochs done, as a fraction of a second epoch too, by the newest row of all.
function epochsDone(run) {
  const steps = positions(run, "steps", "epoch");
  const epochs = positions(run, "epochs", "epoch");
  return Math.max(steps.length ? steps[steps.length - 1] : 0, epochs.length ? epochs[epochs.length - 1] : 0);
}

function stepsDone(run) {
  return Math.max(lastValue(run, "steps", "taken") || 0, lastValue(run, "epochs", "taken") || 0);
}

// Seconds that are left at the pace of the last fifth of the way.
function secsLeft(run, done, whole) {
  const at = positions(run, "steps", "epoch");
  const secs = positions(run, "steps", "time");
  const last = at.length - 1;
  const from = at.findIndex((epochs) => epochs >= done * 0.8);
  if (from < 0 || from >= last || at[last] <= at[from]) return null;
  return (whole - done) * (secs[last] - secs[from]) / (at[last] - at[from]);
}

function progressFacts(run) {
  const whole = run.run && run.run.epochs;
  const done = epochsDone(run);
  const facts = [];
  if (done || whole) {
    facts.push(whole ? `${Math.floor(done).toLocaleString("en")} of ${plural(whole, "epoch")} done` : `${plural(Math.floor(done), "epoch")} done`);
  }
  facts.push(plural(stepsDone(run), "step"));
  facts.push(durationText(activeSecs(run, Infinity)));
  const left = whole && !run.end && connection.state === "live" ? secsLeft(run, done, whole) : null;
  if (left) facts.push(`about ${durationText(left)} left`);
  if (run.phase && !run.end && connection.state === "live") facts.push(run.phase);
  return { facts, fraction: whole ? Math.min(done / whole, 1) : null };
}

function tile(label, value, below) {
  return el("div", { class: "tile" }, el("dt", {}, label), el("dd", {}, value), below ? el("p", {}, below) : null);
}

function bestOf(run, column) {
  const { epochs } = run;
  let best = null;
  (epochs[column] || []).forEach((value, row) => {
    if (typeof value === "number" && (best === null || value < epochs[column][best])) best = row;
  });
  if (best === null) return null;
  return `best ${numberText(epochs[column][best])} in epoch ${epochs.epoch[best].toLocaleString("en")}`;
}

function tiles(run) {
  const found = [];
  const add = (label, table, column, text = numberText, below = null) => {
    const value = lastValue(run, table, column);
    if (value !== null) found.push(tile(label, text(value), below));
  };
  const isByEpoch = lastValue(run, "epochs", "loss") !== null;
  if (isByEpoch) add("Loss, last epoch", "epochs", "loss", numberText, bestOf(run, "loss"));
  else add("Loss", "steps", "loss");
  add("Evaluation loss", "epochs", "eval/loss", numberText, bestOf(run, "eval/loss"));
  for (const name of columnNames([run], "epochs", "eval/").filter((each) => each !== "eval/loss").slice(0, 2)) {
    add(`Evaluation ${name.slice(5)}`, "epochs", name);
  }
  add("Learning rate", "steps", "lr");
  add("Steps per second", "steps", "steps_per_sec", (value) => numberText(value, 3));
  const skipped = Math.max(run.skipped, lastValue(run, "steps", "num_skipped") || 0);
  if (skipped) found.push(tile("Skipped steps", skipped.toLocaleString("en")));
  return found;
}

function showHeader(header, title, runs) {
  if (runs.length > 1) {
    header.replaceChildren(el("h1", {}, title), el("p", { class: "facts-line" }, `${runs.length} runs on the same axes`));
    return;
  }
  const [run] = runs;
  const { facts, fraction } = progressFacts(run);
  const percent = fraction === null ? null : Math.round(100 * fraction);
  const bar = percent === null ? null : el("div", { class: "progress", role: "progressbar", "aria-label": "Progress",
    "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": percent }, el("div", {}));
  if (bar) bar.firstChild.style.width = `${100 * fraction}%`;
  const failure = run.end && run.end.reason === "error" && run.end.text ? el("pre", { class: "failure" }, run.end.text) : null;
  const began = run.sessions.length ? ` · began ${clockText(run.sessions[0][0])}` : "";
  header.replaceChildren(...[
    el("div", { class: "bar" }, el("h1", {}, (run.run && run.run.name) || title), statusPill(run)),
    el("p", { class: "facts-line" }, facts.join(" · "), el("span", { class: "soft" }, began)),
    bar, failure, hasRows(run) ? null : el("p", { class: "note", id: "nothing" }, run.end ? NOTHING_AT_ALL : NOTHING), el("dl", { class: "tiles" }, ...tiles(run)),
  ].filter(Boolean));
}

// The newest value of everything, a column for each run.
function lastValuesTable(runs) {
  const rows = [["epochs done", (run) => numberText(Math.floor(epochsDone(run)))], ["steps", (run) => numberText(stepsDone(run))],
    ["time", (run) => durationText(activeSecs(run, Infinity))], ["how it ended", (run) => statusPill(run)]];
  const values = [["loss", "epochs", "loss"], ...columnNames(runs, "epochs", "eval/").map((name) => [`evaluation ${name.slice(5)}`, "epochs", name]),
    ...columnNames(runs, "epochs", "metric/").map((name) => [name.slice(7), "epochs", name]),
    ["learning rate", "steps", "lr"], ["steps per second", "steps", "steps_per_sec"]];
  for (const [label, from, column] of values) rows.push([label, (run) => numberText(lastValue(run, from, column))]);
  const heads = runs.map((run, index) => el("th", { scope: "col", class: "number" }, swatch(index), run.label));
  return el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, el("th", {}, ""), ...heads)),
    el("tbody", {}, ...rows.map(([label, value]) => el("tr", {}, el("th", { scope: "row" }, label),
      ...runs.map((run) => el("td", { class: "number" }, value(run))))))));
}

function swatch(index) {
  const mark = el("span", { class: "swatch" });
  mark.style.background = runColour(index);
  return mark;
}
