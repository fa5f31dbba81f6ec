// One item: its columns, and what is like it.

import { ask, byId, decimal, empty, fill, grid, latest, make, plainTable } from "./page.js";
import { addressOf, fields, named, titleOf } from "./items.js";

const SIMILAR_ITEMS = 15;
const attempt = latest("item", (problem) => fill(byId("item"), problem));

export const showItem = (id) => attempt(async (signal) => {
  const [stored, like] = await Promise.all([
    ask("v1/features", { items: [id] }, signal),
    ask("v1/similar", { item: id, k: SIMILAR_ITEMS, fields: fields() }, signal),
  ]);
  if (signal.aborted) return;
  const { known, values = {} } = stored.items[0];
  document.title = `${titleOf(values, id)} · recmill`;
  fill(byId("item"), make("div", { class: "row between" }, make("h2", {}, named(values, id)), make("span", { class: "mono soft" }, String(id))),
    !known && empty("Unknown item", "The bundle has no item with this id."),
    known && make("div", { class: "sides" }, make("div", { class: "card" }, make("h3", {}, "Its columns"), plainTable(values)),
      make("div", {}, make("h3", {}, "Similar items"), like.items.length ? similar(like.items) : empty("None", "No channel knows what is like it."))));
});

const similar = (items) => grid("Similar items", [["", "number"], ["item"], ["score", "number"]], items.map((item, at) =>
  make("tr", { tabindex: 0, onclick: () => { location.hash = addressOf(item.id); }, onkeydown: (event) => { if (event.key === "Enter") location.hash = addressOf(item.id); } },
    make("td", { class: "number soft" }, String(at + 1)), make("td", { class: "title" }, named(item.fields, item.id)), make("td", { class: "number" }, decimal(item.score)))));
