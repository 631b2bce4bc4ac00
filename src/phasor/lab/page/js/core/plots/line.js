// A line chart: curves with their names at their ends, bands, rules and points.

import { put, s } from "../dom.js";
import { digits } from "../numbers.js";
import { Figure } from "./figure.js";
import { extent, makeScale, textWidth, tickText, ticks } from "./scale.js";

const GAP = 15; // pixels between two names

function pathOf(xs, ys, x, y) {
	let path = "";
	let pen = "M";
	for (let i = 0; i < ys.length; i++) {
		const value = ys[i];
		const place = value === null ? NaN : y(value);
		if (!Number.isFinite(place)) {
			pen = "M";
			continue;
		}
		path += `${pen}${x(xs[i]).toFixed(1)},${place.toFixed(1)}`;
		pen = "L";
	}
	return path;
}

/** Places for names at the given heights, at least GAP apart and within [top, bottom]. */
function separateLabels(heights, top, bottom) {
	const order = heights.map((height, i) => [height, i]).sort((a, b) => a[0] - b[0]);
	const places = [];
	let last = top - GAP;
	for (const [height, i] of order) {
		last = places[i] = Math.max(height, last + GAP);
	}
	let next = bottom + GAP;
	for (const [, i] of order.reverse()) {
		next = places[i] = Math.min(places[i], next - GAP);
	}
	return places;
}

class LineChart extends Figure {
	static defaults = { x: {}, y: {} };
	cursor = null;

	scales(width, data) {
		const { height, x: xo, y: yo } = { ...this.options, ...data, x: { ...this.options.x, ...data.xAxis }, y: { ...this.options.y, ...data.yAxis } };
		const series = data.series.map((one) => ({ ...one, x: one.x ?? data.x ?? Array.from(one.y, (_, i) => i) }));
		const xKind = xo.scale ?? "linear";
		const yKind = yo.scale ?? "linear";
		const [x0, x1] = extent(series.map((one) => one.x), xKind === "log");
		const [y0, y1] = extent(series.map((one) => one.y), yKind === "log");
		const room = yKind === "log" ? 0 : (y1 - y0) * 0.05;
		const xDomain = [xo.min ?? x0, xo.max ?? x1];
		const yDomain = [yo.min ?? y0 - room, yo.max ?? y1 + room];
		const yTicks = yo.ticks ?? ticks(yKind, yDomain, Math.max(2, Math.round(height / (yKind === "log" ? 36 : 60))));
		const yText = yo.format ?? ((value) => tickText(value, yKind));
		const names = series.filter((one) => one.label).map((one) => textWidth(one.label, 13));
		const left = Math.max(20, ...yTicks.map((one) => textWidth(yText(one)) + 10));
		const right = names.length ? Math.min(Math.max(...names) + 12, width * 0.36) : 14;
		const top = yo.label ? 22 : 10;
		const bottom = height - (xo.label ? 40 : 24);
		const xTicks = xo.ticks ?? ticks(xKind, xDomain, Math.max(2, Math.round((width - left - right) / 90)));
		const x = makeScale(xKind, xDomain, [left, width - right]);
		const y = makeScale(yKind, yDomain, [bottom, top]);
		const xText = xo.format ?? ((value) => tickText(value, xKind));
		return { series, x, y, xo, yo, left, right: width - right, top, bottom, xTicks, yTicks, xText, yText, height };
	}

