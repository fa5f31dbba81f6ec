// What there is to look at before anybody is asked for: how the server is, users with long histories, top items.

import { age, ask, byId, count, dataTime, fact, fill, latest, make } from "./page.js";
import { fields, link } from "./items.js";

const TOP_ITEMS = 10;
const attempt = latest("recommend-table", (problem) => fill(byId("recommend-table"), problem));

/** `choose` is called with the id of a user. */
export const showHome = (status, choose) => attempt(async (signal) => {
  const [top, live] = await Promise.all([ask("v1/trending", { k: TOP_ITEMS, fields: fields() }, signal), ask("v1/live", null, signal)]);
  if (signal.aborted) return;
  fill(byId("recommend-summary"), facts(status, live));
  fill(byId("recommend-table"), make("div", { class: "home" }, users(status.manifest.busiest_users ?? [], choose), items(top.items)));
});

function facts(status, live) {
  const sum = (values) => values.reduce((total, value) => total + value, 0);
  const refused = sum(live.refused) + sum(live.errors);
  return make("dl", { class: "facts" },
    fact("Health", status.ready ? "ready" : "not ready", refused ? `${count(refused)} requests failed or refused` : "no request failed or refused"),
    fact("Requests", count(sum(live.requests)), "in the last two minutes"),
    fact("Users", count(status.num_users)), fact("Items", count(status.num_items)),
    fact("Version", age(Date.now() / 1000 - status.manifest.created_at), `made of ${dataTime(status)}`));
}

const users = (busiest, choose) => make("div", { class: "card" }, make("h2", {}, "Busiest users"),
  make("p", { class: "soft small" }, "Or type any id above. Without one you see what an unknown user gets."),
  make("ul", { class: "people" }, busiest.map(({ id, items }) => make("li", {},
    make("button", { type: "button", onclick: () => choose(String(id)) }, make("span", {}, String(id)), make("small", {}, `${count(items)} items`))))));

const items = (top) => make("div", { class: "card" }, make("h2", {}, "Top items"),
  make("ol", { class: "top" }, top.map((item) => make("li", {}, link(item.fields, item.id)))));
