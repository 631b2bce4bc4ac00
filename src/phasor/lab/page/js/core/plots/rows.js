// Rows with a bar each: a name on the left, a bar, and its value at the bar's end.

import { put, s } from "../dom.js";
import { digits } from "../numbers.js";
import { Figure } from "./figure.js";
import { textWidth } from "./scale.js";

const TALL = 26; // pixels of a row

class RowChart extends Figure {
  constructor(parent, options) {
    super(parent, options);
    Object.assign(this.options, options);
  }

  paint(width, data) {
    const o = { ...this.options, ...data };
    const format = o.format ?? ((value) => digits(value, 4));
    const shown = data.values.map((value) => (Number.isFinite(value) ? format(value) : "–"));
    const left = Math.min(Math.max(0, ...data.labels.map((label) => textWidth(label, 14, 400))) + 12, width * 0.4);
    const right = Math.max(0, ...shown.map((text) => textWidth(text, 13))) + 10;
    const most = o.max ?? Math.max(0, ...data.values.filter(Number.isFinite));
    const length = (value) => (Number.isFinite(value) && most > 0 ? Math.max(1, (value / most) * (width - left - right)) : 1);
    const height = data.values.length * TALL;
    const parts = data.values.flatMap((value, i) => {
      const y = i * TALL;
      const end = left + length(value);
      return [
        s("text", { x: left - 10, y: y + 18, "font-size": 14, "text-anchor": "end", fill: "var(--ink)" }, clip(data.labels[i], left - 10)),
        s("rect", { x: left, y: y + 4, width: end - left, height: TALL - 8, rx: 1.5, fill: data.colors?.[i] ?? o.color ?? "var(--c1)" }),
        s("text", { x: end + 6, y: y + 18, "font-size": 13, fill: "var(--soft)" }, shown[i]),
      ];
    });
    if (!this.svg) this.build();
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.setAttribute("width", width);
    this.svg.setAttribute("height", height);
    this.mark = s("g", {});
    put(this.svg, this.mark, parts);
    this.shown = shown;
  }

  build() {
    this.svg = s("svg", { role: "img", "aria-label": this.describe(), tabindex: 0, "aria-describedby": this.readoutId });
    this.box.append(this.svg);
    this.svg.addEventListener("blur", () => this.moveTo(-1));
    this.svg.addEventListener("keydown", (event) => {
      const way = { ArrowUp: -1, ArrowLeft: -1, ArrowDown: 1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
      if (event.key === "Escape") this.moveTo(-1);
      if (way === undefined) return;
      event.preventDefault();
      this.moveTo(Math.min(Math.max((this.at ?? -1) + way, 0), this.shown.length - 1));
    });
    this.svg.addEventListener("pointermove", (event) => this.moveTo(Math.floor(event.offsetY / TALL), false));
    this.svg.addEventListener("pointerleave", () => this.moveTo(-1));
  }

  moveTo(i, aloud = true) {
    const inside = i >= 0 && i < this.shown.length;
    this.at = inside ? i : undefined;
    put(this.mark, inside && s("rect", { x: 0, y: i * TALL, width: this.width, height: TALL, fill: "var(--ink)", opacity: 0.06 }));
    if (!inside) {
      this.hideTip();
      return;
    }
    const text = `${this.data.names?.[i] ?? this.data.labels[i]}: ${this.shown[i]}`;
    if (aloud) this.spoken.textContent = text;
    if (this.data.names) this.showTip(this.width / 3, Math.max(30, i * TALL), [text]);
  }

  table({ values, labels, names }) {
    return [["name", "value"], ...values.map((value, i) => [names?.[i] ?? labels[i], value])];
  }
}

/** A text that is cut where it is wider than so many pixels. */
function clip(text, width) {
  let cut = text;
  while (cut.length > 1 && textWidth(cut, 14, 400) > width) cut = `${cut.slice(0, -2)}…`;
  return cut;
}

/**
 * Rows with bars. Options: name, note, color, format, max. Its draw({ values, labels, names, colors, max }): names are for
 * the read-out and the table, where they say more than the labels.
 */
export const rowChart = (parent, options) => new RowChart(parent, options);
