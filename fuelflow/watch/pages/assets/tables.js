// Tables: parameters, settings and versions, compiles, events.

const MOST_ROWS = 400;
const MOST_SHOWN = 40; // beyond, a table scrolls by itself

const NUMBERS = new Set(["seconds", "step"]);

function table(headings, rows, attributes = {}) {
  return el("div", { class: rows.length > MOST_SHOWN ? "scroll tall" : "scroll" }, el("table", attributes,
    el("thead", {}, el("tr", {}, ...headings.map((text) =>
      el("th", { scope: "col", class: NUMBERS.has(text) ? "number" : null }, text)))),
    el("tbody", {}, ...rows.map((cells) => el("tr", {}, ...cells.map(cell))))));
}

// A number stands at the right; what is given as an element keeps its own class.
function cell(value) {
  if (value instanceof Node) return value;
  return el("td", typeof value === "number" ? { class: "number" } : {},
    typeof value === "number" ? value.toLocaleString("en") : String(value));
}

function numberCell(text) {
  return el("td", { class: "number" }, text);
}

const PARAM_COLUMNS = [
  ["name", (params, row) => params.name[row]],
  ["shape", (params, row) => params.shape[row].join(" × ") || "scalar"],
  ["type", (params, row) => params.dtype[row]],
  ["values", (params, row) => params.shape[row].reduce((a, b) => a * b, 1)],
  ["size", (params, row) => params.num_bytes[row]],
];

// All parameters, to be searched by name and sorted by any column.
function paramTable(params) {
  const sorting = { column: null, isUp: true };
  const search = el("input", { type: "search", placeholder: "Search names", "aria-label": "Search names", oninput: refresh });
  const note = el("p", { class: "note" });
  const body = el("tbody");
  const heads = PARAM_COLUMNS.map(([name], column) => el("th", { scope: "col", class: column > 2 ? "number" : "" },
    el("button", { type: "button", onclick: () => sortBy(column) }, name)));
  function sortBy(column) {
    sorting.isUp = sorting.column === column ? !sorting.isUp : column < 3;
    sorting.column = column;
    heads.forEach((head, index) => head.setAttribute("aria-sort",
      index !== column ? "none" : sorting.isUp ? "ascending" : "descending"));
    refresh();
  }
  function refresh() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = params.name.flatMap((name, row) =>
      (words.every((word) => name.toLowerCase().includes(word)) ? [row] : []));
    if (sorting.column !== null) sortRows(rows, PARAM_COLUMNS[sorting.column][1]);
    body.replaceChildren(...rows.slice(0, MOST_ROWS).map((row) => paramRow(params, row)));
    note.textContent = rows.length > MOST_ROWS ? `The first ${MOST_ROWS} of ${rows.length.toLocaleString("en")}: search to see others.` : "";
  }
  function sortRows(rows, key) {
    const sign = sorting.isUp ? 1 : -1;
    rows.sort((a, b) => {
      const [one, other] = [key(params, a), key(params, b)];
      return sign * (typeof one === "number" ? one - other : one.localeCompare(other, "en", { numeric: true }));
    });
  }
  refresh();
  return el("div", {}, el("div", { class: "bar" }, el("p", { class: "lead" }, paramTotals(params)), search),
    el("div", { class: "scroll tall" }, el("table", { class: "params" }, el("thead", {}, el("tr", {}, ...heads)), body)), note);
}

function paramRow(params, row) {
  const [name, shape, dtype, values, size] = PARAM_COLUMNS.map(([, value]) => value(params, row));
  const isFrozen = params.is_trained[row] === false;
  return el("tr", isFrozen ? { class: "frozen", title: "not trained" } : {},
    el("td", {}, el("code", {}, name), isFrozen ? el("span", { class: "tag" }, "frozen") : null),
    el("td", {}, shape), el("td", {}, dtype), numberCell(values.toLocaleString("en")), numberCell(bytesText(size)));
}

function paramTotals(params) {
  const sizes = params.shape.map((shape) => shape.reduce((a, b) => a * b, 1));
  const sum = (values) => values.reduce((a, b) => a + b, 0);
  const trained = sum(sizes.filter((_, row) => params.is_trained[row] !== false));
  const total = sum(sizes);
  const parts = [`${plural(params.name.length, "parameter")}, ${total.toLocaleString("en")} values, ${bytesText(sum(params.num_bytes))}`];
  if (trained !== total) parts.push(`${trained.toLocaleString("en")} of them trained`);
  return parts.join("; ");
}

function factTable(runs, name) {
  const keys = [...new Set(runs.flatMap((run) => Object.keys((run.run && run.run[name]) || {})))];
  const valuesOf = (key) => runs.map((run) => ((run.run && run.run[name]) || {})[key] ?? "–");
  const rows = keys.map((key) => {
    const values = valuesOf(key).map(String);
    const differs = new Set(values).size > 1;
    return [el("th", { scope: "row", class: differs ? "differs" : "" }, key),
      ...values.map((value) => el("td", { class: differs ? "differs" : "" }, value))];
  });
  return rows.length ? table(["", ...(runs.length > 1 ? runs.map((run) => run.label) : [""])], rows, { class: runs.length > 1 ? "facts" : "facts single" }) : null;
}

function compileTable(run) {
  if (!run.compiles.length) return null;
  return table(["program", "seconds", "why"], run.compiles.map((each) =>
    [el("td", {}, el("code", {}, each.program)), numberCell(numberText(each.seconds, 3)),
      each.is_first ? "first" : each.reason || "–"]));
}

function eventTable(run) {
  if (!run.events.length) return null;
  const newest = [...run.events].reverse();
  const isLong = activeSecs(run, Infinity) >= 600;
  return table(["when", "step", "what", ""], newest.map((each) =>
    [el("td", { class: "soft", title: clockText(each.time) }, timeText(activeSecs(run, each.time), isLong)),
      numberCell(each.step === null || each.step === undefined ? "–" : each.step.toLocaleString("en")),
      el("td", {}, el("span", { class: `tag ${each.level}` }, each.what)),
      each.count > 1 ? `${each.text} (× ${each.count.toLocaleString("en")})` : each.text]), { class: "events" });
}
