// Bars from a base line: up in one color, down in another, or each in its own.

import { put, s } from "../dom.js";
import { digits } from "../numbers.js";
import { Figure } from "./figure.js";
import { extent, makeScale, textWidth, tickText, ticks } from "./scale.js";

class BarChart extends Figure {
	static defaults = { height: 180, axis: true };

	paint(width, data) {
		const o = { ...this.options, ...data };
		const { values, labels } = data;
		const [low, high] = extent([values, [0]]);
		const domain = [o.min ?? Math.min(0, low), o.max ?? Math.max(0, high)];
		const marks = o.axis ? ticks("linear", domain, Math.max(2, Math.round(o.height / 50))) : [];
		const left = Math.max(0, ...marks.map((mark) => textWidth(tickText(mark)) + 8));
		const bottom = o.height - (labels ? 20 : 4);
		const y = makeScale("linear", domain, [bottom, 8]);
		const pitch = (width - left) / Math.max(1, values.length);
		const thick = Math.max(1, Math.min(pitch * 0.86, pitch - 1, 60));
		const parts = [];
		for (const mark of marks) {
			parts.push(s("line", { x1: left, x2: width, y1: y(mark), y2: y(mark), stroke: "var(--line)" }));
			parts.push(s("text", { x: left - 6, y: y(mark) + 4, "font-size": 12, "text-anchor": "end", fill: "var(--soft)" }, tickText(mark)));
		}
		let end = -Infinity;
		this.places = Array.from(values, (value, i) => {
			const middle = left + (i + 0.5) * pitch;
			const number = Number.isFinite(value) ? value : 0;
			const top = Math.min(y(number), y(0));
			const fill = o.colors?.[i] ?? (number >= 0 ? o.positive ?? "var(--agree)" : o.negative ?? "var(--oppose)");
			parts.push(s("rect", { x: middle - thick / 2, y: top, width: thick, height: Math.max(0.75, Math.abs(y(number) - y(0))), rx: Math.min(1.5, thick / 4), fill }));
			const words = labels?.[i];
			const wide = words === undefined ? 0 : textWidth(words);
			if (words !== undefined && middle - wide / 2 >= end + 6) {
				const x = Math.min(Math.max(middle, left + wide / 2), width - wide / 2);
				parts.push(s("text", { x, y: o.height - 4, "font-size": 12, "text-anchor": "middle", fill: "var(--soft)" }, words));
				end = x + wide / 2;
			}
			return { x: middle, y: top };
		});
		parts.push(s("line", { x1: left, x2: width, y1: y(0), y2: y(0), stroke: "var(--faint)" }));
		this.sizeSvg(width, o.height);
		this.mark = s("g", {});
		put(this.svg, parts, this.mark);
		this.frame = { left, pitch, bottom, o };
	}

	build() {
		this.followCursor(() => this.places.length, (event) => Math.floor((event.offsetX - this.frame.left) / this.frame.pitch));
	}

	point(i) {
		const { pitch, bottom, o } = this.frame;
		const { x, y } = this.places[i];
		const mark = s("rect", { x: x - pitch / 2, y: 4, width: pitch, height: bottom - 4, fill: "var(--ink)", opacity: 0.07 });
		const { values, labels, names } = this.data;
		const text = `${names?.[i] ?? labels?.[i] ?? i}: ${(o.format ?? ((value) => digits(value, 5)))(values[i])}`;
		return { mark, x, y: Math.max(30, y), lines: [text] };
	}

	table({ values, labels, names }) {
		return [["name", "value"], ...Array.from(values, (value, i) => [names?.[i] ?? labels?.[i] ?? i, value])];
	}
}

/**
 * Bars. Options: name, note, height, axis, positive, negative (colors), format. Its draw({ values, labels, names, colors,
 * min, max }): labels stand below where there is room, names are for the read-out.
 */
export const barChart = (parent, options) => new BarChart(parent, options);
