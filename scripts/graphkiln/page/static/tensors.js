// Tensors: a form from the signature, with the golden sample filled in, and what came back.

import * as api from "./api.js";
import { times } from "./answers.js";
import { $, digits, el, errorBox, facts } from "./dom.js";

const NUMBER = /^-?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i;
const MOST_ZEROS = 20_000;

let wantsTensors = false;

/** Shows the form that fits a version; one that takes images can be sent tensors, too. */
export function offerTensors(model, detail, tell) {
  const toggle = $("switch");
  const set = () => {
    const tensors = wantsTensors || !detail.kind;
    $("image-form").hidden = tensors;
    $("tensor-form").hidden = !tensors;
    toggle.hidden = !detail.kind;
    toggle.textContent = tensors ? "Send images instead" : "Send tensors instead";
    if (tensors) build(model, detail, tell);
  };
  toggle.onclick = () => {
    wantsTensors = !wantsTensors;
    set();
  };
  set();
}

async function build(model, detail, tell) {
  const place = $("tensor-form");
  const key = JSON.stringify([model.name, model.version, detail.inputs]);
  if (place.dataset.of === key) return;
  place.dataset.of = key;
  place.replaceChildren(el("p", { class: "busy faint" }, "reading the golden sample"));
  try {
    const { inputs } = await api.golden(model);
    if (place.dataset.of !== key) return;
    const fields = detail.inputs.map((input, at) => field(input, at, inputs[input.name]));
    const button = el("button", { type: "button", onclick: () => send(model, fields, button, tell) }, "Run");
    place.replaceChildren(...fields.map(({ element }) => element), button);
  } catch (error) {
    delete place.dataset.of;
    place.replaceChildren(errorBox(error));
  }
}

/** The field of an input: its shape, its values, and where these come from. */
function field(input, at, sample) {
  const shape = sample?.shape ?? input.shape.map((size) => Math.max(1, size));
  const count = shape.reduce((product, size) => product * size, 1);
  const isFixed = Boolean(sample) && sample.data === null;
  const shapeBox = el("input", { id: `shape-${at}`, value: shape.join(", "), disabled: isFixed, "aria-label": `Shape of ${input.name}`, spellcheck: "false" });
  const valueBox = el("textarea", { id: `values-${at}`, disabled: isFixed, spellcheck: "false" });
  valueBox.value = isFixed ? "" : startText(input, sample, count);
  valueBox.placeholder = "empty: zeros";
  if (isFixed) valueBox.placeholder = `${digits(count)} values of the golden sample, sent as they are`;
  const origin = sample ? "golden sample" : "there is no golden sample";
  const element = el("div", { class: "field" },
    el("label", { for: `values-${at}` }, input.name), el("p", { class: "small faint" }, `${input.datatype}, ${origin}`), shapeBox, valueBox);
  return { element, read: () => [input.name, isFixed ? '{"golden":true}' : row(input, shapeBox.value, valueBox.value)] };
}

function startText(input, sample, count) {
  if (sample) return input.datatype === "BYTES" ? JSON.stringify(sample.data) : sample.data.join(", ");
  if (count > MOST_ZEROS) return "";
  return input.datatype === "BYTES" ? JSON.stringify(Array(count).fill("text")) : Array(count).fill(0).join(", ");
}

/** A tensor as JSON; numbers stay the text that was typed, since large integers are no numbers of JavaScript. */
function row({ name, datatype }, shapeText, text) {
  const shape = shapeText.split(/[\s,x×]+/).filter(Boolean);
  if (!shape.every((size) => /^\d+$/.test(size))) throw new api.Failure(`${name}: the shape must be numbers, such as 1, 3`);
  if (!text.trim()) return `{"datatype":${JSON.stringify(datatype)},"shape":[${shape.map(Number)}]}`;
  const count = shape.reduce((product, size) => product * Number(size), 1);
  const data = datatype === "BYTES" ? texts(name, text) : values(name, datatype, text, count);
  return `{"datatype":${JSON.stringify(datatype)},"shape":[${shape.map(Number)}],"data":[${data}]}`;
}

function values(name, datatype, text, count) {
  const words = text.split(/[\s,;[\]]+/).filter(Boolean).map((word) => (datatype === "BOOL" ? word.toLowerCase() : word));
  const isGood = (word) => (datatype === "BOOL" ? /^(true|false|0|1)$/.test(word) : NUMBER.test(word));
  const bad = words.find((word) => !isGood(word));
  if (bad !== undefined) throw new api.Failure(`${name}: '${bad.slice(0, 40)}' is no ${datatype} value`, "separate values by commas or spaces");
  if (words.length !== count) throw new api.Failure(`${name}: ${digits(words.length)} values for a shape of ${digits(count)}`, "a point, no comma, goes before decimals");
  return words.map((word) => (datatype === "BOOL" ? word === "true" || word === "1" : plain(word))).join(",");
}

/** As JSON writes numbers: digits on both sides of the point, no zeros in front. */
function plain(word) {
  return /^-?(0|[1-9]\d*)(\.\d+)?(e[+-]?\d+)?$/i.test(word) ? word : String(Number(word));
}

function texts(name, text) {
  try {
    const list = JSON.parse(text);
    if (Array.isArray(list)) return JSON.stringify(list.flat(Infinity).map(String)).slice(1, -1);
  } catch {
    // told below
  }
  throw new api.Failure(`${name}: text is written as a JSON list, such as ["one", "two"]`);
}

async function send(model, fields, button, tell) {
  button.disabled = true;
  const title = el("h2", {}, model.name, el("span", { class: "faint" }, ` version ${model.version}, tensors`));
  try {
    const body = `{${fields.map(({ read }) => read()).map(([name, text]) => `${JSON.stringify(name)}:${text}`)}}`;
    const answer = await api.askTensors(model, body);
    tell(el("article", { class: "panel answer" }, title, el("div", { class: "outputs" }, Object.entries(answer.outputs).map(output)), times(answer.times)));
    $("said").textContent = `${model.name}: ${Object.keys(answer.outputs).length} outputs`;
  } catch (error) {
    tell(el("article", { class: "panel answer" }, title, errorBox(error)));
  } finally {
    button.disabled = false;
  }
}

function output([name, { datatype, shape, data, least, most, mean, ...golden }]) {
  const count = shape.reduce((product, size) => product * size, 1);
  const shown = data.map((value) => shownValue(value, datatype)).join(", ");
  return el("div", {}, facts([
    [el("b", {}, name), `${datatype} ${shape.join(" × ")}`],
    ["from, to", least === undefined ? "" : `${digits(least, 4)} to ${digits(most, 4)}, mean ${digits(mean, 4)}`],
    ["golden sample", agreement(golden)],
  ]), el("pre", { tabindex: "0", "aria-label": `Values of ${name}` }, shown + (count > data.length ? `, … (${digits(count)} in all)` : "")));
}

const shownValue = (value, datatype) => {
  if (value === null) return "not finite";
  if (typeof value === "number") return digits(value, 6);
  return datatype === "BYTES" ? JSON.stringify(value) : String(value);
};

/** What was computed beside what the saved graph computed, where the golden sample was sent as it is. */
function agreement({ golden_error: error, golden_limit: limit, golden_agrees: agrees }) {
  if (error === undefined) return null;
  const off = error === null ? "not finite" : `error ${digits(error)}`;
  if (agrees === null) return `${off} beside the saved graph`;
  const text = `${agrees ? "as" : "not as"} the saved graph computed it: ${off}, limit ${digits(limit)}`;
  return el("span", { class: `pill ${agrees ? "good" : "bad"}` }, text);
}
