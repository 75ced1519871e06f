// Light and dark, and colours that the colour-blind can tell apart (Okabe and Ito).

const THEMES = {
  light: {
    ink: "#1c2430", soft: "#5c6673", grid: "#e6e9ee", paper: "#ffffff", edge: "#c9d0d9",
    faint: "rgba(0, 94, 162, 0.36)",
    runs: ["#0065ad", "#c44e00", "#00805d", "#a8437f", "#8a6d00", "#2e8bc0", "#5b4ab0", "#4d4d4d"],
    bad: "#c1121f",
    parts: { compute: "#0072b2", input: "#e69f00", host: "#9aa5b1", evaluation: "#009e73", callbacks: "#cc79a7", compiling: "#5c4b8a" },
  },
  dark: {
    ink: "#e6eaf0", soft: "#98a3b1", grid: "#2a323d", paper: "#161b22", edge: "#3c4654",
    faint: "rgba(110, 190, 245, 0.45)",
    runs: ["#62b6f0", "#f08a3c", "#2fc596", "#e08cc0", "#e6c229", "#a8d8f5", "#a99bf0", "#c0c0c0"],
    bad: "#ff6b6b",
    parts: { compute: "#3f97d3", input: "#e69f00", host: "#6b7684", evaluation: "#1fae84", callbacks: "#cc79a7", compiling: "#8f7cc9" },
  },
};
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash"];
const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");
const isTouched = window.matchMedia("(pointer: coarse)").matches;
let chosenTheme = recalledTheme();

// What the reader chose before, where the browser lets a page remember it.
function recalledTheme() {
  try { return window.localStorage.getItem("fuelflow-theme"); } catch { return null; }
}

function themeName() {
  return chosenTheme in THEMES ? chosenTheme : prefersDark.matches ? "dark" : "light";
}

function theme() {
  return THEMES[themeName()];
}

function applyTheme() {
  document.documentElement.dataset.theme = themeName();
}

function switchTheme() {
  chosenTheme = themeName() === "dark" ? "light" : "dark";
  try { window.localStorage.setItem("fuelflow-theme", chosenTheme); } catch { /* not kept */ }
  applyTheme();
}

function runColour(index) {
  const { runs } = theme();
  return runs[index % runs.length];
}

// Beyond the number of colours, dashes tell runs apart.
function runDash(index) {
  return DASHES[Math.floor(index / theme().runs.length) % DASHES.length];
}
