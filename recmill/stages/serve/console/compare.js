// The same question to two versions, side by side.

import { ask, byId, count, decimal, empty, fact, fill, grid, latest, make } from "./page.js";
import { fields, hasTitles, named } from "./items.js";
import { question } from "./question.js";
import { channelName, degradedNotice } from "./recommend.js";

const IDS = ["version-a", "version-b"];
const attempt = latest("compare", (problem) => {
  fill(byId("compare-notes"));
  fill(byId("compare-tables"), problem);
});

export const chosenVersions = () => IDS.map((id) => byId(id).value);

/** Offer the versions that the server holds, with two of them chosen: by default the current one and another. */
export function offerVersions({ version, previous, canary, versions }, [a, b]) {
  const chosen = [a || version, b || previous || versions.find((one) => one !== version) || version];
  const uses = new Map([[canary?.split("=")[0], " (canary)"], [previous, " (previous)"], [version, " (current)"]]);
  IDS.forEach((id, side) => fill(byId(id), [...new Set([...versions, chosen[side]])].map((name) =>
    make("option", { value: name, selected: name === chosen[side] }, name + (uses.get(name) ?? "")))));
}

export function compare() {
  const [a, b] = chosenVersions();
  return attempt(async (signal) => {
    if (a === b) return show([]);
    show(await Promise.all([a, b].map((version) => ask("v1/recommend", { ...question(), version, fields: fields() }, signal))));
  });
}

const places = (answer) => new Map(answer.items.map((item, at) => [String(item.id), at]));

function show(answers) {
  if (!answers.length) {
    fill(byId("compare-notes"));
    return fill(byId("compare-tables"), empty("Choose two versions", "A and B are the same. If there is only one, export another first."));
  }
  const [inA, inB] = answers.map(places);
  fill(byId("compare-notes"), summary(answers, inA, inB), answers.map(degradedNotice));
  fill(byId("compare-tables"), side("A", answers[0], inB), side("B", answers[1], inA));
}

function summary([a, b], inA, inB) {
  const common = [...inA.keys()].filter((id) => inB.has(id));
  const moves = common.map((id) => Math.abs(inA.get(id) - inB.get(id)));
  const differences = common.map((id) => Math.abs(a.items[inA.get(id)].score - b.items[inB.get(id)].score));
  const same = moves.filter((move) => move === 0).length;
  const mean = moves.length ? moves.reduce((sum, move) => sum + move, 0) / moves.length : 0;
  return make("dl", { class: "facts" },
    fact("In both", count(common.length), `of ${count(inA.size)} and ${count(inB.size)}`), fact("At the same rank", count(same)),
    fact("Only in A", count(inA.size - common.length)), fact("Only in B", count(inB.size - common.length)),
    fact("Mean move", decimal(mean, 1), "ranks, of those in both"), fact("Largest score difference", decimal(Math.max(0, ...differences))));
}

/** How a rank differs from the other side's, in signs, words and colour. */
function change(name, at, there) {
  if (there == null) return name === "A" ? ["down", "✕ not in B"] : ["up", "＋ not in A"];
  const move = name === "A" ? at - there : there - at;
  if (!move) return ["soft", "="];
  const up = move > 0;
  return [up ? "up" : "down", name === "A" ? `${up ? "▲" : "▼"} ${there + 1} in B` : `${up ? "▲" : "▼"} ${Math.abs(move)}, was ${there + 1}`];
}

function side(name, answer, other) {
  const rows = answer.items.map((item, at) => {
    const there = other.get(String(item.id)), [kind, words] = change(name, at, there);
    const link = (on) => () => linked(item.id, on);
    return make("tr", { class: there == null ? `only ${name.toLowerCase()}` : "", "data-item": String(item.id), tabindex: 0,
      onpointerenter: link(true), onpointerleave: link(false), onfocus: link(true), onblur: link(false) },
      make("td", { class: "number soft" }, String(at + 1)), hasTitles() && make("td", { class: "title" }, named(item.fields, item.id)), make("td", { class: "mono" }, String(item.id)), make("td", { class: "number" }, decimal(item.score)),
      make("td", {}, channelName(item.channel)), make("td", { class: kind }, words));
  });
  const head = [["", "number"], ...(hasTitles() ? [["item"], ["id"]] : [["item"]]), ["score", "number"], ["channel"], [name === "A" ? "in B" : "against A"]];
  return make("div", {}, make("h2", {}, `${name} `, make("span", { class: "mono soft" }, answer.version)),
    answer.items.length ? make("div", { class: "scroll" }, grid(`Items of version ${name}`, head, rows)) : empty("No items", "This version has nothing to recommend."));
}

function linked(id, on) {
  for (const row of byId("compare-tables").querySelectorAll("tbody tr")) row.classList.toggle("linked", on && row.dataset.item === String(id));
}
