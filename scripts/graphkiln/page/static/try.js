// Trying a model: images that were dropped, pasted or chosen, and their answers, of one version or two side by side.

import * as api from "./api.js";
import { drawOn, isDrawn, show, summarize } from "./answers.js";
import { $, el, errorBox } from "./dom.js";
import { showSnippets } from "./snippets.js";
import { offerTensors } from "./tensors.js";

const AT_ONCE = 4;
const MOST_CARDS = 60;
const TINY = 64;

let versions = [];
let waiting = 0;
const queue = [];
/** Versions whose scores are no probabilities, as their first answer showed: they are asked for those. */
const logits = new Set();

export function setUpTry() {
  $("files").addEventListener("change", (event) => {
    take([...event.target.files]);
    event.target.value = "";
  });
  document.addEventListener("paste", (event) => take([...(event.clipboardData?.files ?? [])]));
  document.addEventListener("dragover", (event) => {
    event.preventDefault();
    document.body.classList.add("dragging");
  });
  document.addEventListener("dragleave", (event) => event.relatedTarget || document.body.classList.remove("dragging"));
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    document.body.classList.remove("dragging");
    take([...event.dataTransfer.files]);
  });
  $("ask").addEventListener("submit", (event) => event.preventDefault());
  $("model").addEventListener("change", () => choose());
  return { show: offer, setVisible: () => {} };
}

/** Offers the versions that are ready; what was chosen stays chosen. */
function offer(models) {
  const ready = models.filter((model) => model.state === "READY" && !model.name.endsWith(".images"));
  const same = JSON.stringify(ready.map(keyOf)) === JSON.stringify(versions.map(keyOf));
  versions = ready;
  if (same && $("model").options.length) return;
  const options = () => versions.map((model) => el("option", { value: keyOf(model) }, `${model.name}, version ${model.version}`));
  refill($("model"), options());
  refill($("other"), [el("option", { value: "" }, "nothing"), ...options()]);
  if (!$("results").children.length) $("results").append(empty());
  choose();
}

function refill(select, options) {
  const chosen = select.value;
  select.replaceChildren(...options);
  if ([...select.options].some((option) => option.value === chosen)) select.value = chosen;
}

const keyOf = (model) => `${model.name}/${model.version}`;
const chosenIn = (id) => versions.find((model) => keyOf(model) === $(id).value);

/** Shows what can be asked of the chosen version: images, tensors, programs. */
async function choose() {
  const model = chosenIn("model");
  if (!model) return;
  try {
    const detail = await api.describe(model);
    if (chosenIn("model") !== model) return;
    offerTensors(model, detail, (card) => prepend(card));
    showSnippets(model);
  } catch (error) {
    prepend(errorBox(error));
  }
}

function prepend(card) {
  $("results").querySelector(".empty")?.remove();
  $("results").prepend(card);
}

function empty() {
  return el("div", { class: "empty" }, el("p", { class: "big" }, "Nothing asked yet."),
    el("p", {}, "Drop an image anywhere on this page. It goes to the server that you run, and is kept nowhere."));
}

function take(files) {
  if (!files.length) return;
  const asked = [chosenIn("model"), chosenIn("other")].filter(Boolean);
  if (!asked.length) {
    prepend(errorBox(new api.Failure("no model is ready", "see Models")));
    return;
  }
  for (const file of files.slice(0, MOST_CARDS).reverse()) prepend(card(file, asked));
  for (const old of [...$("results").children].slice(MOST_CARDS)) old.remove();
}

/** A card of an image, with a place for the answer of each version. */
function card(file, asked) {
  const url = URL.createObjectURL(file);
  const picture = el("img", { src: url, alt: `The image ${file.name}` });
  const figure = el("span", { class: "shown" }, picture);
  picture.addEventListener("load", () => {
    if (Math.max(picture.naturalWidth, picture.naturalHeight) <= TINY) picture.classList.add("tiny");
    URL.revokeObjectURL(url);
  });
  picture.addEventListener("error", () => {
    figure.replaceChildren(el("span", { class: "visually-hidden" }, "No preview"));
    URL.revokeObjectURL(url);
  });
  const answers = el("div", { class: "answers" });
  const whole = el("article", { class: "panel card", "aria-label": file.name },
    el("figure", {}, figure, el("figcaption", {}, `${file.name} · ${size(file.size)}`)), answers);
  for (const model of asked) {
    const place = el("div", { class: "answer" }, title(model), el("p", { class: "busy faint" }, "asking the server"));
    answers.append(place);
    queue.push(() => fillIn(place, model, file, { whole, figure, drawn: asked.length === 1 }));
  }
  work();
  return whole;
}

const title = (model) => el("h2", {}, model.name, el("span", { class: "faint" }, ` version ${model.version}`));
const size = (bytes) => (bytes < 1024 ? `${bytes} B` : bytes < 1 << 20 ? `${Math.round(bytes / 1024)} KiB` : `${(bytes / (1 << 20)).toFixed(1)} MiB`);

function work() {
  while (waiting < AT_ONCE && queue.length) {
    waiting += 1;
    queue.shift()().finally(() => {
      waiting -= 1;
      work();
    });
  }
}

async function fillIn(place, model, file, { whole, figure, drawn }) {
  try {
    const { answer, softmax } = await askFor(model, file);
    place.replaceChildren(title(model), show(answer, softmax));
    if (isDrawn(answer)) overlay(answer, { whole, figure: drawn ? figure : copyOf(place, file), drawn });
    $("said").textContent = `${file.name}: ${summarize(answer, softmax)}`;
  } catch (error) {
    place.replaceChildren(title(model), errorBox(error));
  }
}

/** Asks; where the scores of a classifier are no probabilities, for these. */
async function askFor(model, file) {
  const top = Math.max(1, Math.min(1000, Math.floor(Number($("top").value)) || 5));
  const key = keyOf(model);
  let softmax = logits.has(key);
  let answer = await api.askImage(model, file, { top, softmax });
  if (!softmax && areLogits(answer)) {
    logits.add(key);
    softmax = true;
    answer = await api.askImage(model, file, { top, softmax });
  }
  const isShare = softmax || (answer.classifications ?? []).every(({ score }) => score !== null && score >= 0 && score <= 1);
  return { answer, softmax: isShare };
}

/** Scores outside of 0 to 1, of one output without positions: only there one softmax means something. */
function areLogits({ classifications = [] }) {
  if (classifications.some((row) => row.output || row.position)) return false;
  return classifications.some(({ score }) => score !== null && (score < 0 || score > 1));
}

function overlay(answer, { whole, figure, drawn }) {
  const canvas = el("canvas", { role: "img", "aria-label": `What was found: ${summarize(answer)}` });
  figure.append(canvas);
  drawOn(canvas, answer);
  if (drawn) whole.classList.add("large");
}

/** Another view of the image, where two versions found something in it. */
function copyOf(place, file) {
  const url = URL.createObjectURL(file);
  const picture = el("img", { src: url, alt: "", onload: () => URL.revokeObjectURL(url) });
  const figure = el("span", { class: "shown" }, picture);
  place.children[0].after(figure);
  return figure;
}
