// A shop in one page. It uses nothing but the public HTTP API: recommend, similar, trending, events, status.

import { ask as askOnce, byId, count, empty, fill, latest, make, notice, on, written } from "../console/page.js";

const ROW_ITEMS = 12, FOUND_ITEMS = 48, NEW_VISITOR = "new", ATTEMPTS = 5, PAUSE_MS = 300;
let shop = null; // columns of items, from the server's status
let user = null, last = []; // who shops, and what was recommended last

// items

const titleOf = (item) => String(item.fields[shop.title] ?? item.id);
const idOf = (raw) => ({ id: raw[shop.id], fields: raw });
const details = (item) => shop.columns.filter((name) => ![shop.title, shop.image, shop.price].includes(name) && item.fields[name] != null);
const spoken = (value) => written(value).replaceAll("|", ", "); // lists such as Action|Drama
const price = (item) => item.fields[shop.price]?.toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 });

function hash(text) {
  let value = 7;
  for (const character of text) value = (value * 31 + character.codePointAt(0)) % 9973;
  return value;
}

/** Its image, or a drawing: the colour comes from the item's kind, the shapes from its id. */
function art(item) {
  const address = item.fields[shop.image];
  if (address) return make("img", { class: "art", src: address, alt: "", loading: "lazy" });
  const hue = (hash(String(item.fields[details(item)[0]] ?? "")) * 47) % 360, seed = hash(String(item.id));
  const tone = (light, shift = 0) => `hsl(${(hue + shift) % 360} 55% ${light}%)`;
  return make("svg", { class: "art", viewBox: "0 0 120 90", "aria-hidden": "true", preserveAspectRatio: "xMidYMid slice" },
    make("rect", { width: 120, height: 90, fill: tone(82) }),
    make("circle", { cx: 15 + (seed % 90), cy: 15 + (seed % 60), r: 26 + (seed % 17), fill: tone(70, 25) }),
    make("rect", { x: 60 - (seed % 40), y: 38, width: 56, height: 56, rx: seed % 28, fill: tone(60, 340), transform: `rotate(${seed % 45} 60 60)` }),
    make("text", { x: 60, y: 58, "text-anchor": "middle", class: "letters", fill: tone(24) }, initials(item)));
}

const initials = (item) => {
  const words = titleOf(item).split(/[^\p{L}\p{N}]+/u).filter(Boolean), names = words.filter((word) => /^\p{L}/u.test(word)); // no years
  return (names.length ? names : words).slice(0, 2).map((word) => word[0].toUpperCase()).join("");
};

function card(item) {
  const about = details(item).slice(0, 2).map((name) => spoken(item.fields[name])).join(" · ");
  return make("li", {}, make("a", { class: "card", href: `#item=${encodeURIComponent(item.id)}` }, art(item),
    make("span", { class: "title" }, titleOf(item)), make("span", { class: "about" }, about),
    price(item) && make("span", { class: "price" }, price(item)), item.why && make("span", { class: "why" }, item.why)));
}

const shelf = (title, items, kind = "strip") => items.length > 0 && make("section", { class: "shelf", "aria-label": title },
  make("h2", {}, title), make("ul", { class: kind }, items.map(card)));

// the API

/** A busy server turns requests away: an app asks again, after pauses that grow. */
async function ask(path, body, signal, attempt = 1) {
  try {
    return await askOnce(path, body, signal);
  } catch (error) {
    if (error.status !== 429 || attempt === ATTEMPTS) throw error;
    await new Promise((done) => setTimeout(done, PAUSE_MS * attempt));
    return ask(path, body, signal, attempt + 1);
  }
}

const similar = (item, signal) => ask("v1/similar", { item, k: ROW_ITEMS, fields: shop.columns }, signal);
const trending = (more, signal) => ask("v1/trending", { k: ROW_ITEMS, fields: shop.columns, ...more }, signal);
const recommend = (signal) => ask("v1/recommend", { user, k: ROW_ITEMS, fields: shop.columns, explain: true, trace: true }, signal);

const show = latest("rows", (problem) => fill(byId("rows"), problem));

/** The shelves of the page, for who shops now. */
const showShelves = () => show(async (signal) => {
  const [answer, popular] = await Promise.all([recommend(signal), trending({}, signal)]);
  const history = (answer.trace.history ?? []).map(idOf), viewed = history[0];
  const like = viewed ? (await similar(viewed.id, signal)).items.filter((item) => item.id !== viewed.id) : [];
  if (signal.aborted) return;
  fill(byId("rows"),
    shelf(history.length ? "Recommended for you" : "Popular with everybody", answer.items),
    viewed && shelf(`Because you viewed ${titleOf(viewed)}`, like),
    shelf("Trending now", popular.items.map((item) => ({ ...item, why: undefined }))),
    shelf("You viewed lately", history.slice(0, ROW_ITEMS)));
  if (!byId("rows").children.length) fill(byId("rows"), empty("Nothing to show", "The bundle has no items."));
  sayChanged(answer.items);
});

