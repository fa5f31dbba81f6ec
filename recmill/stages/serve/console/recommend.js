// What is recommended to a user, and why.

import { ask, byId, count, decimal, empty, fill, grid, latest, make, milliseconds, notice, plainTable, stageBar, swatch } from "./page.js";
import { addressOf, chips, hasTitles, isShownElsewhere, link, named } from "./items.js";
import { question } from "./question.js";

const CHANNELS = {
  two_tower: ["two towers", "Its vector is near the user's: the retrieval model expects a click."],
  similar: ["similar", "Its vector is near that of an item the user clicked lately."],
  co_clicks: ["co-clicks", "Users who clicked the same items as this one clicked it too."],
  popular: ["popular", "Many users click it."],
  ease: ["EASE", "A linear model over all items finds it likely beside those of the user's history."],
  content: ["content", "Its description is near those of items that the user clicked."],
  transitions: ["transitions", "Users go on to it after the items that this one had last."],
};
const RAW_COLUMNS = 4; // shown in the table; all of them are beside it
let shown = null; // the answer, what was asked, and which row is selected
let listen = {}; // what the page does when a row is selected, or "as if clicked" is asked for

export function startRecommend(listeners) {
  listen = listeners;
}

export const channelName = (channel) => CHANNELS[channel]?.[0] ?? channel.replaceAll("_", " ");
const channelMark = (channel) => {
  const at = Object.keys(CHANNELS).indexOf(channel);
  return make("span", { class: "channel" }, swatch(at < 0 ? 5 : at), channelName(channel));
};

export const isMissing = () => !shown;

const attempt = latest("recommend", (problem) => {
  shown = null;
  hideWhy();
  fill(byId("recommend-summary"));
  fill(byId("recommend-notes"));
  fill(byId("recommend-table"), problem);
});

/** Ask with what the form says, and show the answer; the row at `selected` is explained, where there is room for it. */
export function recommend(selected = matchMedia("(min-width: 901px)").matches ? 0 : -1) {
  const asked = question(), begin = performance.now();
  if (!shown) fill(byId("recommend-table"), empty("Asking", "The answer is on its way."));
  return attempt(async (signal) => {
    const known = asked.user && ask("v1/features", { user: asked.user }, signal).catch(() => null);
    const answer = await ask("v1/recommend", { ...asked, trace: true, explain: true }, signal);
    const roundTrip = performance.now() - begin, user = (await known)?.user;
    if (signal.aborted) return;
    shown = { asked, answer, user, roundTrip, selected: -1 };
    show(selected);
  });
}

/** Show the answer again: what the columns of items are was not known before, or is another now. */
export function showAgain() {
  if (!shown) return;
  const { selected } = shown;
  shown.selected = -1;
  show(selected);
}

function show(selected) {
  const { answer, asked, user } = shown;
  fill(byId("recommend-notes"), unknownUserNotice(asked, user, answer), degradedNotice(answer));
  fill(byId("recommend-summary"), history(answer.trace?.history ?? []), summary(answer), stageBar(answer.trace?.stages ?? {}, "Time of each stage"));
  const { length } = answer.items;
  fill(byId("recommend-table"), length ? table(answer) : empty("No items", "Nothing was left to recommend: all candidates were seen or filtered out."));
  if (length && selected >= 0) select(Math.min(selected, length - 1), false);
  else hideWhy();
}

function unknownUserNotice(asked, user, answer) {
  const got = answer.items.every((item) => item.channel === "popular") ? "popular items are shown" : "items for a user without history are shown";
  if (!asked.user) return notice("", `No user was given: ${got}, as to any unknown user.`);
  return user && !user.known && notice("", `The user “${asked.user}” is not known here: ${got}.`);
}

export function degradedNotice(answer) {
  if (!answer.degraded?.length) return null;
  return notice("warn", "This answer is less than it should be:", make("ul", {}, answer.degraded.map((reason) => make("li", {}, reason))));
}

const history = (items) => items.length > 0 && make("details", { class: "history", open: true },
  make("summary", {}, `The user's latest items, ${count(items.length)} shown`), chips("The user's latest items", items));

function summary(answer) {
  const { counts = {}, stages = {} } = answer.trace ?? {};
  const inside = Object.values(stages).reduce((sum, ms) => sum + ms, 0);
  const channels = Object.keys(CHANNELS).filter((name) => counts[name]).map((name) => `${channelName(name)} ${count(counts[name])}`);
  return make("p", { class: "soft small" },
    `${count(answer.items.length)} items of ${count(counts.candidates)} candidates${channels.length ? ` (${channels.join(", ")})` : ""} · `,
    `${milliseconds(inside)} in the server, ${milliseconds(shown.roundTrip)} until it was here · version `,
    make("span", { class: "mono" }, answer.version));
}

