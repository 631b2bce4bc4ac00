// Diagrams of residual blocks: the stream from bottom to top, branches to its right.

import { put, s } from "../dom.js";
import { Figure } from "./figure.js";
import { textWidth } from "./scale.js";

const WIDE = 176;
const TALL = 210;

// From bottom to top: what stands on the branch, and what stands on the stream above the sum.
const SHAPES = {
	pre: { branch: ["norm", "f"], stream: [] },
	post: { branch: ["f"], stream: ["norm"] },
	sandwich: { branch: ["norm", "f", "norm"], stream: [] },
	deepnorm: { branch: ["f"], stream: ["norm"], factor: "α" },
	output: { branch: ["f", "norm"], stream: [] },
	parallel: { shared: "norm", branch: ["attention"], second: ["feedforward"], stream: [] },
};

function drawBlock(x, { kind, equation, color }, words) {
	const { branch, second, shared, stream, factor } = SHAPES[kind];
	const parts = [];
	const line = (d) => parts.push(s("path", { d, fill: "none", stroke: "var(--soft)", "stroke-width": 1.5 }));
	const box = (cx, cy, name) => {
		const isNorm = name === "norm";
		const wide = Math.max(44, textWidth(words[name], 13) + 16);
		parts.push(s("rect", { x: cx - wide / 2, y: cy - 11, width: wide, height: 22, rx: 5, fill: isNorm ? "var(--card)" : color, stroke: color, "stroke-width": 1.5 }));
		parts.push(s("text", { x: cx, y: cy + 4.5, "text-anchor": "middle", "font-size": 13, fill: isNorm ? "var(--ink)" : "var(--paper)", "font-weight": isNorm ? 400 : 600 }, words[name]));
	};
	const [main, side, far] = second ? [x + 22, x + 72, x + 132] : [x + 36, x + 108];
	const [bottom, fork] = [TALL - 34, TALL - 46];
	const sum = stream.length ? 76 : 48;
	const top = 24;
	line(`M${main},${bottom}V${sum + 8}M${main},${sum - 8}V${top}`);
	parts.push(s("path", { d: `M${main - 4},${top + 5}L${main},${top - 2}L${main + 4},${top + 5}z`, fill: "var(--soft)" }));
	const places = (count) => Array.from({ length: count }, (_, i) => fork - ((fork - sum) * (i + 1)) / (count + 1));
	if (shared) {
		line(`M${main},${fork}H${side}V${sum}H${main + 8}M${side},${fork - 34}H${far}V${sum}H${side}`);
		box(side, fork - 16, shared);
		box(side, sum + 26, branch[0]);
		box(far, sum + 26, second[0]);
	} else {
		line(`M${main},${fork}H${side}V${sum}H${main + 8}`);
		places(branch.length).forEach((y, i) => box(side, y, branch[i]));
	}
	parts.push(s("circle", { cx: main, cy: sum, r: 8, fill: "var(--card)", stroke: "var(--soft)", "stroke-width": 1.5 }));
	parts.push(s("path", { d: `M${main - 4},${sum}h8M${main},${sum - 4}v8`, stroke: "var(--ink)", "stroke-width": 1.5 }));
	if (stream.length) box(main, sum - 28, stream[0]);
	if (factor) {
		parts.push(s("circle", { cx: main, cy: (sum + fork) / 2, r: 9, fill: "var(--card)", stroke: color, "stroke-width": 1.5 }));
		parts.push(s("text", { x: main, y: (sum + fork) / 2 + 4, "text-anchor": "middle", "font-size": 13, fill: "var(--ink)" }, factor));
	}
	parts.push(s("text", { x: main + 8, y: bottom, "font-size": 13, "font-style": "italic", fill: "var(--soft)" }, "x"));
	parts.push(s("text", { x: x + 4, y: 12, "font-size": 13, "font-weight": 600, fill: color }, kind));
	parts.push(s("text", { x: x + 4, y: TALL - 10, "font-size": 12, fill: "var(--soft)" }, equation));
	return s("g", {}, parts);
}

class BlockDiagram extends Figure {
	paint(width, { blocks, words }) {
		const columns = Math.max(1, Math.min(blocks.length, Math.floor(width / WIDE)));
		const pitch = Math.min(width / columns, WIDE * 1.3);
		const rows = Math.ceil(blocks.length / columns);
		const parts = blocks.map((block, i) =>
			s("g", { transform: `translate(${((i % columns) * pitch).toFixed(1)},${Math.floor(i / columns) * (TALL + 14)})` }, drawBlock(0, block, words)));
		this.frame = { columns, pitch };
		this.mark = s("g", {});
		parts.push(this.mark);
		this.sizeSvg(width, rows * (TALL + 14));
		put(this.svg, parts);
	}

	build() {
		this.followCursor(() => this.data.blocks.length);
	}

	point(i) {
		const { kind, equation } = this.data.blocks[i];
		const { columns, pitch } = this.frame;
		const [x, y] = [(i % columns) * pitch, Math.floor(i / columns) * (TALL + 14)];
		const mark = s("rect", { x, y: y + 1, width: pitch - 6, height: TALL - 4, rx: 8, fill: "none", stroke: "var(--ink)", "stroke-width": 1.5 });
		return { mark, x, y: y + 60, lines: [kind, equation] };
	}

	table({ blocks }) {
		return [["placement", "equation"], ...blocks.map(({ kind, equation }) => [kind, equation])];
	}
}

/** Diagrams of placements. Its draw({ blocks: [{ kind, equation, color }], words }) shows them beside each other. */
export const blockDiagram = (parent, options) => new BlockDiagram(parent, options);
