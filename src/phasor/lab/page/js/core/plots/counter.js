// Numbers in binary, one below the other: a bit is a wave twice as slow as the bit before it.

import { put, s } from "../dom.js";
import { integer } from "../numbers.js";
import { Figure } from "./figure.js";

const COLORS = ["var(--c2)", "var(--c1)", "var(--c3)", "var(--c5)", "var(--c4)", "var(--c6)"];

class BinaryCounter extends Figure {
	paint(width, { start, count, bits, row }) {
		const { height } = this.options;
		const pitch = Math.min(width / bits, 30);
		const tall = height / count;
		const gap = Math.min(1, tall / 4);
		const parts = [];
		for (let bit = 0; bit < bits; bit++) {
			const fill = COLORS[bit % COLORS.length];
			let path = "";
			for (let i = 0; i < count; i++)
				if ((start + BigInt(i)) & (1n << BigInt(bit)))
					path += `M${(bit * pitch + 1).toFixed(1)},${(i * tall + gap / 2).toFixed(1)}h${(pitch - 3).toFixed(1)}v${(tall - gap).toFixed(1)}h${(3 - pitch).toFixed(1)}z`;
			parts.push(s("path", { d: path, fill }));
			const one = (start + BigInt(row)) & (1n << BigInt(bit));
			const at = { x: (bit + 0.5) * pitch - 1, y: height + 18, "text-anchor": "middle", "font-size": 15, "font-weight": 700 };
			parts.push(s("text", { ...at, fill: one ? fill : "var(--soft)" }, one ? "1" : "0"));
		}
		parts.push(s("rect", { x: 0.5, y: row * tall, width: Math.max(0, bits * pitch - 2), height: tall, fill: "none", stroke: "var(--ink)", "stroke-width": 1.75 }));
		this.mark = s("g", {});
		parts.push(this.mark);
		this.sizeSvg(width, height + 24);
		put(this.svg, parts);
	}

	build() {
		this.followCursor(() => this.data.count, (event) => Math.floor((event.offsetY / this.options.height) * this.data.count));
	}

	pick(row) {
		this.options.onPick?.(row);
	}

	point(row) {
		const { start, count, bits } = this.data;
		const tall = this.options.height / count;
		const position = start + BigInt(row);
		const mark = s("rect", { x: 0, y: row * tall, width: this.width, height: tall, fill: "var(--ink)", opacity: 0.15 });
		const low = [...BigInt.asUintN(bits, position).toString(2).padStart(bits, "0")].reverse().join("");
		return { mark, x: 0, y: row * tall + 30, lines: [integer(position), low] };
	}

	table({ start, count, bits }) {
		const names = Array.from({ length: bits }, (_, bit) => `bit ${bit}`);
		return [["position", ...names], ...Array.from({ length: count }, (_, i) => {
			const position = start + BigInt(i);
			return [position, ...names.map((_, bit) => Number((position >> BigInt(bit)) & 1n))];
		})];
	}
}

/** A binary counter. Options: name, note, height, onPick(row). Its draw({ start: BigInt, count, bits, row }), lowest bit first. */
export const binaryCounter = (parent, options) => new BinaryCounter(parent, options);
