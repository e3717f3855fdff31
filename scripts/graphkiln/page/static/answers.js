// An answer as people read it: bars, boxes, masks, a vector, and where the time went.

import { el, digits, milliseconds, table } from "./dom.js";
import { color, draw } from "./overlay.js";

const SEEN = { detection: "detections", segmentation: "segments" };

/** Whether an answer is something in the image, to be drawn on it. */
export const isDrawn = (answer) => answer.kind in SEEN;

/** Draws what was found onto the canvas over an image. */
export function drawOn(canvas, answer) {
  draw(canvas, answer);
}

/** The answer without its drawing. */
export function show(answer) {
  return el("div", {}, SHOW[answer.kind](answer), times(answer.times));
}

/** The answer in a few words, for who hears it. */
export function summarize(answer) {
  const found = answer[SEEN[answer.kind]];
  if (found) return `${found.length} found${found.length ? `: ${found.slice(0, 3).map(nameOf).join(", ")}` : ""}`;
  const best = answer.classifications && answer.classifications[0];
  return best ? `${nameOf(best)}, ${figure(best.score, answer.are_shares)}` : `${answer.features} features`;
}

const nameOf = (row) => row.label || `class ${row.index}`;
const figure = (score, isShare) => (isShare ? `${(score * 100).toFixed(1)}%` : digits(score, 4));

function classes({ classifications, are_shares: isShare }) {
  const scores = classifications.map((row) => row.score ?? 0);
  const most = isShare ? 1 : Math.max(...scores.map(Math.abs), 1e-12);
  const rows = classifications.map((row) => bar(prefixed(row), row.score, isShare, most));
  const head = el("thead", { class: "visually-hidden" }, el("tr", {}, ["class", "bar", "score"].map((name) => el("th", { scope: "col" }, name))));
  const widths = el("colgroup", {}, el("col", { class: "name" }), el("col"), el("col", { class: "score" }));
  return scrolled(el("table", { class: "bars" }, widths, head, el("tbody", {}, rows)), rows.length);
}

function prefixed(row) {
  const place = [row.output, row.position && `at ${row.position.join(", ")}`].filter(Boolean).join(" ");
  return place ? `${place}: ${nameOf(row)}` : nameOf(row);
}

function bar(name, score, isShare, most) {
  const fill = el("div", { class: "fill" });
  fill.style.width = `${Math.max(0, Math.min(1, (score ?? 0) / most)) * 100}%`;
  return el("tr", {},
    el("th", { scope: "row" }, name), el("td", {}, el("div", { class: "track", "aria-hidden": "true" }, fill)),
    el("td", { class: "n" }, score === null ? "not finite" : figure(score, isShare)));
}

function scrolled(content, rows) {
  return rows > 12 ? el("div", { class: "tall", tabindex: "0", role: "region", "aria-label": "All classes" }, content) : content;
}

function detections({ detections: found }) {
  if (!found.length) return el("p", { class: "faint" }, "Nothing was found.");
  const rows = found.map((row, at) => [swatched(nameOf(row), at), digits(row.score), row.box.map((edge) => edge.toFixed(0)).join(", ")]);
  return scrolled(table(`${found.length} found`, ["class", ">score", ">x1, y1, x2, y2"], rows), rows.length);
}

function segments({ segments: found }) {
  const rows = found.map((row) => [swatched(nameOf(row), row.index), `${(row.share * 100).toFixed(1)}%`]);
  return scrolled(table("of the image", ["class", ">share"], rows), rows.length);
}

function swatched(name, at) {
  const square = el("span", { class: "swatch" });
  square.style.background = color(at);
  return [square, name];
}

function vector({ vector: values, features, norm }) {
  const shown = values.map((value) => digits(value)).join(", ");
  const more = features > values.length ? ", …" : "";
  return el("div", {}, el("p", {}, `${features} features of length ${digits(norm)}`), el("pre", { class: "scroll small", tabindex: "0" }, shown + more));
}

const SHOW = { classification: classes, detection: detections, segmentation: segments, embedding: vector };

/** A bar of where the time went, and its figures. */
export function times({ decode_ms: decode, queue_ms: queue, compute_ms: compute, total_ms: total, requests = 1 }) {
  const known = queue !== undefined;
  const rest = Math.max(0, total - (decode ?? 0) - (queue ?? 0) - (compute ?? 0));
  const parts = [
    ...(decode === undefined ? [] : [["decode", decode, "t1"]]),
    [known ? "prepare and send" : "prepare, send, compute", rest, "t2"],
    ...(known ? [["queue", queue, "t3"], ["compute", compute, "t4"]] : []),
  ];
  const stack = el("div", { class: "stack", "aria-hidden": "true" }, parts.map(([, value, kind]) => {
    const part = el("span", { class: kind });
    part.style.flexGrow = String(Math.max(value, 0) / Math.max(total, 1e-9));
    return part;
  }));
  const rows = parts.map(([name, value, kind]) =>
    el("div", {}, el("dt", {}, el("span", { class: `swatch ${kind}` }), ` ${name}`), el("dd", {}, milliseconds(value))));
  rows.push(el("div", {}, el("dt", {}, "together"), el("dd", {}, milliseconds(total))));
  const note = requests > 1 ? el("p", { class: "faint small" }, `Queue and compute: the mean of ${requests} requests that were answered meanwhile.`) : null;
  return el("div", { class: "times" }, stack, el("dl", { "aria-label": "Where the time went" }, rows), note);
}
