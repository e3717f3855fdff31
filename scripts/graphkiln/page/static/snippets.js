// Programs that send the same request, to copy.

import * as api from "./api.js";
import { $, el, errorBox } from "./dom.js";

const STREAMED = "There is none: this model answers in a stream, which start_stream of tritonclient.grpc opens.";

let asked = 0;

/** Fills the panel with the programs of a version. */
export async function showSnippets(model) {
  const place = $("snippets");
  const round = ++asked;
  const kept = place.querySelector("summary");
  try {
    const { snippets } = await api.snippets(model);
    const programs = Object.entries(snippets).flatMap(program);
    if (round === asked) place.replaceChildren(kept, ...(programs.length ? programs : [el("p", { class: "faint" }, STREAMED)]));
  } catch (error) {
    if (round === asked) place.replaceChildren(kept, errorBox(error));
  }
  place.hidden = false;
}

function program([language, text]) {
  const shown = el("pre", { tabindex: "0", "aria-label": `${language} program`, "data-language": language }, text);
  const button = el("button", { type: "button", class: "quiet", "aria-label": `Copy the ${language} program`, onclick: () => copy(button, shown, language) }, "Copy");
  return [el("div", { class: "snippet" }, el("h3", {}, language), button), shown];
}

/** Copies; where the browser does not let us (a page without TLS at another machine), the text is selected. */
async function copy(button, shown, language) {
  try {
    await navigator.clipboard.writeText(shown.textContent);
    button.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(shown);
    button.textContent = "Selected";
  }
  $("said").textContent = `${language}: ${button.textContent.toLowerCase()}`;
  setTimeout(() => { button.textContent = "Copy"; }, 2000);
}