function sayChanged(items) {
  const before = new Set(last.map((item) => item.id)), added = items.filter((item) => !before.has(item.id));
  byId("changed").hidden = !last.length || !added.length;
  byId("changed").textContent = `${count(added.length)} of ${count(items.length)} recommendations are new: ${added.slice(0, 3).map(titleOf).join(", ")}${added.length > 3 ? ", …" : ""}`;
  last = items;
}

const showProduct = latest("product", (problem) => fill(byId("product"), problem));

/** A product with what is like it. Looking at it is an event, which changes the shelves below at once. */
function openProduct(id) {
  byId("product").hidden = false;
  scrollTo({ top: 0 });
  showProduct(async (signal) => {
    const stored = await ask("v1/features", { user, items: [id] }, signal);
    const raw = stored.items[0].values ?? {}, item = idOf({ [shop.id]: id, ...raw });
    await ask("v1/events", { events: [{ user, item: id }] }, signal);
    const like = await similar(id, signal);
    if (signal.aborted) return;
    document.title = `${titleOf(item)} · ${byId("name").textContent}`;
    fill(byId("product"), make("div", { class: "product" }, art(item),
      make("div", {}, make("h1", {}, titleOf(item)), price(item) && make("p", { class: "price" }, price(item)),
        make("dl", {}, details(item).map((name) => [make("dt", {}, name.replaceAll("_", " ")), make("dd", {}, spoken(item.fields[name]))])),
        make("p", { class: "soft" }, `Sent as an event of ${user}: the shelves below follow.`),
        make("a", { class: "button", href: "#" }, "Back to the shop"))),
    shelf("Similar items", like.items));
    showShelves();
  });
}

const showFound = latest("found", (problem) => fill(byId("found"), problem));

function openSearch(words) {
  byId("found").hidden = false;
  byId("words").value = words;
  showFound(async (signal) => {
    const column = `"${shop.title.replaceAll('"', '""')}"`;
    const answer = await trending({ k: FOUND_ITEMS, where: `${column} ilike '%${words.replaceAll("'", "''")}%'` }, signal);
    fill(byId("found"), answer.items.length ? shelf(`${count(answer.items.length)} found for “${words}”`, answer.items, "wall")
      : notice("", `Nothing found for “${words}”.`));
  });
}

// where the page is: # (home), #item=..., #find=...

function follow() {
  const [kind, value = ""] = location.hash.slice(1).split("=").map(decodeURIComponent);
  byId("product").hidden = kind !== "item";
  byId("found").hidden = kind !== "find";
  document.title = byId("name").textContent;
  if (kind === "item") return openProduct(value);
  if (kind === "find" && value && shop.title) openSearch(value);
  else byId("words").value = "";
  showShelves();
}

// who shops

function newVisitor(ids) {
  const number = Math.floor(1e9 + Math.random() * 9e9);
  return ids.some((id) => typeof id === "number") ? number : `visitor-${number.toString(36)}`;
}

function offerUsers(busiest) {
  const ids = busiest.map((one) => one.id);
  fill(byId("user"), busiest.map(({ id, items }) => make("option", { value: id }, `${id} (${count(items)} in history)`)),
    make("option", { value: NEW_VISITOR }, "a new visitor"));
  const chosen = () => (byId("user").value === NEW_VISITOR ? newVisitor(ids) : byId("user").value);
  user = chosen();
  on("user", "change", () => { user = chosen(); last = []; follow(); });
}

async function start() {
  try {
    const { recipe, manifest } = await ask("v1/status");
    const columns = manifest.item_columns ?? [];
    shop = { id: manifest.item_id, columns, title: manifest.title_column, image: manifest.image_column,
      price: columns.find((name) => /price$/i.test(name)) };
    byId("name").textContent = recipe;
    byId("search").hidden = !shop.title;
    offerUsers(manifest.busiest_users ?? []);
  } catch (error) {
    return fill(byId("rows"), notice("bad", error.message));
  }
  on("search", "submit", (event) => { event.preventDefault(); location.hash = byId("words").value.trim() ? `find=${encodeURIComponent(byId("words").value.trim())}` : ""; });
  addEventListener("hashchange", follow);
  follow();
}

start();
