// Which features of a head are a pair: a row of features with an arc over each pair.

import { put, s } from "../../core/dom.js";
import { Figure } from "../../core/plots/figure.js";

const MOST = 32; // arcs
const HIGHEST = 118; // pixels of an arc

class PairingFigure extends Figure {
  constructor(parent, options) {
    super(parent, options);
    Object.assign(this.options, options);
  }

  paint(width, { features }) {
    const count = 2 * features.length;
    const pitch = width / count;
    const wide = Math.max(0.5, pitch - (pitch > 5 ? 1 : 0));
    const reach = (a, b) => Math.min(Math.max(((b - a) * pitch) / 2, 12), HIGHEST);
    const line = 6 + Math.max(...features.map(([a, b]) => reach(a, b)));
    const height = line + 26;
    const cell = (feature, more) => s("rect", { x: feature * pitch, y: line, width: wide, height: 9, ...more });
    const arc = (a, b, more) => {
      const [from, to] = [(a + 0.5) * pitch, (b + 0.5) * pitch];
      return s("path", { d: `M${from},${line}A${(to - from) / 2},${reach(a, b)} 0 0 1 ${to},${line}`, fill: "none", ...more });
    };
    const every = Math.ceil(features.length / MOST);
    const parts = [s("rect", { x: 0, y: line, width, height: 9, fill: "var(--never)" })];
    features.forEach(([a, b], pair) => {
      if (pair % every) return;
      const opacity = 1 - (0.75 * pair) / features.length; // fast pairs dark, slow ones light
      parts.push(arc(a, b, { stroke: "var(--ink)", "stroke-width": 1.3, opacity }));
      parts.push(cell(a, { fill: "var(--ink)", opacity }), cell(b, { fill: "var(--ink)", opacity }));
    });
    for (const [feature, anchor, x] of [[0, "start", 0], [count / 2, "middle", width / 2], [count - 1, "end", width]])
      parts.push(s("text", { x, y: height - 2, "text-anchor": anchor, "font-size": 12, fill: "var(--soft)" }, String(feature)));
    this.sizeSvg(width, height);
    this.mark = s("g", {});
    put(this.svg, parts, this.mark);
    this.highlight = ([a, b]) => {
      const blue = { stroke: "var(--query)", "stroke-width": 3 };
      put(this.mark, arc(a, b, blue), cell(a, { fill: "var(--query)" }), cell(b, { fill: "var(--query)" }));
      return [(b + 0.5) * pitch, Math.max(line - reach(a, b), 34)];
    };
  }

  build() {
    const find = (event) => {
      const { features } = this.data;
      const feature = Math.floor((event.offsetX / this.width) * 2 * features.length);
      return features.findIndex((pair) => pair.includes(feature));
    };
    this.svg.addEventListener("pointermove", (event) => this.moveTo(find(event)));
    this.svg.addEventListener("pointerleave", () => this.moveTo(-1));
    this.svg.addEventListener("blur", () => this.moveTo(-1));
    this.svg.addEventListener("keydown", (event) => {
      const last = this.data.features.length - 1;
      const way = { ArrowLeft: -1, ArrowRight: 1, Home: -last, End: last }[event.key];
      if (event.key === "Escape") this.moveTo(-1);
      if (way === undefined) return;
      event.preventDefault();
      this.moveTo(Math.min(Math.max((this.at ?? -1) + way, 0), last), true);
    });
  }

  moveTo(pair, aloud = false) {
    const features = this.data.features[pair];
    this.at = features ? pair : undefined;
    put(this.mark);
    if (!features) {
      this.hideTip();
      return;
    }
    const [x, y] = this.highlight(features);
    this.showTip(x, y, [this.options.describePair(pair, ...features)], aloud);
  }

  table({ features }) {
    return [["pair", "first feature", "second feature"], ...features.map(([a, b], pair) => [pair, a, b])];
  }
}

/** A figure of pairs. Options: name, note, describePair(pair, first, second). Its draw({ features: [[first, second], ...] }). */
export const pairingFigure = (parent, options) => new PairingFigure(parent, options);
