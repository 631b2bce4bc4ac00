// Dials: circles with hands and arcs, in rows under common heads or wrapped like words.

import { put, s } from "../dom.js";
import { Figure } from "./figure.js";
import { textWidth } from "./scale.js";

const point = (x, y, r, angle) => [x + r * Math.cos(angle), y - r * Math.sin(angle)];

function arcPath(x, y, r, from, to) {
	const span = to - from;
	if (Math.abs(span) >= 2 * Math.PI - 1e-6) return `M${x + r},${y}A${r},${r} 0 1 0 ${x - r},${y}A${r},${r} 0 1 0 ${x + r},${y}`;
	const [x1, y1] = point(x, y, r, from);
	const [x2, y2] = point(x, y, r, to);
	return `M${x1.toFixed(2)},${y1.toFixed(2)}A${r},${r} 0 ${Math.abs(span) > Math.PI ? 1 : 0} ${span > 0 ? 0 : 1} ${x2.toFixed(2)},${y2.toFixed(2)}`;
}

function drawDial(dial, x, y, r) {
	const parts = [s("circle", { cx: x, cy: y, r, fill: "var(--card)", stroke: "var(--line)" })];
	for (const { from, to, color, opacity = 0.3 } of dial.wedges ?? []) {
		const whole = Math.abs(to - from) >= 2 * Math.PI - 1e-6;
		parts.push(s("path", { d: arcPath(x, y, r, from, to) + (whole ? "" : `L${x},${y}Z`), fill: color, opacity }));
	}
	for (const { from, to, color, width = 4, radius = 1 } of dial.arcs ?? []) {
		const at = r * radius - width / 2;
		parts.push(s("path", { d: arcPath(x, y, at, from, to), fill: "none", stroke: color, "stroke-width": width }));
	}
	if (dial.rays) {
		const { angles, color = "var(--ink)", width = 1, length = 0.7 } = dial.rays;
		const ends = angles.map((angle) => point(x, y, r * length, angle).map((one) => one.toFixed(2)));
		parts.push(s("path", { d: ends.map((end) => `M${x},${y}L${end}`).join(""), stroke: color, "stroke-width": width, opacity: 0.75 }));
	}
	for (const { angle, color = "var(--ink)", width = 2.5, length = 0.85, opacity } of dial.hands ?? []) {
		const [x2, y2] = point(x, y, r * length, angle);
		parts.push(s("line", { x1: x, y1: y, x2: x2.toFixed(2), y2: y2.toFixed(2), stroke: color, "stroke-width": width, "stroke-linecap": "round", opacity }));
	}
	if (dial.hands?.length) parts.push(s("circle", { cx: x, cy: y, r: 2, fill: "var(--ink)" }));
	return parts;
}

class Dials extends Figure {
	static defaults = { size: 72, least: 34, gap: 14, text: 12 };

	/** How many dials of a row with a label stand beside each other at the current width. */
	fit(labels = []) {
		const width = this.box.clientWidth || 360;
		const { size, gap } = this.options;
		return Math.max(4, Math.floor((width - this.labelWidth(labels, width)) / (size + gap)));
	}

	labelWidth(labels, width) {
		const most = Math.max(0, ...labels.map((label) => textWidth(label ?? "", 13)));
		return most && width > 560 ? most + 14 : 0; // on a narrow page the label stands above its row
	}

	paint(width, data) {
		const { size, least, gap, text } = this.options;
		const rows = data.rows ?? [{ dials: data.dials }];
		const labels = rows.map((row) => row.label);
		const left = this.labelWidth(labels, width);
		const most = Math.max(1, ...rows.map((row) => row.dials.length));
		const free = width - left;
		const room = Math.max(1, Math.floor((free + gap) / (size + gap)));
		const columns = data.wrap === false ? most : Math.ceil(most / Math.ceil(most / room)); // lines of about equal length
		const pitch = Math.min(free / columns, size * 1.45);
		const r = Math.max(least / 2, Math.min(size, pitch - gap / 2) / 2);
		const parts = [];
		const write = (x, y, words, more) => parts.push(s("text", { x, y, "font-size": text, "text-anchor": "middle", fill: "var(--soft)", ...more }, words));
		this.places = [];
		let y = 2;
		if (data.heads) {
			data.heads.forEach((head, i) => write(left + (i + 0.5) * pitch, y + text, head));
			y += text + 8;
		}
		for (const row of rows) {
			const name = (at) => row.label && write(0, at, row.label, { "text-anchor": "start", "font-weight": 600, "font-size": 13, fill: row.color ?? "var(--ink)" });
			if (!left && name(y + 13)) y += 20;
			const lines = Math.ceil(row.dials.length / columns);
			const below = row.dials.some((dial) => dial.label !== undefined) ? text + 8 : 4;
			if (left) name(y + r + 5);
			row.dials.forEach((dial, i) => {
				const x = left + ((i % columns) + 0.5) * pitch;
				const top = y + Math.floor(i / columns) * (2 * r + below + 6);
				parts.push(s("g", {}, drawDial(dial, x, top + r, r)));
				if (dial.label !== undefined) write(x, top + 2 * r + text + 2, dial.label, dial.labelColor && { fill: dial.labelColor });
				this.places.push({ x, y: top + r, r, dial });
			});
			y += lines * (2 * r + below + 6);
		}
		this.sizeSvg(width, Math.ceil(y));
		this.mark = s("g", {});
		put(this.svg, parts, this.mark);
		if (this.at !== undefined) this.moveTo(this.at);
	}

	build() {
		const near = (event) => ({ x, y, r }) => Math.hypot(event.offsetX - x, event.offsetY - y) <= r;
		this.followCursor(() => this.places.length, (event) => this.places.findIndex(near(event)));
	}

	point(i) {
		const { x, y, r, dial } = this.places[i];
		const mark = s("circle", { cx: x, cy: y, r: r + 2, fill: "none", stroke: "var(--ink)", "stroke-width": 1.5 });
		return { mark, x: x + r, y: y - r + 10, lines: dial.readout };
	}

	table(data) {
		const rows = data.rows ?? [{ dials: data.dials }];
		const list = rows.flatMap((row) => row.dials.map((dial, i) => [row.label ?? "", dial.label ?? i, ...(dial.values ?? dial.hands ?? []).map((one) => one.angle ?? one)]));
		const most = Math.max(0, ...list.map((row) => row.length - 2));
		const names = data.valueNames ?? Array.from({ length: most }, (_, i) => `angle ${i + 1}`);
		return [["row", "dial", ...names], ...list];
	}
}

/**
 * Dials. Angles are in radians, counterclockwise from the right. Options: name, note, size, least, gap.
 * Its draw({ dials: [dial, ...] }) wraps them; draw({ rows: [{ label, color, dials }], heads, wrap: false }) has rows. A dial is
 * { label, readout: lines, hands: [{ angle, color, width, length }], arcs: [{ from, to, color, width }],
 * wedges: [{ from, to, color, opacity }], rays: { angles, color, width, length }, values } where values go into CSV under
 * valueNames, and rays are many thin hands. fit() says how many fit in a row.
 */
export const dials = (parent, options) => new Dials(parent, options);
