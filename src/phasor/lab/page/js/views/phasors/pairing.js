// Which features of a head are a pair: a row of features with an arc over each pair.

import { put, s } from "../../core/dom.js";
import { Figure } from "../../core/plots/figure.js";

const MOST = 32; // arcs
const HIGHEST = 118; // pixels of an arc

class PairingFigure extends Figure {
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
			const opacity = 1 - (0.75 * pair) / features.length; // fast pairs strong, slow ones faint
			parts.push(arc(a, b, { stroke: "var(--ink)", "stroke-width": 1.3, opacity }));
			parts.push(cell(a, { fill: "var(--ink)", opacity }), cell(b, { fill: "var(--ink)", opacity }));
		});
		for (const [feature, anchor, x] of [[0, "start", 0], [count / 2, "middle", width / 2], [count - 1, "end", width]])
			parts.push(s("text", { x, y: height - 2, "text-anchor": anchor, "font-size": 12, fill: "var(--soft)" }, String(feature)));
		this.sizeSvg(width, height);
		this.mark = s("g", {});
		put(this.svg, parts, this.mark);
		this.point = (pair) => {
			const [a, b] = features[pair];
			const blue = { stroke: "var(--query)", "stroke-width": 3 };
			const mark = [arc(a, b, blue), cell(a, { fill: "var(--query)" }), cell(b, { fill: "var(--query)" })];
			return { mark, x: (b + 0.5) * pitch, y: Math.max(line - reach(a, b), 34), lines: [this.options.describePair(pair, a, b)] };
		};
	}

	build() {
		const find = (event) => {
			const { features } = this.data;
			const feature = Math.floor((event.offsetX / this.width) * 2 * features.length);
			return features.findIndex((pair) => pair.includes(feature));
		};
		this.followCursor(() => this.data.features.length, find);
	}

	table({ features }) {
		return [["pair", "first feature", "second feature"], ...features.map(([a, b], pair) => [pair, a, b])];
	}
}

/** A figure of pairs. Options: name, note, describePair(pair, first, second). Its draw({ features: [[first, second], ...] }). */
export const pairingFigure = (parent, options) => new PairingFigure(parent, options);
