// The models: their state, what proves them, their labels; loading and unloading with the admin key.

import * as api from "./api.js";
import { $, digits, el, errorBox, facts, milliseconds, table } from "./dom.js";

let rows = [];
let chosen = "";
let described = "";
let drawn = "";
let refresh;

export function setUpModels(readAgain) {
  refresh = readAgain;
  $("admin").addEventListener("submit", (event) => {
    event.preventDefault();
    attempt(() => refresh($("key").value));
  });
  $("key").addEventListener("input", () => draw(true));
  $("filter").addEventListener("input", () => draw());
  return { show: (models) => { rows = models; draw(); follow(); drawRollout(); }, setVisible: () => {} };
}

const keyOf = (model) => `${model.name}/${model.version}`;
/** Changes when a version is loaded again, or is there no more. */
const stateOf = (row) => JSON.stringify(row ? [row.state, row.reason, row.load_s] : null);

/** What is described is what is there now. */
function follow() {
  const row = rows.find((each) => keyOf(each) === chosen);
  if (!chosen || described === stateOf(row)) return;
  if (row) choose(row);
  else {
    described = stateOf(row);
    $("model-detail").replaceChildren(el("p", { class: "faint" }, `${chosen.replace("/", ", version ")} is not loaded any more.`));
  }
}

/** Draws the list where it changed: whoever tabs through it keeps his place. */
function draw(anyway = false) {
  const wanted = $("filter").value.trim().toLowerCase();
  const shown = rows.filter((row) => row.name.toLowerCase().includes(wanted));
  const now = JSON.stringify([rows.length, shown.map((row) => [keyOf(row), row.state, row.reason, row.engine, row.precision, row.backend, row.proven]), chosen]);
  if (now === drawn && !anyway) return;
  drawn = now;
  const list = shown.map((row) => [
    el("button", { type: "button", "data-control": `show ${keyOf(row)}`, "aria-pressed": chosen === keyOf(row), onclick: () => choose(row) }, row.name),
    row.version || "–", state(row), backend(row) ?? (row.engine ? `${row.engine}, ${row.device}` : "–"), row.precision || "–", buttons(row),
  ]);
  const count = shown.length === rows.length ? "" : `: ${shown.length} of ${rows.length}`;
  const made = table(`What the server has${count}`, ["model", "version", "state", "engine", "precision", "control"], list);
  for (const [at, line] of [...made.tBodies[0].rows].entries()) line.classList.toggle("chosen", keyOf(shown[at]) === chosen);
  const focused = document.activeElement?.dataset.control;
  $("models").replaceChildren(shown.length ? made : el("p", { class: "empty" }, rows.length ? "No name has that in it." : "No model is loaded."));
  if (focused) [...$("models").querySelectorAll("button")].find((button) => button.dataset.control === focused)?.focus();
}

function state({ state: name, reason }) {
  const kind = name === "READY" ? "good" : ["REFUSED", "UNAVAILABLE"].includes(name) ? "bad" : "";
  return [el("span", { class: `pill ${kind}` }, name.toLowerCase()), reason ? el("div", { class: "small faint reason" }, reason) : null];
}

/** Who computes a version without instances of ours, and whether its golden samples were right there. */
function backend({ engine, backend: name, seat, proven }) {
  if ((engine && seat !== "native") || !name) return null;
  return [`${name}${seat ? `, ${seat} seat` : ""} `, el("span", { class: `pill ${proven ? "good" : ""}` }, proven ? "proven" : "unproven")];
}

function buttons(row) {
  const verbs = row.state === "READY" ? ["load", "unload"] : ["load"];
  return verbs.map((verb) => el("button", {
    type: "button", class: "quiet", disabled: !$("key").value, "data-control": `${verb} ${keyOf(row)}`, "aria-label": `${verb} ${row.name}`,
    onclick: () => attempt(async () => {
      await api.control(row.name, verb, $("key").value);
      await refresh($("key").value);
    }, `${row.name}: ${verb} was requested.`),
  }, verb === "load" && row.state === "READY" ? "reload" : verb));
}

async function attempt(action, done = "") {
  const place = $("admin-said");
  place.replaceChildren(el("p", { class: "busy faint" }, "asking the server"));
  try {
    await action();
    place.replaceChildren(done ? el("p", { class: "faint" }, done) : "");
  } catch (error) {
    place.replaceChildren(errorBox(error));
  }
}

async function choose(row) {
  chosen = keyOf(row);
  described = stateOf(row);
  draw();
  const place = $("model-detail");
  if (row.state !== "READY") {
    const told = [row.reason, row.version ? "" : "No version of it was ever loaded."].filter(Boolean).join(" ");
    place.replaceChildren(el("h2", {}, row.name), el("p", {}, state(row)[0]), el("p", { class: "faint" }, told || "It is not loaded."));
    return;
  }
  place.replaceChildren(el("p", { class: "busy faint" }, "reading"));
  try {
    const detail = await api.describe(row);
    if (chosen === keyOf(row)) {
      place.replaceChildren(...describe(detail));
      drawRollout();
    }
  } catch (error) {
    if (chosen === keyOf(row)) place.replaceChildren(el("h2", {}, row.name), errorBox(error));
  }
}

