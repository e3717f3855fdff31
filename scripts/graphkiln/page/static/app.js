// The page as a whole: its views, and the list of models that all of them use.

import * as api from "./api.js";
import { $ } from "./dom.js";
import { setUpModels } from "./models.js";
import { setUpTraffic } from "./traffic.js";
import { setUpTry } from "./try.js";

const REFRESH_MS = 5000;
const tabs = [...document.querySelectorAll("[role=tab]")];
const views = { "tab-try": setUpTry(() => choose(tabs[0])), "tab-models": setUpModels(refresh), "tab-traffic": setUpTraffic() };

let adminKey = "";
let rounds = 0;

/** Reads the list of models anew, and tells every view. */
async function refresh(key = adminKey) {
  const round = ++rounds;
  try {
    const { models, url } = await api.listModels(key);
    if (round !== rounds) return;
    adminKey = key;
    const versions = models.filter((model) => model.state === "READY").length;
    const refused = models.filter(isRefused).length;
    const ready = `${versions} version${versions === 1 ? "" : "s"} ready${refused ? `, ${refused} refused` : ""}`;
    say(`${ready} · ${new URL(url).host}`, refused ? "bad" : versions ? "good" : "");
    for (const view of Object.values(views)) view.show(models, url);
  } catch (error) {
    if (key !== adminKey) throw error;
    if (round === rounds) say(error.message, "bad");
  }
}

/** With the admin key, the server's own list names those that failed. */
const isRefused = ({ state }) => state === "REFUSED" || state === "UNAVAILABLE";

function say(text, kind) {
  const state = $("state");
  if (state.textContent !== text) state.textContent = text;
  state.className = `state ${kind}`;
}

function choose(tab, focus = false) {
  for (const each of tabs) {
    const chosen = each === tab;
    each.setAttribute("aria-selected", chosen);
    each.tabIndex = chosen ? 0 : -1;
    $(each.getAttribute("aria-controls")).hidden = !chosen;
    views[each.id].setVisible(chosen);
  }
  if (focus) tab.focus();
  history.replaceState(null, "", `#${tab.id.slice(4)}`);
}

for (const [at, tab] of tabs.entries()) {
  tab.addEventListener("click", () => choose(tab));
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const next = step ? tabs[(at + step + tabs.length) % tabs.length] : { Home: tabs[0], End: tabs.at(-1) }[event.key];
    if (next) {
      event.preventDefault();
      choose(next, true);
    }
  });
}

const named = $(`tab-${location.hash.slice(1)}`);
choose(tabs.includes(named) ? named : tabs[0]);
refresh();
setInterval(() => document.hidden || refresh(), REFRESH_MS);
