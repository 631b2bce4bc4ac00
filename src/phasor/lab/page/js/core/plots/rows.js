// Rows with a bar each: a name on the left, a bar, and its value at the bar's end.

import { put, s } from "../dom.js";
import { Figure } from "./figure.js";
import { textWidth } from "./scale.js";

const TALL = 26; // pixels of a row

class RowChart extends Figure {
	paint(width, { values, labels }) {
		const shown = (this.shown = values.map(this.options.format));
		const left = Math.min(Math.max(...labels.map((label) => textWidth(label, 14, 400))) + 12, width * 0.4);
		const right = Math.max(...shown.map((text) => textWidth(text, 13))) + 10;
		const gain = (width - left - right) / Math.max(...values);
		const parts = values.flatMap((value, i) => {
			const y = i * TALL + 18;
			const end = left + Math.max(1, value * gain);
			return [
				s("text", { x: left - 10, y, "font-size": 14, "text-anchor": "end", fill: "var(--ink)" }, clip(labels[i], left - 10)),
				s("rect", { x: left, y: y - 14, width: end - left, height: TALL - 8, rx: 1.5, fill: "var(--c1)" }),
				s("text", { x: end + 6, y, "font-size": 13, fill: "var(--soft)" }, shown[i]),
			];
		});
		this.sizeSvg(width, values.length * TALL);
		this.mark = s("g", {});
		put(this.svg, this.mark, parts);
	}

	build() {
		this.followCursor(() => this.shown.length, (event) => Math.floor(event.offsetY / TALL));
	}

	moveTo(i, aloud = false) {
		this.at = i in this.shown ? i : undefined;
		put(this.mark, i in this.shown && s("rect", { y: i * TALL, width: this.width, height: TALL, fill: "var(--ink)", opacity: 0.06 }));
		if (aloud) this.spoken.textContent = `${this.data.labels[i]}: ${this.shown[i]}`;
	}

	table({ values, labels }) {
		return [["name", "value"], ...values.map((value, i) => [labels[i], value])];
	}
}

/** A text that is cut where it is wider than a number of pixels. */
function clip(text, width) {
	let cut = text;
	while (cut.length > 1 && textWidth(cut, 14, 400) > width) cut = `${cut.slice(0, -2)}…`;
	return cut;
}

/** Rows with bars. Options: name, note, format. Its draw({ values, labels }). */
export const rowChart = (parent, options) => new RowChart(parent, options);