function describe(detail) {
  return [
    el("h2", {}, detail.name, el("span", { class: "faint" }, ` version ${detail.version}`)),
    facts([
      ["answers", detail.kind || "tensors"], ["engine", detail.engine && `${detail.engine} on ${detail.device}`],
      ["backend", backend(detail)], ["precision", detail.precision], ["instances", detail.instances ? String(detail.instances) : ""],
      ["largest batch", String(detail.max_batch_size)], ["loaded in", detail.load_s && `${digits(detail.load_s)} s`],
      ["images as they are", detail.image_model], ["takes images for", detail.tensor_model],
    ]),
    el("div", { id: "rollout" }),
    el("h3", {}, "Signature"), signature(detail),
    el("h3", {}, "Proof"), ...proof(detail),
    ...(detail.preprocess ? [el("h3", {}, "Preprocessing"), facts(Object.entries(detail.preprocess).map(pair))] : []),
    ...(detail.labels.length ? [el("h3", {}, `${detail.labels.length} labels`), labels(detail.labels)] : []),
  ];
}

/** Draws the rollout of the chosen model where its figures changed. */
function drawRollout() {
  const place = $("rollout");
  const told = rows.find((row) => keyOf(row) === chosen)?.rollout;
  const now = JSON.stringify(told ?? null);
  if (!place || place.dataset.drawn === now) return;
  place.dataset.drawn = now;
  place.replaceChildren(...(told ? rollout(told) : []));
}

const percent = (share) => (share === undefined ? "–" : `${digits(100 * share, 4)}%`);

function rollout(told) {
  const { phase, version, serving, share, compared = 0, disagreed = 0, undecided = 0, failed = 0, dropped = 0, latency } = told;
  const line = {
    loading: `Version ${version} is being proven and loaded.`,
    shadow: `Version ${version} is compared with version ${serving} on ${percent(share)} of the requests.`,
    traffic: `Version ${version} answers ${percent(share)} of the requests, version ${serving} the others.`,
    promoted: `Version ${version} was promoted and answers all requests.`,
    aborted: `Version ${version} was aborted${told.by === "server" ? " by the server" : ""}, version ${serving} answers all requests.`,
  }[phase];
  const kind = phase === "aborted" ? "bad" : phase === "promoted" ? "good" : "";
  const time = (role, quantile) => milliseconds(latency[role]?.[quantile]);
  const decided = compared - undecided;
  const counts = [
    ["compared", compared], ["same decision", decided ? percent(1 - disagreed / decided) : "–"],
    ["… at least", percent(told.lower)], ["… at most", percent(told.upper)], ["other decision", disagreed],
    ["answered", told.answered || ""], ["failed", failed], ["copies dropped", dropped],
    [`p50 of version ${serving}`, time("serving", "0.5")], [`p50 of version ${version}`, time("candidate", "0.5")],
    [`p99 of version ${serving}`, time("serving", "0.99")], [`p99 of version ${version}`, time("candidate", "0.99")],
  ];
  const cells = counts.filter(([, value]) => value !== "").map(([name, value]) => [name, typeof value === "number" ? digits(value) : value]);
  return [
    el("h3", {}, "Rollout"), el("p", {}, el("span", { class: `pill ${kind}` }, phase), ` ${line ?? ""}`),
    table("", ["since its last change", ">value"], cells),
  ];
}

const pair = ([name, value]) => [name, value === null || value.length === 0 ? "" : typeof value === "object" ? JSON.stringify(value) : String(value)];

function signature({ inputs, outputs }) {
  const line = (role) => (row) => [row.name, role, row.datatype, row.shape.map((size) => (size < 0 ? "any" : size)).join(" × ")];
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Signature" },
    table("", ["tensor", "role", "type", "shape"], [...inputs.map(line("input")), ...outputs.map(line("output"))]));
}

function proof({ proof: proven, proof_problem: problem, ...placed }) {
  const selfTest = placed.self_test_at_s
    ? `error ${digits(placed.self_test_error)}, last right ${new Date(placed.self_test_at_s * 1000).toLocaleTimeString()}, ` +
      `${placed.self_test_failures ?? 0} of ${placed.self_test_replays ?? 0} replays failed`
    : "";
  const tested = [["self-test", selfTest]];
  const always = [facts(tested)];
  if (problem) return [errorBox({ message: problem }), ...always];
  if (!proven) return [el("p", { class: "faint" }, "None: this graph came without a manifest."), ...always];
  return [
    ...proven.verification.map(verdict),
    facts([
      ...tested,
      ["source", proven.provenance.source], ["measured", measured(proven.provenance.metrics)],
      ["graph", el("code", {}, proven.sha256)], ["manifest", el("code", {}, proven.digest)],
      ["made with", Object.entries(proven.provenance.versions).map(([name, version]) => `${name} ${version}`).join(", ")],
      ["notes", (proven.notes ?? []).join("; ")],
    ]),
  ];
}

const measured = (metrics) => Object.entries(metrics).map(([name, value]) => `${name.replaceAll("_", " ")} ${digits(value, 4)}`).join(", ");

/** The line as the proof wrote it: errors with their limits, and how far what is read from the outputs agrees. */
function verdict({ verdict: line }) {
  const passed = line.endsWith(" - PASS");
  return el("p", { class: "verdict" }, el("span", { class: `pill ${passed ? "good" : "bad"}` }, passed ? "proven" : "failed"),
    ` ${line.replace(/ - [A-Z]+$/, "")}`);
}

function labels(names) {
  return el("ol", { class: "labels", start: "0", tabindex: "0", "aria-label": "Labels" }, names.map((name) => el("li", {}, name)));
}
