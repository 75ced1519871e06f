// The runs on the page: columns by name, where each row stands on an axis, and how
// newer rows are added.

const AXES = { step: "step", epoch: "epoch", time: "time" };

function numRows(table) {
  return table.step ? table.step.length : 0;
}

// Columns of both, one below the other, null where one has none of that name.
function joinColumns(table, newer) {
  const before = numRows(table);
  const after = numRows(newer);
  if (!after) return;
  for (const name of Object.keys(newer)) {
    if (!table[name]) table[name] = new Array(before).fill(null);
  }
  for (const name of Object.keys(table)) {
    const values = newer[name] || new Array(after).fill(null);
    for (const value of values) table[name].push(value);
  }
}

function joinRanks(ranks, newer) {
  if (!newer.num_ranks) return ranks;
  if (ranks.num_ranks !== newer.num_ranks) return newer;
  for (const name of ["first", "last", "bad"]) ranks[name].push(...newer[name]);
  for (const [name, rows] of Object.entries(ranks.measures)) {
    rows.push(...newer.measures[name]);
  }
  return ranks;
}

// An epoch counts those of its own steps that were left out. What is newer does not
// know of those before.
function countSkipped(run, { epochs }) {
  (epochs.taken || []).forEach((taken, row) => {
    run.skipped += (epochs.num_skipped && epochs.num_skipped[row]) || 0;
    run.skipped = Math.max(run.skipped, taken - epochs.step[row]);
    epochs.taken[row] = epochs.step[row] + run.skipped;
  });
}

// Checkpoints in a row are one event, the newest, with their count.
function joinEvents(events, newer) {
  for (const event of newer) {
    const last = events[events.length - 1];
    const areSaves = last && [last, event].every(({ what, level }) => what === "checkpoint" && level === "info");
    const count = areSaves ? (last.count || 1) + (event.count || 1) : event.count;
    if (areSaves) events.pop();
    events.push(count ? { ...event, count } : event);
  }
}

// A run and what came after: the page's share of what the server's digest does.
function joinRun(run, newer) {
  countSkipped(run, newer);
  joinColumns(run.steps, newer.steps);
  joinColumns(run.epochs, newer.epochs);
  run.ranks = joinRanks(run.ranks, newer.ranks);
  run.compiles.push(...newer.compiles);
  joinEvents(run.events, newer.events);
  run.num_events += newer.num_events;
  for (const [name, rows] of Object.entries(newer.histograms)) {
    run.histograms[name] = [...(run.histograms[name] || []), ...rows];
  }
  run.end = newer.end || run.end;
  run.phase = newer.phase || run.phase;
  if (newer.time !== null) {
    run.time = newer.time;
    const session = run.sessions[run.sessions.length - 1];
    if (session) session[1] = Math.max(session[1], newer.time);
  }
}

// Seconds that the run was going on until then; time between two sessions is not.
function activeSecs(run, time) {
  let secs = 0;
  for (const [start, end] of run.sessions) {
    if (time < start) break;
    secs += Math.min(time, end) - start;
  }
  return secs;
}

function stepsPerEpoch(run) {
  if (run.run && run.run.steps_per_epoch) return run.run.steps_per_epoch;
  const known = run.epochs.num_steps || [];
  return known.length ? known[known.length - 1] : null;
}

// Where the rows of a table stand on an axis. An epoch's means stand at its end.
function positions(run, table, axis) {
  const rows = run[table];
  if (axis === "step") return rows.taken || []; // those left out as well
  if (axis === "time") return (rows.time || []).map((time) => activeSecs(run, time));
  if (table === "epochs") return (rows.epoch || []).map((epoch) => epoch + 1);
  const num = stepsPerEpoch(run);
  return (rows.epoch || []).map((epoch, row) =>
    num && rows.epoch_step ? epoch + Math.min(rows.epoch_step[row] / num, 1) : epoch);
}

// The rows that have a value of a column; NaN and infinities are kept as words.
function series(run, table, column, axis) {
  const values = run[table][column];
  const found = { x: [], y: [] };
  if (!values) return found;
  const x = positions(run, table, axis);
  values.forEach((value, row) => {
    if (value === null) return;
    found.x.push(x[row]);
    found.y.push(value);
  });
  return found;
}

function lastValue(run, table, column) {
  const values = run[table][column] || [];
  for (let row = values.length - 1; row >= 0; row -= 1) {
    if (values[row] !== null) return values[row];
  }
  return null;
}

function columnNames(runs, table, prefix) {
  const names = new Set();
  for (const run of runs) {
    for (const name of Object.keys(run[table])) if (name.startsWith(prefix)) names.add(name);
  }
  return [...names];
}

function hasColumn(runs, table, column) {
  return runs.some((run) => (run[table][column] || []).some((value) => value !== null));
}