function table(answer) {
  const raw = answer.trace?.items ?? [], columns = rawColumns(answer.items, raw);
  const best = Math.max(...answer.items.map((item) => item.score)), worst = Math.min(0, ...answer.items.map((item) => item.score));
  const rows = answer.items.map((item, at) => make("tr",
    { tabindex: at ? -1 : 0, "aria-selected": "false", onclick: () => select(at), onfocus: () => select(at, false) },
    make("td", { class: "number soft" }, String(at + 1)), hasTitles() && make("td", { class: "title" }, named(raw[at], item.id)),
    make("td", { class: "mono" }, String(item.id)),
    make("td", { class: "number" }, item.boost && make("small", { class: "soft" }, `×${decimal(item.boost, 2)} `), decimal(item.score), scoreBar((item.score - worst) / (best - worst || 1))),
    make("td", {}, channelMark(item.channel)), make("td", { class: "number" }, decimal(item.recall_score ?? 0, 3)),
    columns.map((name) => make("td", { class: typeof raw[at][name] === "number" ? "number" : "" }, raw[at][name] == null ? "" : String(raw[at][name])))));
  const head = [["", "number"], ...(hasTitles() ? [["item"], ["id"]] : [["item"]]), ["score", "number"], ["channel"], ["recall score", "number"],
    ...columns.map((name) => [name, typeof raw[0][name] === "number" ? "number" : ""])];
  return grid("Recommended items", head, rows);
}

function rawColumns(items, raw) {
  const isId = (name) => raw.every((row, at) => String(row[name]) === String(items[at].id));
  return Object.keys(raw[0] ?? {}).filter((name) => typeof raw[0][name] !== "object" && !isId(name) && !isShownElsewhere(name)).slice(0, RAW_COLUMNS);
}

const scoreBar = (share) => make("svg", { class: "bar", viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" },
  make("rect", { class: "track", width: 100, height: 10 }), make("rect", { class: "fill s0", width: 100 * share, height: 10 }));

// selecting

const rows = () => [...byId("recommend-table").querySelectorAll("tbody tr")];
export const selectedItem = () => (shown?.selected >= 0 ? shown.selected : null);

/** The next item up or down; arrow keys work from anywhere on the page. */
export function moveBy(step) {
  if (shown) rows()[Math.max(0, shown.selected + step)]?.focus();
}

export function hideWhy() {
  byId("why").hidden = true;
  byId("why").parentElement.classList.remove("with-why");
  for (const row of rows()) row.setAttribute("aria-selected", "false");
  if (selectedItem() === null) return;
  shown.selected = -1;
  listen.selected();
}

function select(at, focus = true) {
  if (shown.selected === at) return;
  shown.selected = at;
  rows().forEach((row, number) => {
    row.setAttribute("aria-selected", String(number === at));
    row.tabIndex = number === at ? 0 : -1;
  });
  if (focus) rows()[at].focus();
  fill(byId("why"), why(at));
  byId("why").scrollTop = 0;
  byId("why").hidden = false;
  byId("why").parentElement.classList.add("with-why");
  rows()[at].scrollIntoView({ block: "nearest" }); // the explanation may lie over it
  listen.selected();
}

function why(at) {
  const { answer, asked } = shown, item = answer.items[at], trace = answer.trace ?? {};
  return [
    make("button", { class: "close", type: "button", "aria-label": "Close", onclick: hideWhy }, "✕"),
    make("h2", {}, "Why ", link(trace.items?.[at], item.id), "?"),
    item.why && make("p", { class: "reason" }, item.why[0].toUpperCase() + item.why.slice(1), "."),
    item.because?.length > 0 && make("ul", { class: "chips", "aria-label": "Items that led there" },
      item.because.map((one) => make("li", {}, make("a", { href: addressOf(one.id) }, one.title ?? String(one.id)), make("small", {}, `${channelName(one.channel)} ${decimal(one.weight, 2)}`)))),
    make("p", {}, channelMark(item.channel), make("span", { class: "soft" }, ` · ${CHANNELS[item.channel]?.[1] ?? "Found by this channel."}`)),
    plainTable({ rank: at + 1, score: item.score, ...(item.boost && { "times boost": item.boost }), "recall score": item.recall_score ?? 0 }),
    make("button", { type: "button", onclick: () => listen.clicked(String(item.id)), title: "Adds it to the recent clicks and asks once more" }, "Ask again as if just clicked"),
    block("The item", trace.items?.[at]), block("Its features, as the models see them", trace.item_features?.[at]),
    block("Context you gave", asked.context), block("The user", trace.user), block("Features of user and context", trace.user_features),
  ];
}

const block = (title, values) => values && Object.keys(values).length > 0 && make("div", {}, make("h3", {}, title), plainTable(values));
