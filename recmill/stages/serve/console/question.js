// The form that asks: user, numbers, context, recent clicks. Its state is the part of the address behind "?".

import { ask, byId, fill, make, on } from "./page.js";

let suggesting = null;

/** Suggest the columns that belong to a request itself. */
export function suggestContext(names) {
  fill(byId("context-names"), names.map((name) => make("option", { value: name })));
}

function pairs() {
  return [...byId("context").children].map((row) => [...row.querySelectorAll("input")].map((input) => input.value.trim()))
    .filter(([name]) => name);
}

function addPair(name = "", value = "") {
  const row = make("li", {},
    make("input", { list: "context-names", placeholder: "column", "aria-label": "Context column", value: name }),
    make("input", { placeholder: "value", "aria-label": "Value", value }),
    make("button", { type: "button", "aria-label": "Remove this column", onclick: () => { row.remove(); countMore(); } }, "✕"));
  byId("context").append(row);
  return row;
}

/** Boosts as the server takes them; one without a condition is not there yet. */
function boosts() {
  return [...byId("boosts").children].map((row) => [...row.querySelectorAll("input")])
    .filter(([where]) => where.value.trim()).map(([where, factor]) => ({ where: where.value.trim(), factor: factor.checkValidity() && factor.valueAsNumber || 1 }));
}

function addBoost(where = "", factor = 2) {
  const row = make("li", {},
    make("input", { placeholder: "condition, such as price < 30", "aria-label": "Boost items where", value: where }),
    make("input", { type: "number", min: 0.01, max: 100, step: "any", "aria-label": "Factor", value: factor }),
    make("button", { type: "button", "aria-label": "Remove this boost", onclick: () => { row.remove(); countMore(); } }, "✕"));
  byId("boosts").append(row);
  return row;
}

function countMore() {
  const number = pairs().length + boosts().length + recent().length + (byId("where").value.trim() !== "") + byId("seen").checked;
  byId("more-count").textContent = number ? `(${number})` : "";
}

const recent = () => byId("recent").value.split(",").map((id) => id.trim()).filter(Boolean);

export function addRecent(item) {
  byId("recent").value = [...recent(), item].join(", ");
  byId("more").open = true;
  countMore();
}

/** Numbers and truths as such; the server reads a number for a text column as text. */
function typed(text) {
  if (text === "true" || text === "false") return text === "true";
  return text.trim() !== "" && Number.isFinite(Number(text)) ? Number(text) : text;
}

/** The Recommend message. */
export function question() {
  const user = byId("user").value.trim();
  const context = Object.fromEntries(pairs().filter(([, value]) => value !== "").map(([name, value]) => [name, typed(value)]));
  return {
    ...(user && { user }),
    k: number("k", 20), candidates: number("candidates", 500),
    ...(Object.keys(context).length && { context }),
    ...(recent().length && { recent: recent() }),
    ...(byId("where").value.trim() && { where: byId("where").value.trim() }),
    ...(byId("seen").checked && { show_seen: true }),
    ...(boosts().length && { boost: boosts() }),
  };
}

function number(id, otherwise) {
  return byId(id).checkValidity() && byId(id).valueAsNumber || otherwise;
}

export function toAddress() {
  const { user, k, candidates, where, show_seen: seen } = question();
  const address = new URLSearchParams();
  if (user) address.set("user", user);
  if (k !== 20) address.set("k", k);
  if (candidates !== 500) address.set("candidates", candidates);
  for (const [name, value] of pairs()) address.append(`c.${name}`, value);
  if (recent().length) address.set("recent", recent().join(","));
  if (where) address.set("where", where);
  if (seen) address.set("seen", "yes");
  for (const { where: condition, factor } of boosts()) address.append(`b.${factor}`, condition);
  return address;
}

export function fromAddress(address) {
  byId("user").value = address.get("user") ?? "";
  byId("k").value = address.get("k") ?? 20;
  byId("candidates").value = address.get("candidates") ?? 500;
  byId("recent").value = address.get("recent") ?? "";
  byId("where").value = address.get("where") ?? "";
  byId("seen").checked = address.get("seen") === "yes";
  fill(byId("context"));
  fill(byId("boosts"));
  for (const [name, value] of address) {
    if (name.startsWith("c.")) addPair(name.slice(2), value);
    if (name.startsWith("b.")) addBoost(value, name.slice(2));
  }
  countMore();
  byId("more").open = byId("more-count").textContent !== "";
}

// suggestions

const options = () => [...byId("users").children];
const chosen = () => options().findIndex((option) => option.getAttribute("aria-selected") === "true");

function closeSuggestions() {
  suggesting?.abort();
  byId("users").hidden = true;
  byId("user").setAttribute("aria-expanded", "false");
  byId("user").removeAttribute("aria-activedescendant");
}

function choose(index) {
  options().forEach((option, at) => option.setAttribute("aria-selected", at === index));
  options()[index]?.scrollIntoView({ block: "nearest" });
  if (index >= 0) byId("user").setAttribute("aria-activedescendant", options()[index].id);
}

async function suggest(submit) {
  suggesting?.abort();
  suggesting = new AbortController();
  const { signal } = suggesting;
  try {
    await new Promise((done) => setTimeout(done, 110));
    if (signal.aborted) return;
    const answer = await ask(`v1/users?limit=12&prefix=${encodeURIComponent(byId("user").value.trim())}`, null, signal);
    const take = (id) => { byId("user").value = id; closeSuggestions(); submit(); };
    fill(byId("users"), answer.users.map((id, at) => make("li",
      { id: `user-${at}`, role: "option", "aria-selected": "false", onpointerdown: (event) => { event.preventDefault(); take(id); } }, String(id))));
    byId("users").hidden = !answer.users.length;
    byId("user").setAttribute("aria-expanded", String(answer.users.length > 0));
  } catch {
    if (!signal.aborted) closeSuggestions(); // suggestions are a comfort: asking says what is wrong
  }
}

/** Listen to the form; `submit` is called when the user wants an answer. */
export function startQuestion(submit) {
  const user = byId("user");
  on("user", "input", () => suggest(submit));
  on("user", "focus", () => { if (!user.value) suggest(submit); });
  on("user", "blur", closeSuggestions);
  on("user", "keydown", (event) => {
    const open = !byId("users").hidden;
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      if (!open) return void (event.key === "ArrowDown" && document.querySelector("section:not([hidden]) tr[tabindex='0']")?.focus());
      const length = options().length;
      choose((chosen() + (event.key === "ArrowDown" ? 1 : chosen() < 0 ? 0 : -1) + length) % length);
    } else if (event.key === "Escape" && open) {
      event.preventDefault();
      closeSuggestions();
    } else if (event.key === "Enter" && open && chosen() >= 0) {
      user.value = options()[chosen()].textContent;
    }
  });
  on("add-context", "click", () => addPair().querySelector("input").focus());
  on("add-boost", "click", () => addBoost().querySelector("input").focus());
  on("more", "input", countMore);
  on("more", "toggle", () => { if (byId("more").open && !byId("context").children.length) addPair(); });
  on("ask", "submit", (event) => { event.preventDefault(); closeSuggestions(); submit(); });
}
