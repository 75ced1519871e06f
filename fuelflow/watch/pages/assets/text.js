// Numbers, names and elements as a person reads them.

const WORDS = new Set(["NaN", "Infinity", "-Infinity"]);

// A name as plotly shows it: its labels take tags, entities and %{templates}, so
// every character that could begin one is written as a number.
function plotlyText(name) {
  return String(name).replace(/[<>&"'%{}$\\]/g, (c) => `&#${c.charCodeAt(0)};`);
}

function numberText(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (WORDS.has(value)) return value === "NaN" ? "NaN" : value.replace("Infinity", "∞");
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(digits - 2);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return Number(value.toPrecision(digits)).toLocaleString("en", { maximumFractionDigits: 8 });
}

function shareText(share) {
  if (typeof share !== "number") return "–";
  return `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;
}

function bytesText(size) {
  if (typeof size !== "number") return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (size >= 1000 && unit < units.length - 1) { size /= 1000; unit += 1; }
  return unit === 0 ? `${size} B` : `${size.toPrecision(3)} ${units[unit]}`;
}

function durationText(secs) {
  if (typeof secs !== "number" || !Number.isFinite(secs)) return "–";
  if (secs < 60) return `${secs < 10 ? secs.toFixed(1) : Math.round(secs)} s`;
  const minutes = Math.round(secs / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return `${hours} h ${minutes % 60} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

// As a clock shows it, for rows of which many are near each other.
function timeText(secs, isLong) {
  const tenths = Math.round(10 * secs);
  const two = (value) => String(value).padStart(2, "0");
  const [hours, minutes, rest] = [Math.floor(tenths / 36000), Math.floor(tenths / 600) % 60, tenths % 600];
  const time = `${two(minutes)}:${two(Math.floor(rest / 10))}`;
  return isLong ? `${hours}:${time}` : `${time}.${rest % 10}`;
}

function clockText(time) {
  return typeof time === "number" ? new Date(1000 * time).toLocaleString() : "–";
}

function plural(count, word) {
  return `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
}

// An element; strings among its children become text, never tags.
function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

function median(values) {
  const sorted = values.filter((value) => typeof value === "number").sort((a, b) => a - b);
  return sorted.length ? sorted[sorted.length >> 1] : null;
}
