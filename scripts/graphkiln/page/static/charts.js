// Small line and column charts, each with the table of its figures.

import { digits, el, svg, table } from "./dom.js";

const WIDTH = 420;
const HEIGHT = 130;
const BOTTOM = 18;
const RIGHT = 46;
const MOST_ROWS = 30;

/** A chart in a panel. `series` are names with values by time; `times` are seconds before now, the last one is 0. */
export function lines(title, unit, times, series, note = "") {
  const most = nice(Math.max(0, ...series.flatMap(({ values }) => values.filter(isKnown))));
  const x = (at) => (WIDTH - RIGHT) * (times.length < 2 ? 1 : at / (times.length - 1));
  const y = (value) => (HEIGHT - BOTTOM) * (1 - value / most) + 4;
  const drawn = series.map(({ values }, at) => [
    at === 0 && svg("path", { class: "area", d: area(values, x, y) }),
    svg("path", { class: at ? "line second" : "line", d: path(values, x, y) }),
  ]);
  const began = times.length ? `${Math.round(times[0])} s ago` : "";
  const last = series.map(({ name, values }) => `${series.length > 1 ? `${name} ` : ""}${figure(values.at(-1))}`).join(", ");
  const picture = frame(`${title}: now ${last} ${unit}`, most, drawn, [began, "now"]);
  const rows = times.map((time, at) => [`${Math.round(time)} s ago`, ...series.map(({ values }) => figure(values[at]))]);
  const figures = table(`${title}, ${unit}`, ["when", ...series.map(({ name }) => `>${name}`)], rows.slice(-MOST_ROWS).reverse());
  return panel(title, `${last} ${unit}`, picture, figures, series.length > 1 ? legend(series) : null, note);
}

/** A chart of columns: pairs of a name and a value. */
export function columns(title, unit, pairs, note = "") {
  const most = nice(Math.max(0, ...pairs.map(([, value]) => value)));
  const step = (WIDTH - RIGHT) / Math.max(1, pairs.length);
  const drawn = pairs.map(([name, value], at) => {
    const height = ((HEIGHT - BOTTOM) * value) / most;
    return [
      svg("rect", { class: "bar", x: at * step + step * 0.15, y: HEIGHT - BOTTOM + 4 - height, width: step * 0.7, height, rx: 2 }),
      svg("text", { x: (at + 0.5) * step, y: HEIGHT + 4, "text-anchor": "middle" }, name),
    ];
  });
  const picture = frame(`${title}: ${pairs.map(([name, value]) => `${name}: ${figure(value)}`).join(", ") || "nothing yet"}`, most, drawn, []);
  const figures = table(title, ["rows", `>${unit}`], pairs.map(([name, value]) => [name, figure(value)]));
  return panel(title, "", picture, figures, null, note);
}

const isKnown = (value) => value !== null && value !== undefined;
const figure = (value) => (isKnown(value) ? digits(value) : "–");

function frame(label, most, drawn, ends) {
  const grid = [0, 0.5, 1].map((share) => {
    const y = (HEIGHT - BOTTOM) * (1 - share) + 4;
    return [svg("line", { class: "grid", x1: 0, x2: WIDTH - RIGHT, y1: y, y2: y }),
      svg("text", { x: WIDTH - RIGHT + 6, y: y + 4 }, digits(share * most, 2))];
  });
  const marks = ends.map((text, at) => svg("text", { x: at ? WIDTH - RIGHT : 0, y: HEIGHT + 4, "text-anchor": at ? "end" : "start" }, text));
  return svg("svg", { viewBox: `0 -6 ${WIDTH} ${HEIGHT + 16}`, role: "img", "aria-label": label }, grid, drawn.flat(), marks);
}

function path(values, x, y) {
  let open = false;
  return values.map((value, at) => {
    if (!isKnown(value)) {
      open = false;
      return "";
    }
    const command = open ? "L" : "M";
    open = true;
    return `${command}${x(at).toFixed(1)} ${y(value).toFixed(1)}`;
  }).join("");
}

/** Between the line and the axis, where every value is known. */
function area(values, x, y) {
  const first = values.findIndex(isKnown);
  if (first < 0 || values.slice(first).some((value) => !isKnown(value))) return "";
  const begin = x(first).toFixed(1);
  return `${path(values, x, y)}L${x(values.length - 1).toFixed(1)} ${y(0).toFixed(1)}L${begin} ${y(0).toFixed(1)}Z`;
}

/** The next of 1, 2, 5, 10, ... */
function nice(most) {
  if (most <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(most));
  return [1, 2, 5, 10].find((step) => step * power >= most) * power;
}

function legend(series) {
  return el("div", { class: "legend" }, series.map(({ name }, at) => el("span", {}, el("span", { class: `swatch ${at ? "t1" : "t4"}` }), name)));
}

function panel(title, now, picture, figures, key, note) {
  return el("article", { class: "panel chart", "data-title": title },
    el("h2", {}, title, el("span", { class: "now" }, now)), key, picture, note && el("p", { class: "faint small" }, note),
    el("details", {}, el("summary", {}, "Figures"), el("div", { class: "scroll tall", tabindex: "0", role: "region", "aria-label": `${title}: figures` }, figures)));
}
