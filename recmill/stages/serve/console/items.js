// How items are shown: by title and picture, where the bundle has columns for them, with a link to their page.

import { make } from "./page.js";

let columns = { id: "", title: null, image: null, all: [] };

export function knowColumns(manifest) {
  columns = { id: manifest.item_id, title: manifest.title_column, image: manifest.image_column, all: manifest.item_columns ?? [] };
}

export const fields = () => columns.all;
export const hasTitles = () => columns.title != null;
export const idOf = (values) => values[columns.id];
export const titleOf = (values, id) => String(values?.[columns.title] ?? id);
export const isShownElsewhere = (name) => [columns.id, columns.title, columns.image].includes(name);
export const addressOf = (id) => `#item?${new URLSearchParams({ id })}`;

const picture = (values) => values?.[columns.image] && make("img", { class: "thumb", src: values[columns.image], alt: "", loading: "lazy" });

/** Picture and title. */
export const named = (values, id) => make("span", { class: "named" }, picture(values), titleOf(values, id));
/** The same as a link to the item's page. */
export const link = (values, id) => make("a", { class: "named", href: addressOf(id) }, picture(values), titleOf(values, id));
export const chips = (label, all) => all.length > 0 && make("ul", { class: "chips", "aria-label": label }, all.map((values) => make("li", {}, link(values, idOf(values)))));
