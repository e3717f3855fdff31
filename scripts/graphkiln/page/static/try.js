// Trying a model: images that were dropped, pasted or chosen, and their answers, of one version or two side by side.

import * as api from "./api.js";
import { drawOn, isDrawn, show, summarize } from "./answers.js";
import { $, el, errorBox } from "./dom.js";
import { showSnippets } from "./snippets.js";
import { offerTensors } from "./tensors.js";

const AT_ONCE = 4;
const MOST_DESCRIBED = 20;
const MOST_CARDS = 60;
const TINY = 64;

let versions = [];
let waiting = 0;
let comeHere;
const queue = [];

/** Sets the view up; `shown` brings it to the front, wherever an image was dropped. */
export function setUpTry(shown) {
  comeHere = shown;
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
    takeDropped(event.dataTransfer);
  });
  $("ask").addEventListener("submit", (event) => event.preventDefault());
  for (const id of ["model", "other"]) $(id).addEventListener("change", () => delete $(id).dataset.lost);
  $("model").addEventListener("change", () => choose());
  return { show: offer, setVisible: () => {} };
}

/** Offers the versions that are ready. What was chosen stays chosen; where it is gone, none is, until it is back. */
function offer(models) {
  const names = new Set(models.map((model) => model.name));
  const isImageModel = ({ name }) => name.endsWith(".images") && names.has(name.slice(0, -".images".length));
  const ready = models.filter((model) => model.state === "READY" && !isImageModel(model));
  const same = JSON.stringify(ready.map(loadOf)) === JSON.stringify(versions.map(loadOf));
  versions = ready;
  if (same && $("model").options.length) return;
  const options = () => versions.map((model) => el("option", { value: keyOf(model) }, `${model.name}, version ${model.version}`));
  refill($("model"), options());
  refill($("other"), [el("option", { value: "" }, "nothing"), ...options()]);
  if (!$("results").children.length) {
    $("results").append(empty());
    preferImages();
  }
  choose();
}

/** The page opens on a version that takes images, if one of the first does, unless another was chosen meanwhile. */
async function preferImages() {
  const first = $("model").value;
  for (const model of versions.slice(0, MOST_DESCRIBED)) {
    const detail = await api.describe(model).catch(() => ({}));
    if ($("model").value !== first) return;
    if (!detail.kind) continue;
    $("model").value = keyOf(model);
    if (keyOf(model) !== first) choose();
    return;
  }
}

/** Another version must never answer unasked: in the place of a chosen one that is gone stands that it is gone. */
function refill(select, options) {
  const wanted = select.dataset.lost || select.value;
  select.replaceChildren(...options);
  delete select.dataset.lost;
  if (options.some((option) => option.value === wanted)) select.value = wanted;
  else if (wanted) {
    select.dataset.lost = wanted;
    select.prepend(el("option", { value: "", disabled: true }, `${wanted.replace(/\/(?=[^/]*$)/, ", version ")} is not ready`));
    select.selectedIndex = 0;
  }
}

const keyOf = (model) => `${model.name}/${model.version}`;
/** Changes when a version is loaded again: it may be another one by then. */
const loadOf = (model) => [model.name, model.version, model.load_s];
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

/** What was dropped: browsers hand a folder on as a file that cannot be read. */
function takeDropped({ items, files }) {
  const entries = [...items].map((item) => item.webkitGetAsEntry?.());
  const folders = entries.filter((entry) => entry?.isDirectory).map((entry) => entry.name);
  take([...files].filter((file) => !folders.includes(file.name)));
  if (folders.length) comeHere();
  for (const name of folders) prepend(errorBox(new api.Failure(`${name} is a folder`, "drop the images that lie in it")));
}

function take(files) {
  if (!files.length) return;
  comeHere();
  const asked = [chosenIn("model"), chosenIn("other")].filter(Boolean);
  if (!chosenIn("model")) {
    const isLost = Boolean($("model").dataset.lost);
    prepend(errorBox(isLost ? new api.Failure("the chosen model is not ready", "choose another one") : new api.Failure("no model is ready", "see Models")));
    return;
  }
  for (const file of files.slice(0, MOST_CARDS).reverse()) prepend(card(file, asked));
  for (const old of [...$("results").children].slice(MOST_CARDS)) old.remove();
  if (files.length > MOST_CARDS) {
    prepend(errorBox(new api.Failure(`of ${files.length} images the first ${MOST_CARDS} were asked`, "graphkiln classify takes any number")));
  }
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
    const top = Math.max(1, Math.min(1000, Math.floor(Number($("top").value)) || 5));
    const answer = await api.askImage(model, file, top);
    place.replaceChildren(title(model), show(answer));
    if (isDrawn(answer)) overlay(answer, { whole, figure: drawn ? figure : copyOf(place, file), drawn });
    $("said").textContent = `${file.name}: ${summarize(answer)}`;
  } catch (error) {
    place.replaceChildren(title(model), errorBox(error));
  }
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
