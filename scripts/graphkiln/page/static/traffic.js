// Live traffic: readings of the server's counters, and charts of their differences.

import * as api from "./api.js";
import { columns, lines } from "./charts.js";
import { $, el, errorBox } from "./dom.js";

const EVERY_MS = 2000;
const MOST_READINGS = 90;
const SUMS = ["answered", "failed", "samples", "batches", "request_us", "queue_us", "waiting"];

const readings = [];
let visible = false;
let reading = false;

export function setUpTraffic() {
  $("traffic-model").addEventListener("change", draw);
  setInterval(read, EVERY_MS);
  return { show: offer, setVisible: (shown) => { visible = shown; read(); } };
}

function offer(models) {
  const names = [...new Set(models.map((model) => `${model.name}/${model.version}`))];
  const select = $("traffic-model");
  if ([...select.options].slice(1).map((option) => option.value).join("\n") === names.join("\n")) return;
  const chosen = select.value;
  const options = names.map((name) => el("option", { value: name }, name.replace("/", ", version ")));
  select.replaceChildren(el("option", { value: "" }, "all models"), ...options);
  select.value = names.includes(chosen) ? chosen : "";
}

async function read() {
  if (!visible || document.hidden || reading) return;
  reading = true;
  try {
    const { versions } = await api.traffic();
    readings.push({ at: performance.now() / 1000, versions });
    if (readings.length > MOST_READINGS) readings.shift();
    draw();
  } catch (error) {
    $("charts").replaceChildren(errorBox(error));
  } finally {
    reading = false;
  }
}

/** The counters of what is chosen at a reading, added up; quantiles cannot be: the slowest version's are told. */
function chosenOf({ at, versions }, key) {
  const rows = versions.filter((row) => !key || `${row.model}/${row.version}` === key);
  const total = { at, sizes: {} };
  for (const name of SUMS) total[name] = rows.reduce((sum, row) => sum + (row[name] ?? 0), 0);
  for (const name of ["p50_us", "p99_us"]) {
    const known = rows.map((row) => row[name]).filter((value) => value !== undefined && value !== null);
    total[name] = known.length ? Math.max(...known) : null;
  }
  for (const { sizes } of rows) for (const [most, count] of Object.entries(sizes)) total.sizes[most] = (total.sizes[most] ?? 0) + count;
  return total;
}

/** What happened between two readings; a server that was started again counts from 0, which is no difference. */
function between(before, now) {
  const seconds = now.at - before.at;
  const added = Object.fromEntries(SUMS.map((name) => [name, now[name] - before[name]]));
  if (added.answered < 0 || seconds <= 0) return {};
  return {
    rate: added.answered / seconds,
    errors: added.failed / seconds,
    mean: added.answered ? added.request_us / added.answered / 1000 : null,
    batch: added.batches ? added.samples / added.batches : null,
    queued: added.queue_us / seconds / 1e6,
    p50: added.answered && now.p50_us !== null ? now.p50_us / 1000 : null,
    p99: added.answered && now.p99_us !== null ? now.p99_us / 1000 : null,
  };
}

function draw() {
  if (readings.length < 2) {
    $("charts").replaceChildren(el("p", { class: "busy faint" }, "watching the server: the first figures need two readings"));
    return;
  }
  const seen = readings.map((reading) => chosenOf(reading, $("traffic-model").value));
  const now = seen.at(-1);
  const steps = seen.slice(1).map((next, at) => between(seen[at], next));
  const times = seen.slice(1).map(({ at }) => now.at - at);
  const of = (name) => steps.map((step) => step[name] ?? null);
  const one = (name, key) => [{ name, values: of(key) }];
  const latencies = now.p99_us === null ? one("mean", "mean") : [{ name: "p50", values: of("p50") }, { name: "p99", values: of("p99") }];
  const note = now.p99_us === null ? "Quantiles need --metrics-config=summary_latencies=true." : "";
  replaceKeeping($("charts"), [
    lines("Rate", "requests/s", times, one("requests/s", "rate")),
    lines("Latency", "ms", times, latencies, note),
    lines("Batch size", "rows", times, one("rows", "batch")),
    columns("Batches so far", "batches", buckets(now.sizes)),
    lines("Waiting", "requests", times, one("requests", "queued"), "On average over two seconds."),
    lines("Errors", "requests/s", times, one("requests/s", "errors")),
  ]);
}

/** Batches by their number of rows, from counts of those with at most so many. */
function buckets(sizes) {
  const limits = Object.keys(sizes).sort((one, other) => bound(one) - bound(other));
  const all = limits.map((most, at) => [name(limits, at), sizes[most] - (at ? sizes[limits[at - 1]] : 0)]);
  const used = all.findLastIndex(([, count]) => count > 0);
  return all.slice(0, used + 1);
}

const bound = (text) => (text === "+Inf" ? Infinity : Number(text));

function name(limits, at) {
  const most = bound(limits[at]);
  const least = at ? bound(limits[at - 1]) + 1 : 1;
  return most === Infinity ? `≥ ${least}` : least >= most ? String(most) : `${least}–${most}`;
}

/** New charts in the place of the old ones; tables that are open stay open, and keep the focus. */
function replaceKeeping(place, charts) {
  const old = [...place.querySelectorAll(".chart")];
  for (const [at, chart] of charts.entries()) {
    const before = old[at];
    if (!before?.querySelector("details").open) continue;
    if (before.contains(document.activeElement)) return;
    chart.querySelector("details").open = true;
  }
  const focused = old.findIndex((chart) => chart.contains(document.activeElement));
  place.replaceChildren(...charts);
  if (focused >= 0) charts[focused].querySelector("summary").focus();
}