	paint(width, data) {
		const f = (this.frame = this.scales(width, data));
		const { x, y, left, right, top, bottom } = f;
		const inside = (value, scale) => value >= Math.min(...scale.domain) && value <= Math.max(...scale.domain);
		const text = (attributes, words) => s("text", { "font-size": 12, fill: "var(--soft)", ...attributes }, words);
		const parts = [];
		for (const band of data.bands ?? []) {
			const a = Math.max(left, Math.min(right, band.from === undefined ? left : x(band.from)));
			const b = Math.max(left, Math.min(right, band.to === undefined ? right : x(band.to)));
			const c = band.top === undefined ? top : Math.max(top, y(band.top));
			const d = band.bottom === undefined ? bottom : Math.min(bottom, y(band.bottom));
			parts.push(s("rect", { x: Math.min(a, b), y: c, width: Math.abs(b - a), height: Math.max(0, d - c), fill: band.color, opacity: band.opacity ?? 1 }));
			if (band.label && Math.abs(b - a) > textWidth(band.label)) parts.push(text({ x: (a + b) / 2, y: d - 8, "text-anchor": "middle", fill: band.textColor ?? "var(--soft)" }, band.label));
		}
		for (const mark of f.yTicks) {
			parts.push(s("line", { x1: left, x2: right, y1: y(mark), y2: y(mark), stroke: "var(--line)" }));
			parts.push(text({ x: left - 7, y: y(mark) + 4, "text-anchor": "end" }, f.yText(mark)));
		}
		parts.push(s("line", { x1: left, x2: right, y1: bottom, y2: bottom, stroke: "var(--faint)" }));
		let end = -Infinity;
		for (const mark of f.xTicks) {
			const words = f.xText(mark);
			const wide = textWidth(words);
			const middle = Math.min(Math.max(x(mark), left + wide / 2 - 6), width - wide / 2);
			if (middle - wide / 2 < end + 8) continue;
			end = middle + wide / 2;
			parts.push(s("line", { x1: x(mark), x2: x(mark), y1: bottom, y2: bottom + 4, stroke: "var(--faint)" }));
			parts.push(text({ x: middle, y: bottom + 18, "text-anchor": "middle" }, words));
		}
		if (f.xo.label) parts.push(text({ x: (left + right) / 2, y: f.height - 6, "text-anchor": "middle" }, f.xo.label));
		if (f.yo.label) parts.push(text({ x: 0, y: 12 }, f.yo.label));
		for (const rule of data.rules ?? []) {
			const stroke = { stroke: rule.color ?? "var(--soft)", "stroke-dasharray": rule.dash ?? "3 3" };
			if (rule.x !== undefined && inside(rule.x, x)) {
				parts.push(s("line", { x1: x(rule.x), x2: x(rule.x), y1: top, y2: bottom, ...stroke }));
				const flip = rule.label && x(rule.x) + textWidth(rule.label) + 8 > right;
				if (rule.label) parts.push(text({ x: x(rule.x) + (flip ? -5 : 5), y: top + 10, "text-anchor": flip ? "end" : "start", fill: rule.color ?? "var(--soft)" }, rule.label));
			}
			if (rule.y !== undefined && inside(rule.y, y)) {
				parts.push(s("line", { x1: left, x2: right, y1: y(rule.y), y2: y(rule.y), ...stroke }));
				if (rule.label) parts.push(text({ x: rule.labelX === undefined ? left + 6 : x(rule.labelX), y: y(rule.y) + (rule.below ? 14 : -5), fill: rule.color ?? "var(--soft)" }, rule.label));
			}
		}
		const clip = `clip${this.readoutId}`;
		parts.push(s("clipPath", { id: clip }, s("rect", { x: left, y: top - 3, width: Math.max(0, right - left), height: bottom - top + 6 })));
		const curves = s("g", { "clip-path": `url(#${clip})`, fill: "none", "stroke-linejoin": "round" });
		for (const one of f.series)
			curves.append(s("path", { d: pathOf(one.x, one.y, x, y), stroke: one.color ?? "var(--ink)", "stroke-width": one.width ?? 1.8, "stroke-dasharray": one.dash, opacity: one.opacity }));
		parts.push(curves);
		const named = f.series.filter((one) => one.label && one.y.length);
		const ends = named.map((one) => {
			let last = one.y.length - 1;
			while (last > 0 && (one.y[last] === null || !Number.isFinite(one.y[last]) || x(one.x[last]) > right + 1)) last--;
			return Math.min(Math.max(y(one.y[last]) || bottom, top), bottom);
		});
		separateLabels(ends, top, bottom).forEach((place, i) =>
			parts.push(text({ x: right + 7, y: place + 4, "font-size": 13, "font-weight": 600, fill: named[i].textColor ?? named[i].color ?? "var(--ink)" }, named[i].label)));
		for (const one of data.whiskers ?? [])
			parts.push(s("path", { d: `M${x(one.x)},${y(one.low)}V${y(one.high)}`, stroke: one.color, "stroke-width": 1.5, opacity: 0.7 }));
		for (const point of data.points ?? [])
			if (inside(point.x, x)) parts.push(s("circle", { cx: x(point.x), cy: y(point.y), r: point.r ?? 5, fill: point.color ?? "var(--ink)", stroke: "var(--paper)", "stroke-width": 1.5 }));
		this.mark = s("g", {});
		parts.push(this.mark);
		this.sizeSvg(width, f.height);
		put(this.svg, parts);
		if (this.cursor !== null) this.showCursor();
	}

