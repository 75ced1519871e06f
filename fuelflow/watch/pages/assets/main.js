// Puts the page together, and keeps it up to date.

const page = JSON.parse(document.getElementById("page").textContent);
const { runs } = page;
const sections = {};

function addSection(name, title) {
  const body = el("div", { class: "body" });
  const section = el("section", { id: name, hidden: true }, el("h2", {}, title), body);
  document.getElementById("main").append(section);
  sections[name] = { section, body };
  return body;
}

// A section's content; without any it is not shown.
function fill(name, ...content) {
  const shown = content.filter(Boolean);
  sections[name].section.hidden = shown.length === 0;
  sections[name].body.replaceChildren(...shown);
}

function segmented(label, options, current, choose) {
  const group = el("div", { class: "segmented", role: "group", "aria-label": label });
  const show = (value) => {
    for (const button of group.children) button.setAttribute("aria-pressed", String(button.value === value));
  };
  for (const [value, text] of Object.entries(options)) {
    group.append(el("button", { type: "button", value, onclick: () => { choose(value); show(value); draw(); } }, text));
  }
  show(current);
  return group;
}

function showControls() {
  document.getElementById("controls").replaceChildren(
    segmented("Along", AXES, view.axis, (axis) => { view.axis = axis; }),
    segmented("Scale", { linear: "linear", log: "log" }, view.scale, (scale) => { view.scale = scale; }),
    el("button", { type: "button", class: "theme", "aria-label": "Switch between light and dark", onclick: () => { switchTheme(); show(); } }, "◐"),
  );
}

function addSections() {
  const isOne = runs.length === 1;
  if (!isOne) addSection("last", "Last values");
  addSection("curves", "Curves").classList.add("grid");
  if (isOne) {
    addSection("held", "What held epochs back");
    addChart(addSection("timing", "Where the time went"), "Seconds of each epoch", () => timingChart(runs[0]));
    showRanks(addSection("ranks", "Ranks"), runs[0]);
    sections.ranks.body.classList.add("grid");
    sections.ranks.section.querySelector("h2").after(el("p", { class: "note", id: "rank-note" }));
    addSection("histograms", "Histograms");
    sections.histograms.refresh = showHistograms(sections.histograms.body, runs[0]);
    addSection("events", "Events");
    addSection("compiles", "Compiles");
    addSection("params", "Parameters");
  }
  addSection("settings", "Settings");
  addSection("versions", "Versions");
}

// The parts that change while a run goes on.
function showChanges() {
  chooseSecsUnit(runs);
  showHeader(document.getElementById("header"), page.title, runs);
  showCurves(sections.curves.body, runs);
  sections.curves.section.hidden = curvesShown.size === 0;
  if (runs.length > 1) {
    fill("last", lastValuesTable(runs));
    return;
  }
  const [run] = runs;
  fill("held", heldBack(run));
  sections.timing.section.hidden = !(run.epochs.compute_ms || []).length;
  sections.ranks.section.hidden = run.ranks.num_ranks < 2;
  document.getElementById("rank-note").textContent = rankNote(run);
  sections.histograms.section.hidden = Object.keys(run.histograms).length === 0;
  sections.histograms.refresh();
  const older = run.num_events - run.events.reduce((sum, each) => sum + (each.count || 1), 0);
  fill("events", eventTable(run), older > 0 ? el("p", { class: "note" }, `${plural(older, "older event")} left out.`) : null);
  fill("compiles", compileTable(run));
}

function show() {
  showChanges();
  if (runs.length === 1) {
    const params = runs[0].run && runs[0].run.params;
    fill("params", params && (params.name || []).length ? paramTable(params) : null);
  }
  fill("settings", factTable(runs, "settings"));
  fill("versions", factTable(runs, "versions"));
  draw();
}

function startFollowing() {
  connection.state = "connecting";
  follow(page.live, {
    onState: (state) => { connection.state = state; showHeader(document.getElementById("header"), page.title, runs); },
    onReset: (run) => { Object.assign(runs[0], run); show(); },
    isOver: () => Boolean(runs[0].end),
    onAdd: (newer) => { joinRun(runs[0], newer); showChanges(); draw(); },
  });
}

applyTheme();
prefersDark.addEventListener("change", () => { applyTheme(); show(); });
for (const event of ["scroll", "visibilitychange", "pointerup", "pointercancel"]) {
  document.addEventListener(event, (got) => { if (got.type.startsWith("pointer")) held = false; draw([]); }, { passive: true });
}
document.addEventListener("pointerdown", () => { held = true; }, { passive: true });
showControls();
addSections();
if (page.live) startFollowing();
show();
document.addEventListener("DOMContentLoaded", () => draw());
