// Small line charts over the last seconds, drawn as SVG.

import { fill, make } from "./page.js";

const HEIGHT = 190, LEFT = 54, RIGHT = 8, TOP = 8, BOTTOM = 22;

/** A round number at or above the value, for the top of an axis. */
function roundUp(value) {
  const size = 10 ** Math.floor(Math.log10(value || 1));
  return [1, 2, 4, 5, 10].map((step) => step * size).find((top) => top >= value * 0.9999);
}

const sample = (style) => make("svg", { viewBox: "0 0 16 10", width: 16, height: 10, "aria-hidden": "true" }, make("path", { class: `line ${style}`, d: "M0 5H16" }));

/** `series` are [name, style, key of the data]; `text` writes a value; `unit` follows those on the axis, whose least height is `top`. */
export class Chart {
  constructor(title, series, text, unit, top) {
    Object.assign(this, { title, series, text, unit, top, data: null, at: null });
    this.svg = make("svg", { role: "img", tabindex: 0, "aria-label": title });
    this.when = make("span", { class: "soft" });
    this.readout = make("ul", { class: "legend" });
    this.figure = make("figure", { class: "card" }, make("figcaption", {}, title, this.when), this.readout, this.svg);
    this.svg.addEventListener("pointermove", (event) => this.point(this.nearest(event)));
    this.svg.addEventListener("pointerleave", () => this.point(null));
    this.svg.addEventListener("blur", () => this.point(null));
    this.svg.addEventListener("keydown", (event) => this.key(event));
  }

  get width() { return this.svg.clientWidth || 400; }
  get last() { return this.data.seconds.length - 1; }
  x(at) { return LEFT + (at / this.last) * (this.width - LEFT - RIGHT); }
  y(value) { return HEIGHT - BOTTOM - (Math.min(value, this.high) / this.high) * (HEIGHT - TOP - BOTTOM); }

  nearest(event) {
    if (!this.data) return null;
    const share = (event.clientX - this.svg.getBoundingClientRect().left - LEFT) / (this.width - LEFT - RIGHT);
    return Math.max(0, Math.min(this.last, Math.round(share * this.last)));
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || !this.data) return;
    event.preventDefault();
    this.readout.setAttribute("role", "status");
    this.point(Math.max(0, Math.min(this.last, (this.at ?? this.last + 1) + step)));
  }

  point(at) {
    this.at = at;
    if (this.data) this.draw(this.data);
  }

  draw(data) {
    this.data = data;
    this.high = Math.max(this.top, roundUp(Math.max(0, ...this.series.flatMap(([, , key]) => data[key].filter((value) => value != null)))));
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    fill(this.svg, this.axes(), this.series.map((one) => this.line(one)), this.at == null ? [] : this.pointer());
    const at = this.at ?? this.last;
    this.when.textContent = this.at == null ? "" : `${this.last - at} s before`;
    fill(this.readout, this.series.map(([name, style, key]) => make("li", {}, sample(style), name, make("b", {}, this.text(data[key][at])))));
  }

  axes() {
    const right = this.width - RIGHT;
    const levels = [0, this.high / 2, this.high].map((value) => [
      make("line", { class: "gridline", x1: LEFT, x2: right, y1: this.y(value), y2: this.y(value) }),
      make("text", { x: LEFT - 6, y: this.y(value) + 4, "text-anchor": "end" }, `${value}${value ? this.unit : ""}`)]);
    const times = [[0, "2 min ago", "start"], [this.last / 2, "1 min ago", "middle"], [this.last, "now", "end"]]
      .map(([at, words, anchor]) => make("text", { x: this.x(at), y: HEIGHT - 5, "text-anchor": anchor }, words));
    return [levels, times];
  }

  line([, style, key]) {
    const runs = [];
    this.data[key].forEach((value, at) => {
      if (value == null) return;
      const point = `${this.x(at).toFixed(1)} ${this.y(value).toFixed(1)}`;
      if (at && this.data[key][at - 1] != null) runs.at(-1).push(point);
      else runs.push([point]);
    });
    // A second alone is a dot: a line of almost no length.
    const path = runs.map((run) => `M${run.join("L")}${run.length === 1 ? "h.1" : ""}`).join("");
    const base = HEIGHT - BOTTOM;
    const area = runs.map((run) => `M${run[0].split(" ")[0]} ${base}L${run.join("L")}L${run.at(-1).split(" ")[0]} ${base}Z`).join("");
    return [this.series.length === 1 && make("path", { class: `area ${style}`, d: area }),
      make("path", { class: `line ${style}`, d: path, "stroke-linecap": "round" })];
  }

  pointer() {
    const x = this.x(this.at);
    const dots = this.series.filter(([, , key]) => this.data[key][this.at] != null)
      .map(([, style, key]) => make("circle", { class: `dot ${style}`, cx: x, cy: this.y(this.data[key][this.at]), r: 4 }));
    return [make("line", { class: "pointer", x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM }), ...dots];
  }
}
