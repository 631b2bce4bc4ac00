// Axes: from numbers to pixels, and where their marks stand.

import { compact, digits, superscript } from "../numbers.js";

/** A scale of a kind, "linear" or "log", from a domain [low, high] to pixels [from, to]. */
export function makeScale(kind, [low, high], [from, to]) {
	const forth = kind === "log" ? Math.log10 : (value) => value;
	const back = kind === "log" ? (value) => 10 ** value : (value) => value;
	const start = forth(low);
	const span = forth(high) - start || 1;
	const scale = (value) => from + ((forth(value) - start) / span) * (to - from);
	scale.invert = (pixel) => back(start + ((pixel - from) / (to - from)) * span);
	scale.domain = [low, high];
	scale.kind = kind;
	return scale;
}

/** Round numbers within a domain, about `count` of them. */
export function ticks(kind, [low, high], count = 5) {
	if (kind === "log") {
		const first = Math.ceil(Math.log10(low) - 1e-9);
		const last = Math.floor(Math.log10(high) + 1e-9);
		const every = Math.max(1, Math.ceil((last - first + 1) / count));
		const found = [];
		for (let power = first; power <= last; power += every) found.push(10 ** power);
		return found.length > 1 ? found : [low, high];
	}
	const raw = (high - low) / count || 1;
	const unit = 10 ** Math.floor(Math.log10(raw));
	const step = [1, 2, 2.5, 5, 10].find((one) => one * unit >= raw * 0.999) * unit;
	const found = [];
	for (let mark = Math.ceil(low / step - 1e-9); mark * step <= high + step * 1e-9; mark++)
		found.push(Number((mark * step).toPrecision(12)));
	return found;
}

/** The text of a mark. */
export function tickText(value, kind) {
	const size = Math.abs(value);
	if (kind === "log" && (size < 1e-3 || size >= 1e6)) {
		const power = Math.log10(size);
		return Number.isInteger(Number(power.toFixed(9))) ? `10${superscript(Math.round(power))}` : digits(value, 2);
	}
	return size >= 1e4 ? compact(value) : digits(value, 4);
}

/** The least and greatest finite number of some lists, or [0, 1]. */
export function extent(lists, positive = false) {
	let low = Infinity;
	let high = -Infinity;
	for (const list of lists)
		for (const value of list) {
			if (value === null || !Number.isFinite(value) || (positive && value <= 0)) continue;
			if (value < low) low = value;
			if (value > high) high = value;
		}
	if (low > high) return positive ? [1, 10] : [0, 1];
	if (low === high) return positive ? [low / 2, high * 2] : [low - 0.5, high + 0.5];
	return [low, high];
}

let family;
const ruler = document.createElement("canvas").getContext("2d");

/** The width of a text in pixels. */
export function textWidth(text, size = 12, weight = size > 12 ? 600 : 400) {
	family ??= getComputedStyle(document.body).fontFamily; // asking for it has the browser compute all styles
	ruler.font = `${weight} ${size}px ${family}`;
	return ruler.measureText(String(text)).width;
}
