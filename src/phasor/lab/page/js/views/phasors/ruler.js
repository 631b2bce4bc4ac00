// A ruler with two handles, the query and the key, which are dragged or moved by the arrow keys.

import { h, put, s } from "../../core/dom.js";
import { integer } from "../../core/numbers.js";
import { textWidth } from "../../core/plots/scale.js";

const HEIGHT = 78;
const LINE = 44; // the height of the ruler's line
const EDGE = 16;

/**
 * A ruler over `span` positions in `parent`. `handles` are [{ name, letter, color, label }]; `move({ name: value })` is called
 * for a change. Its draw(values, start, distance) shows the handles, positions from `start` on, and the distance as a text.
 */
export function makeRuler(parent, { span, label, handles, move }) {
	const back = s("g", {});
	const knobs = handles.map((handle) => {
		const knob = s(
			"g",
			{ role: "slider", tabindex: 0, class: "knob", "aria-label": handle.label, "aria-valuemin": 0, "aria-valuemax": span - 1 },
			s("circle", { r: 20, fill: "transparent" }),
			s("circle", { r: 12, fill: handle.color, stroke: "var(--paper)", "stroke-width": 2 }),
			s("text", { y: 5, "text-anchor": "middle", "font-size": 14, "font-weight": 700, fill: "var(--paper)" }, handle.letter),
		);
		knob.addEventListener("keydown", (event) => {
			const way = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -16, PageUp: 16, Home: -span, End: span }[event.key];
			if (way === undefined) return;
			event.preventDefault();
			place(handle, values[handle.name] + way * (event.shiftKey ? 8 : 1));
		});
		return knob;
	});
	const marks = [...Array.from({ length: Math.ceil(span / 16) }, (_, i) => 16 * i), span - 1];
	const svg = s("svg", { class: "ruler", role: "group", "aria-label": label, height: HEIGHT }, back, knobs);
	const box = h("div", { class: "plot drawing" }, svg);
	parent.append(box);

	let values = {};
	let start = 0;
	let distance = "";
	let width = 0;
	let dragged = null;

	const x = (value) => EDGE + (value / (span - 1)) * (width - 2 * EDGE);
	const place = (handle, value) => {
		const inside = Math.min(Math.max(Math.round(value), 0), span - 1);
		if (inside !== values[handle.name]) move({ [handle.name]: inside });
	};
	const at = (event) => ((event.clientX - svg.getBoundingClientRect().left - EDGE) / (width - 2 * EDGE)) * (span - 1);

	svg.addEventListener("pointerdown", (event) => {
		const here = at(event);
		const own = knobs.findIndex((knob) => knob.contains(event.target));
		const nearest = handles.reduce((a, b) => (Math.abs(values[b.name] - here) < Math.abs(values[a.name] - here) ? b : a));
		dragged = own < 0 ? nearest : handles[own];
		svg.setPointerCapture(event.pointerId);
		knobs[handles.indexOf(dragged)].focus({ preventScroll: true });
		event.preventDefault();
		place(dragged, here);
	});
	svg.addEventListener("pointermove", (event) => dragged && place(dragged, at(event)));
	for (const end of ["pointerup", "pointercancel"]) svg.addEventListener(end, () => (dragged = null));

	const paint = () => {
		width = Math.floor(box.clientWidth);
		if (width < 2 * EDGE) return;
		svg.setAttribute("width", width);
		const parts = [s("line", { x1: EDGE, x2: width - EDGE, y1: LINE, y2: LINE, stroke: "var(--faint)", "stroke-width": 2 })];
		let end = -Infinity;
		for (const mark of marks) {
			parts.push(s("line", { x1: x(mark), x2: x(mark), y1: LINE - 4, y2: LINE + 4, stroke: "var(--faint)" }));
			const words = integer(start + mark);
			const wide = textWidth(words, 12);
			const middle = Math.min(Math.max(x(mark), wide / 2), width - wide / 2);
			if ((mark % 64 && mark !== span - 1) || middle - wide / 2 < end + 10) continue;
			end = middle + wide / 2;
			parts.push(s("text", { x: middle, y: LINE + 30, "text-anchor": "middle", "font-size": 12, fill: "var(--soft)" }, words));
		}
		const [a, b] = handles.map((handle) => x(values[handle.name])).sort((one, two) => one - two);
		const half = textWidth(distance, 14) / 2;
		parts.push(s("path", { d: `M${a},${LINE - 13}V${LINE - 21}H${b}V${LINE - 13}`, fill: "none", stroke: "var(--ink)" }));
		parts.push(
			s("text", { x: Math.min(Math.max((a + b) / 2, half), width - half), y: LINE - 28, "text-anchor": "middle", "font-size": 14, "font-weight": 600, fill: "var(--ink)" }, distance),
		);
		put(back, parts);
		handles.forEach((handle, i) => {
			const value = values[handle.name];
			knobs[i].setAttribute("transform", `translate(${x(value)},${LINE})`);
			knobs[i].setAttribute("aria-valuenow", value);
			knobs[i].setAttribute("aria-valuetext", integer(start + value));
		});
	};
	const observer = new ResizeObserver(() => Math.floor(box.clientWidth) !== width && paint());
	observer.observe(box);

	return {
		draw(newValues, newStart, newDistance) {
			[values, start, distance] = [newValues, newStart, newDistance];
			paint();
		},
		close: () => observer.disconnect(),
	};
}
