// What every view needs: making elements, writing numbers, asking the server.
// Whatever comes from users or the server goes into the page as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "rect", "path", "line", "circle", "text", "title", "g"]);

export const byId = (id) => document.getElementById(id);
export const on = (id, event, listener) => byId(id).addEventListener(event, listener);

/** An element with attributes and children; functions are listeners, text stays text. */
export function make(tag, attributes = {}, ...children) {
  const element = SVG_TAGS.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.flat(9).filter((child) => child != null && child !== false));
  return element;
}

export function fill(parent, ...children) {
  parent.replaceChildren(...children.flat(9).filter((child) => child != null && child !== false));
}

export const notice = (kind, ...children) => make("div", { class: `notice ${kind}` }, ...children);
export const empty = (title, text) => make("div", { class: "empty" }, make("b", {}, title), text);

// numbers

export const count = (value) => value?.toLocaleString("en") ?? "–";

export function decimal(value, digits = 4) {
  if (value == null || !Number.isFinite(value)) return "–";
  if (Number.isInteger(value)) return count(value);
  return Math.abs(value) >= 10 ** -digits ? value.toFixed(digits) : value.toExponential(1);
}

export const milliseconds = (ms) => (ms == null ? "–" : `${ms >= 100 ? ms.toFixed(0) : ms >= 10 ? ms.toFixed(1) : ms.toFixed(2)} ms`);

export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  for (; value >= 1000 && unit < units.length - 1; unit++) value /= 1000;
  return `${unit ? value.toFixed(value < 10 ? 1 : 0) : value} ${units[unit]}`;
}

export function duration(seconds) {
  if (seconds == null) return "–";
  if (seconds < 1) return "under 1 s";
  for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60]]) {
    if (seconds >= 2 * size) return `${Math.round(seconds / size)} ${unit}`;
  }
  return `${Math.round(seconds)} s`;
}

export const age = (seconds) => (seconds == null ? "–" : `${duration(Math.max(0, seconds))} old`);
const OLD_SECONDS = 3 * 86400;

/** Until when the bundle has data: how long ago for a log that goes on, the day for one that ended. */
export function dataTime({ freshness_seconds: seconds }) {
  if (seconds == null) return "a log without times";
  if (seconds < OLD_SECONDS) return `data that is ${age(seconds)}`;
  return `data to ${new Date(Date.now() - 1000 * seconds).toLocaleDateString("en-GB", { dateStyle: "medium" })}`;
}

/** A raw value or feature on one line; long lists are cut. */
export function written(value) {
  if (value == null) return "missing";
  if (Array.isArray(value)) {
    const shown = value.slice(0, 12).map(written).join(", ");
    return value.length > 12 ? `${shown}, … ${value.length} in all` : shown || "empty";
  }
  if (typeof value === "number") return Math.abs(value) < 1e-4 ? String(value) : String(Number(value.toFixed(4)));
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

export const fact = (name, value, note, kind = "") =>
  make("div", { class: kind }, make("dt", {}, name), make("dd", {}, value, note && make("small", {}, note)));

/** A table whose rows can be walked through with the arrow keys; `head` are [name, class of the column]. */
export const grid = (label, head, rows) =>
  make("table", { class: "grid", role: "grid", "aria-label": label, onkeydown: walk },
    make("thead", {}, make("tr", {}, head.map(([name, kind]) => make("th", { class: kind, scope: "col" }, name)))), make("tbody", {}, rows));

function walk(event) {
  const next = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
  if (!next) return;
  event.preventDefault();
  event.target.closest("tr")[next]?.focus();
}

export const plainTable = (values) =>
  make("table", { class: "plain small" }, make("tbody", {}, Object.entries(values).map(([name, value]) =>
    make("tr", {}, make("td", {}, name), make("td", {}, written(value))))));

export const swatch = (number) => make("svg", { viewBox: "0 0 10 10", "aria-hidden": "true" },
  make("rect", { class: `fill s${number % 6}`, width: 10, height: 10, rx: 2 }));

/** One bar cut into stages, with a legend that says each one's milliseconds. */
export function stageBar(stages, title) {
  const known = Object.entries(stages).filter(([, ms]) => ms != null);
  const total = known.reduce((sum, [, ms]) => sum + ms, 0) || 1;
  let left = 0;
  const parts = known.map(([name, ms], number) => {
    const width = (ms / total) * 1000;
    const part = make("rect", { class: `fill s${number % 6}`, x: left, y: 0, width: Math.max(0.5, width - 2), height: 16 },
      make("title", {}, `${name}: ${milliseconds(ms)}`));
    left += width;
    return part;
  });
  const legend = known.map(([name, ms], number) => make("li", {}, swatch(number), name, make("b", {}, milliseconds(ms))));
  const label = `${title}: ${known.map(([name, ms]) => `${name} ${milliseconds(ms)}`).join(", ")}`;
  return make("div", { class: "stages" },
    make("svg", { viewBox: "0 0 1000 16", preserveAspectRatio: "none", role: "img", "aria-label": label }, parts),
    make("ul", { class: "legend" }, legend));
}

// the server

/** One sentence on top of every view; none when all is well. */
export function showDown(sentence) {
  byId("down").textContent = sentence;
  byId("down").hidden = !sentence;
}

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const SENTENCES = {
  401: "This server requires a token: enter it in the field at the top.",
  403: "This token may not do that; it needs the admin scope.",
  429: "The server is busy and turned this request away. Ask again in a moment.",
  503: "The server is not ready yet, or is shutting down.",
  504: "The answer would have come too late, so the server gave none.",
};

export const storedToken = () => sessionStorage.getItem("token");
export function keepToken(token) {
  if (token) sessionStorage.setItem("token", token);
  else sessionStorage.removeItem("token");
}

/** Ids may be larger than what JavaScript counts exactly; those stay text. */
const exact = (_, value, context) =>
  typeof value === "number" && !Number.isSafeInteger(value) && /^-?\d+$/.test(context?.source ?? "") ? context.source : value;

/** GET, or POST when there is a body. Raises Refused with a sentence to show. */
export async function ask(path, body, signal) {
  const headers = { ...(body && { "Content-Type": "application/json" }), ...(storedToken() && { Authorization: `Bearer ${storedToken()}` }) };
  const options = { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal, cache: "no-store" };
  let response, answer;
  try {
    response = await fetch(path, options);
    answer = JSON.parse(await response.text(), exact);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    if (response) throw new Refused(response.status, `The server's answer (status ${response.status}) is not what this page expects.`);
    showDown("The server does not answer. It may be down or restarting; this page goes on trying.");
    throw new Refused(0, "No answer.");
  }
  if (response.ok) return answer;
  const said = typeof answer?.error === "string" ? answer.error : "";
  throw new Refused(response.status, [SENTENCES[response.status], said].filter(Boolean).join(" ") || `The server refused (status ${response.status}).`);
}

/** Runs work for a view that looks busy meanwhile; only the latest counts. `failed` shows a refusal. */
export function latest(id, failed) {
  let running = null;
  return async (work) => {
    running?.abort();
    const { signal } = (running = new AbortController());
    byId(id).ariaBusy = "true";
    try {
      await work(signal);
    } catch (error) {
      if (signal.aborted) return;
      failed(error.status ? notice("bad", error.message) : empty("No answer", "This view goes on once the server is back."));
    }
    if (!signal.aborted) byId(id).ariaBusy = "false";
  };
}
