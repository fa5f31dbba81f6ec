// The page as a whole: which view, the address, keys, theme, and whether the server is there.

import { ask, byId, dataTime, empty, fill, keepToken, make, on, showDown, storedToken } from "./page.js";
import { addRecent, fromAddress, startQuestion, suggestContext, toAddress } from "./question.js";
import { hideWhy, isMissing, moveBy, recommend, selectedItem, showAgain, startRecommend } from "./recommend.js";
import { chosenVersions, compare, offerVersions } from "./compare.js";
import { startLive, stopLive, togglePause } from "./live.js";
import { showBundle, startBundle } from "./bundle.js";
import { showHome } from "./home.js";
import { showItem } from "./item.js";
import { knowColumns } from "./items.js";

const VIEWS = ["recommend", "compare", "live", "bundle", "item"];
const STATUS_SECONDS = 5;
let view = "recommend", status = null, isAsked = false;

// the address: #view?user=...

function readAddress() {
  const [name, query = ""] = location.hash.slice(1).split("?");
  return [VIEWS.includes(name) ? name : "recommend", new URLSearchParams(query)];
}

const versionsIn = (address) => [address.get("a"), address.get("b")];

function writeAddress(push = false) {
  const address = ["recommend", "compare"].includes(view) ? toAddress() : new URLSearchParams();
  if (view === "compare") chosenVersions().forEach((version, side) => version && address.set("ab"[side], version));
  if (view === "recommend" && isAsked) {
    if (!address.has("user")) address.set("user", "");
    if (selectedItem() !== null) address.set("row", selectedItem() + 1);
  }
  const text = `#${view}${address.size ? `?${address}` : ""}`;
  if (text !== location.hash) history[push ? "pushState" : "replaceState"](null, "", text);
}

function followAddress() {
  const [name, address] = readAddress();
  if (["recommend", "compare"].includes(name) && address.size) fromAddress(address);
  if (name === "compare" && status) offerVersions(status, versionsIn(address));
  isAsked = isAsked || address.has("user");
  show(name);
  if (name === "item") return void showItem(address.get("id") ?? "");
  if (name === "recommend" && !address.has("user")) { isAsked = false; home(); }
  if (name === "recommend" && address.has("user")) recommend(address.has("row") ? Number(address.get("row")) - 1 : undefined);
}

const home = () => { if (status && !isAsked) showHome(status, (user) => { byId("user").value = user; submit(); }); };

function show(name) {
  view = name;
  for (const one of VIEWS) byId(one).hidden = one !== name;
  for (const link of document.querySelectorAll("nav a[data-view]")) link.toggleAttribute("aria-current", link.dataset.view === name);
  byId("ask").hidden = !["recommend", "compare"].includes(name);
  document.title = `${name} · recmill`;
  if (name === "live") startLive();
  else stopLive();
  byId("ask").querySelector("[type=submit]").textContent = name === "compare" ? "Compare" : "Recommend";
  if (name === "compare" && status) compare();
  if (name === "bundle") status ? showBundle(status) : fill(byId("bundle"), empty("Waiting for the server", "What serves is shown as soon as it answers."));
}

function go(name) {
  if (name === view) return;
  show(name);
  writeAddress(true);
  if (name === "recommend" && isAsked) recommend();
  else if (name === "recommend") home();
}

function submit() {
  if (view !== "compare") { show("recommend"); isAsked = true; }
  writeAddress(true);
  if (view === "compare") compare();
  else recommend();
}

// the server

function showStatus(now) {
  const isFirst = !status, isBack = !byId("down").hidden;
  const isOther = isFirst || String(now.versions) + now.version !== String(status.versions) + status.version;
  status = now;
  if (isOther) { knowColumns(now.manifest); showAgain(); }
  if (isOther) offerVersions(now, isFirst ? versionsIn(readAddress()[1]) : chosenVersions());
  showDown("");
  byId("serving").className = `serving ${now.ready ? "ready" : ""}`;
  fill(byId("serving"), now.recipe, make("span", { class: "extra" }, ` · ${now.version} · ${dataTime(now)}`), now.ready ? "" : " · not ready");
  byId("serving").title = `Version ${now.version}`;
  if (isOther) suggestContext(now.manifest.context_columns ?? []);
  if (view === "compare" && (isFirst || isBack)) compare();
  if (view === "recommend" && (isOther || isBack)) home();
  if (view === "item" && (isFirst || isBack)) followAddress();
  if (view === "recommend" && isBack && isAsked && isMissing()) recommend();
  if (view === "bundle") showBundle(now);
}

async function refresh() {
  try {
    showStatus(await ask("v1/status"));
  } catch (error) {
    byId("serving").className = "serving gone";
    byId("serving").textContent = error.status ? "no status" : "no answer";
    if (error.status) showDown(error.message);
  }
}

async function watch() {
  if (!document.hidden || !status) await refresh();
  setTimeout(watch, STATUS_SECONDS * 1000);
}

// keys and theme

const KEYS = {
  "/": () => { if (byId("ask").hidden) go("recommend"); byId("user").focus(); byId("user").select(); },
  "?": () => byId("help").showModal(),
  r: () => go("recommend"), c: () => go("compare"), l: () => go("live"), b: () => go("bundle"),
  p: () => { if (view === "live") togglePause(); },
};

function pressed(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented || document.querySelector("dialog[open]")) return;
  if (event.key === "Escape" && view === "recommend") hideWhy();
  if (event.target.matches("input, select, textarea, svg")) return;
  if (event.key in KEYS) { event.preventDefault(); KEYS[event.key](); }
  else if (view === "recommend" && /^Arrow(Up|Down)$/.test(event.key)) { event.preventDefault(); moveBy(event.key === "ArrowDown" ? 1 : -1); }
}

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  byId("theme").title = byId("theme").ariaLabel = `Theme: ${theme}`;
  localStorage.setItem("theme", theme);
}

function start() {
  setTheme(localStorage.getItem("theme") ?? "auto");
  on("theme", "click", () => setTheme({ auto: "light", light: "dark", dark: "auto" }[localStorage.getItem("theme")]));
  on("help-button", "click", KEYS["?"]);
  byId("token").value = storedToken() ?? "";
  on("token", "change", () => { keepToken(byId("token").value.trim()); refresh(); });
  for (const link of document.querySelectorAll("nav a[data-view]")) link.addEventListener("click", (event) => { event.preventDefault(); go(link.dataset.view); });
  for (const id of ["version-a", "version-b"]) on(id, "change", submit);
  on("swap", "click", () => {
    [byId("version-a").value, byId("version-b").value] = [byId("version-b").value, byId("version-a").value];
    submit();
  });
  document.addEventListener("keydown", pressed);
  addEventListener("popstate", followAddress);
  startQuestion(submit);
  startBundle(showStatus);
  startRecommend({ selected: () => view === "recommend" && writeAddress(), clicked: (item) => { addRecent(item); submit(); } });
  followAddress();
  watch();
}

start();
