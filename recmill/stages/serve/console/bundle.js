// What serves: versions, models, evaluation; and the way back to an older version.

import { ask, byId, bytes, count, dataTime, decimal, duration, fact, fill, make, notice, plainTable } from "./page.js";

let last = "", changed = () => {};

const date = (seconds) => (seconds == null ? "–" : new Date(seconds * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" }));
const card = (title, ...children) => make("div", { class: "card" }, make("h2", {}, title), ...children);

/** Show a status; parts of the page that are open stay open when nothing but time has passed. */
export function showBundle(status) {
  const now = JSON.stringify({ ...status, freshness_seconds: null });
  const facts = make("dl", { class: "facts" }, factsOf(status));
  if (now === last) return byId("bundle").querySelector(".facts").replaceWith(facts);
  last = now;
  const { manifest } = status;
  fill(byId("bundle"), facts, make("div", { class: "columns" }, versions(status), gate(manifest), evaluation(manifest), models(status, manifest)));
}

function factsOf(status) {
  const { manifest } = status;
  return [
    fact("Version", status.version, `made ${date(manifest.created_at)}`, "wide"),
    fact("Recipe", status.recipe, status.role === "all" ? "all stages in one server" : `role: ${status.role}`),
    fact("Items", count(status.num_items), `and ${count(status.num_users)} users`),
    fact("Size", bytes(manifest.num_bytes ?? 0), `on disk, rows as ${manifest.rows_dtype}`),
    fact("Data", dataTime(status).replace(/^(data (that is )?|a )/, ""), "its newest row"),
    fact("Deltas", count(status.deltas), "applied on top of this version"),
    fact("Up for", duration(Date.now() / 1000 - status.started_at), `since ${date(status.started_at)}`),
  ];
}

function versions(status) {
  const [canary, share] = (status.canary ?? "").split("=");
  const uses = (name) => [name === status.version && "current", name === status.previous && "previous", name === canary && `canary ${100 * share}%`].filter(Boolean);
  const row = (name) => make("tr", {},
    make("td", {}, make("span", { class: "mono" }, name), " ", uses(name).map((use) => make("span", { class: `tag ${use}` }, use))),
    make("td", { class: "number" }, name !== status.version && make("button", { type: "button", "aria-label": `Roll back to ${name}`, onclick: () => askRollback(name) }, "Roll back")));
  const names = [...new Set([status.version, status.previous, canary, ...status.versions].filter(Boolean))];
  return card("Versions", make("table", {}, make("tbody", {}, names.map(row))),
    names.length === 1 && make("p", { class: "soft small" }, "There is no other version to go back to yet."));
}

function gate(manifest) {
  const found = manifest.gate;
  if (!found) return card("Gate", make("p", { class: "soft" }, "This bundle was exported without a gate: no condition had to be met."));
  const { passed } = found;
  return card("Gate", notice(passed ? "" : "bad", passed ? "✓ All conditions are met." : "✕ Not all conditions are met."),
    make("table", {}, make("tbody", {}, found.verdicts.map((one) => make("tr", {}, make("td", {}, one.passed ? "✓" : "✕"),
      make("td", {}, `${one.model} ${one.condition}`), make("td", { class: "number" }, `found ${decimal(one.found)}`))))));
}

function evaluation(manifest) {
  const measured = Object.entries(manifest.evaluation ?? {});
  if (!measured.length) return card("Evaluation", make("p", { class: "soft" }, "No numbers: run `recmill evaluate` before `recmill export`."));
  return card("Evaluation", measured.map(([name, model]) => [
    make("h3", {}, name, make("span", { class: "soft" }, ` · ${model.split} rows, step ${count(model.step)}`)),
    plainTable(Object.fromEntries(Object.entries(model.metrics).filter(([metric]) => !metric.endsWith("_margin"))
      .map(([metric, value]) => [metric, margin(value, model.metrics[`${metric}_margin`])])))]));
}

const margin = (value, half) => (half == null ? decimal(value) : `${decimal(value)} ± ${decimal(half)}`);

function models(status, manifest) {
  return card("Models", Object.entries(manifest.models ?? {}).map(([name, model]) => [make("h3", {}, name), plainTable(model)]),
    make("h3", {}, "Recall channels"), make("p", {}, status.channels.map((name) => make("span", { class: "tag" }, name))));
}

// rolling back

function askRollback(version) {
  byId("rollback-question").textContent = `All answers will come from version ${version} at once. The current one stays on disk.`;
  byId("rollback-error").hidden = true;
  byId("rollback-yes").onclick = () => rollback(version);
  byId("rollback-dialog").showModal();
}

async function rollback(version) {
  byId("rollback-yes").disabled = true;
  try {
    changed(await ask("v1/rollback", { version }));
    byId("rollback-dialog").close();
  } catch (error) {
    byId("rollback-error").textContent = error.message;
    byId("rollback-error").hidden = false;
  } finally {
    byId("rollback-yes").disabled = false;
  }
}

/** `whenChanged` gets the status after a rollback. */
export function startBundle(whenChanged) { changed = whenChanged; }
