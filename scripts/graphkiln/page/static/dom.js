// Elements, made of text and attributes only: nothing here or elsewhere turns text into markup.

const SVG = "http://www.w3.org/2000/svg";

export const $ = (id) => document.getElementById(id);

/** An element with properties (`class`, `on...`, attributes) and children: nodes or text. */
export function el(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

/** The same for a part of a drawing. */
export function svg(tag, properties = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || (value === false && !name.startsWith("aria-"))) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true && !name.startsWith("aria-") ? "" : String(value));
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** An error as people read it: what happened, and what to do. */
export function errorBox(error) {
  const hint = error.hint ? el("span", { class: "hint" }, error.hint) : null;
  return el("p", { class: "error", role: "alert" }, error.message || String(error), hint);
}

/** A table: a caption, names of columns (those after a `>` are numbers), rows of text or nodes. */
export function table(caption, columns, rows, properties = {}) {
  const isNumber = columns.map((name) => name.startsWith(">"));
  const head = columns.map((name, at) => el("th", { scope: "col", class: isNumber[at] && "n" }, name.replace(/^>/, "")));
  const body = rows.map((row) =>
    el("tr", {}, row.map((cell, at) => (at ? el("td", { class: isNumber[at] && "n" }, cell) : el("th", { scope: "row" }, cell)))));
  return el("table", properties, caption && el("caption", {}, caption), el("thead", {}, el("tr", {}, head)), el("tbody", {}, body));
}

/** A list of facts: pairs of a name and text or a node; those without a value are left out. */
export function facts(pairs) {
  const known = pairs.filter(([, value]) => value !== undefined && value !== null && value !== "");
  return el("dl", { class: "facts" }, known.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}

/** A number with so many significant digits, never in more characters than it needs. */
export function digits(value, count = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(count - 1).replace(/\.?0+e/, "e");
  return String(Number(value.toPrecision(count)));
}

export const milliseconds = (value) => (value === undefined ? "–" : `${digits(value)} ms`);