	build() {
		this.svg.addEventListener("pointermove", (event) => this.moveTo(this.frame.x.invert(event.offsetX)));
		this.svg.addEventListener("pointerdown", (event) => this.options.onPick?.(this.frame.x.invert(event.offsetX)));
		this.svg.addEventListener("pointerleave", () => this.leave());
		this.svg.addEventListener("blur", () => this.leave());
		this.svg.addEventListener("keydown", (event) => {
			const { x, series } = this.frame;
			const list = series[0]?.x ?? [];
			const way = { ArrowLeft: -1, ArrowRight: 1, PageDown: -10, PageUp: 10, Home: -list.length, End: list.length }[event.key];
			if (event.key === "Escape") this.leave();
			if (event.key === "Enter" && this.cursor !== null) this.options.onPick?.(this.cursor);
			if (way === undefined || !list.length) return;
			event.preventDefault();
			const here = this.cursor === null ? (way > 0 ? -1 : list.length) : nearest(list, this.cursor, x);
			this.moveTo(list[Math.min(Math.max(here + way, 0), list.length - 1)], true);
		});
	}

	moveTo(value, aloud = false) {
		this.cursor = value;
		this.showCursor(aloud);
	}

	leave() {
		this.cursor = null;
		put(this.mark);
		this.hideTip();
	}

	showCursor(aloud = false) {
		const { series, x, y, top, bottom, left, right, xo, yo } = this.frame;
		if (!series.length) return;
		const at = nearest(series[0].x, this.cursor, x);
		const here = series[0].x[at];
		const px = x(here);
		if (!(px >= left - 1 && px <= right + 1)) return;
		const format = yo.readout ?? yo.format ?? ((value) => digits(value, 5));
		const lines = [`${xo.name ?? xo.label ?? "x"} ${(xo.readout ?? xo.format ?? ((value) => digits(value, 6)))(here)}`];
		const dots = [];
		for (const one of series) {
			const i = one.x === series[0].x ? at : nearest(one.x, here, x);
			const value = one.y[i];
			if (value === null || !Number.isFinite(value)) continue;
			lines.push([`${one.name ?? one.label ?? ""} ${format(value)}`.trim(), one.color ?? "var(--ink)"]);
			dots.push(s("circle", { cx: x(one.x[i]), cy: y(value), r: 3.5, fill: one.color ?? "var(--ink)" }));
		}
		put(this.mark, s("line", { x1: px, x2: px, y1: top, y2: bottom, stroke: "var(--faint)" }), dots);
		this.showTip(px, top + 40, lines, aloud);
	}

	table({ x, series, xAxis }) {
		const shared = series.every((one) => (one.x ?? x) === (series[0].x ?? x));
		const head = xAxis?.name ?? this.options.x.name ?? this.options.x.label ?? "x";
		const name = (one, i) => one.name ?? one.label ?? `y${i + 1}`;
		if (shared && series.length) {
			const xs = series[0].x ?? x ?? series[0].y.map((_, i) => i);
			return [[head, ...series.map(name)], ...Array.from(xs, (value, i) => [value, ...series.map((one) => one.y[i])])];
		}
		const rows = series.flatMap((one, i) => Array.from(one.y, (value, j) => [name(one, i), (one.x ?? x ?? [])[j] ?? j, value]));
		return [["series", head, "y"], ...rows];
	}
}

function nearest(list, value, scale) {
	let low = 0;
	let high = list.length - 1;
	while (high - low > 1) {
		const middle = (low + high) >> 1;
		if (list[middle] > value) high = middle;
		else low = middle;
	}
	return high >= 0 && Math.abs(scale(list[high]) - scale(value)) < Math.abs(scale(list[low]) - scale(value)) ? high : low;
}

/**
 * A line chart. Options: name, note, height, x and y: { label, name, scale: "linear" | "log", min, max, ticks, format,
 * readout }, onPick(x). Its draw({ x, series: [{ label, name, x, y, color, dash, width }], bands: [{ from, to, top, bottom,
 * label, color }], rules: [{ x | y, label, labelX, below, color, dash }], points: [{ x, y, color }],
 * whiskers: [{ x, low, high, color }], xAxis, yAxis }); x ascends.
 */
export const lineChart = (parent, options) => new LineChart(parent, options);
