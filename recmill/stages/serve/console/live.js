// Rate, latency and trouble of the last two minutes, once a second.

import { ask, byId, count, decimal, fact, fill, make, milliseconds, notice, on, stageBar } from "./page.js";
import { Chart } from "./charts.js";

const percent = (value) => (value == null ? "–" : `${decimal(value, value < 1 ? 2 : 1)}%`);
const charts = [
  new Chart("Requests per second", [["rate", "s0", "requests"]], (value) => (value == null ? "–" : decimal(value, 1)), "", 4),
  new Chart("Latency", [["p50", "s0", "p50_ms"], ["p99", "s1", "p99_ms"]], milliseconds, " ms", 1),
  new Chart("Share of requests", [["errors", "s1", "errors_share"], ["refused", "s2", "refused_share"], ["degraded", "s3", "degraded_share"]], percent, "%", 4),
];
let timer = null, paused = false;

const sum = (values) => values.reduce((total, value) => total + value, 0);
const mean = (values) => { const known = values.filter((value) => value != null); return known.length ? sum(known) / known.length : null; };

function show(data) {
  for (const kind of ["errors", "refused", "degraded"]) {
    data[`${kind}_share`] = data[kind].map((value, at) => (data.requests[at] ? (100 * value) / data.requests[at] : null));
  }
  const requests = sum(data.requests), lately = (values) => values.slice(-10);
  fill(byId("live-facts"),
    fact("Rate", decimal(sum(lately(data.requests)) / 10, 1), "requests/s, last 10 s"),
    fact("p50", milliseconds(mean(lately(data.p50_ms))), "last 10 s"),
    fact("p99", milliseconds(mean(lately(data.p99_ms))), "last 10 s"),
    ...["errors", "refused", "degraded"].map((kind) => fact(kind[0].toUpperCase() + kind.slice(1), count(sum(data[kind])), `of ${count(requests)} in 2 minutes`)));
  for (const chart of charts) chart.draw(data);
  const stages = Object.fromEntries(Object.entries(data.stages_ms).map(([name, values]) => [name, mean(lately(values))]).filter(([, value]) => value != null));
  fill(byId("live-stages"), Object.keys(stages).length > 0 && [make("h3", {}, "Mean time of each stage, last 10 s"), stageBar(stages, "Mean time of each stage")]);
  fill(byId("live-notes"), !requests && notice("", "Nobody has asked anything in the last two minutes."));
}

async function tick() {
  if (paused || document.hidden) return;
  try {
    show(await ask("v1/live"));
  } catch (error) {
    fill(byId("live-notes"), error.status > 0 && notice("bad", error.message));
  }
}

export function togglePause() {
  paused = !paused;
  byId("pause").textContent = paused ? "Go on" : "Pause";
  byId("pause").setAttribute("aria-pressed", String(paused));
}

export function startLive() {
  if (!byId("charts").children.length) {
    fill(byId("charts"), charts.map((chart) => chart.figure));
    on("pause", "click", togglePause);
  }
  stopLive();
  timer = setInterval(tick, 1000);
  tick();
}

export function stopLive() {
  clearInterval(timer);
}
