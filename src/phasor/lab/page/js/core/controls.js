// Controls: each with its label, its value, and a place for the sentence that says what is wrong with it.
//
// A control is described by an object:
//   { name, kind: "slider" | "number" | "select" | "toggle" | "text" | "file" | "button", label,
//     min, max, step, scale: "linear" | "log", format,        sliders; a value that is typed is not clamped
//     zero,                                                    a slider of scale "log" that begins with 0
//     options: [[value, text, group], ...],                    select; the group may be missing
//     rows, maxlength, placeholder,                            text
//     accept, onfile(file),  onclick(),                        file, button
//     field }                                                  its field in requests, if not `name`; or key.field

import { h, newId, put } from "./dom.js";
import { digits } from "./numbers.js";

const STEPS = 1000; // of a slider whose scale is logarithmic

/** A number that someone typed: separators, 2^20, 128k, 1e6; NaN where it is none, or has no end. */
export function parseNumber(text) {
	const value = readNumber(text);
	return Number.isFinite(value) ? value : NaN;
}

function readNumber(text) {
	const plain = text.trim().replaceAll(",", "").replaceAll("−", "-").replace(/\s+/g, "");
	const power = /^(-?\d+(?:\.\d+)?)(?:\^|\*\*)(-?\d+)$/.exec(plain);
	if (power) return Number(power[1]) ** Number(power[2]);
	const unit = /^(.*\d\.?)(k|m|g)i?$/i.exec(plain);
	if (unit) return Number(unit[1]) * { k: 1024, m: 1024 ** 2, g: 1024 ** 3 }[unit[2].toLowerCase()];
	return plain === "" ? NaN : Number(plain);
}

function roundTo(value, step) {
	if (!step) return Number(value.toPrecision(3));
	return Number((Math.round(value / step) * step).toPrecision(12));
}

function sliderScale({ min, max, step, scale, zero }) {
	if (scale !== "log") {
		return { from: min, to: max, step: step ?? (max - min) / 200, place: (v) => v, value: (p) => p };
	}
	const span = Math.log(max / min);
	return {
		from: 0,
		to: STEPS,
		step: 1,
		place: (value) => Math.round((Math.log(Math.max(value, min) / min) / span) * STEPS),
		value: (place) => zero && place === 0 ? 0 : roundTo(min * Math.exp((place / STEPS) * span), step),
	};
}

/** A box for a number, { box, show(value) }: what is being typed stays until the value changes. */
function makeBox(attributes, format, set) {
	let current;
	const write = () => (box.value = format(current));
	const box = h("input", {
		type: "text", autocomplete: "off", spellcheck: "false", ...attributes,
		onchange: () => {
			const value = parseNumber(box.value);
			if (Number.isNaN(value) || value === current) write();
			else set(value);
		},
		onkeydown: (event) => (event.key === "Escape" ? write() : attributes.onkeydown?.(event)),
	});
	const show = (value) => {
		const changed = value !== current;
		current = value;
		if (changed || document.activeElement !== box) write();
	};
	return { box, show };
}

function makeSlider(spec, set, ids) {
	const scale = sliderScale(spec);
	const format = spec.format ?? ((value) => digits(value, 6));
	const range = h("input", {
		type: "range", id: ids.input, min: scale.from, max: scale.to, step: scale.step, "aria-describedby": ids.error,
		oninput: () => set(scale.value(Number(range.value))),
		onkeydown: (event) => {
			const way = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1 }[event.key];
			if (spec.scale !== "log" || way === undefined) return;
			event.preventDefault(); // a step of the place may be less than a step of the value
			const here = scale.place(current);
			let next = here;
			do next += way;
			while (next > 0 && next < STEPS && scale.value(next) === current);
			set(scale.value(Math.min(Math.max(next, 0), STEPS)));
		},
	});
	const attributes = { class: "value", "aria-label": spec.label, "aria-describedby": ids.error, onfocus: ({ target }) => target.select() };
	const { box, show: showTyped } = makeBox(attributes, format, set);
	let current = spec.min;
	const show = (value) => {
		current = value;
		const place = scale.place(value);
		range.value = place;
		range.style.setProperty("--filled", `${(100 * (range.value - scale.from)) / (scale.to - scale.from || 1)}%`);
		range.setAttribute("aria-valuetext", format(value));
		showTyped(value);
		box.style.setProperty("width", `${Math.max(3, box.value.length) + 1}ch`);
	};
	return { body: [h("div", { class: "head" }, h("label", { for: ids.input }, spec.label), box), range], show };
}

function makeNumber(spec, set, ids) {
	const format = spec.format ?? ((value) => digits(value, 12));
	let current;
	const { box, show } = makeBox({
		inputmode: "decimal", class: "box", id: ids.input, "aria-describedby": ids.error,
		onkeydown: (event) => {
			const way = { ArrowUp: 1, ArrowDown: -1 }[event.key];
			if (way === undefined) return;
			event.preventDefault();
			const next = current + way * (spec.step ?? 1) * (event.shiftKey ? 10 : 1);
			set(Math.min(Math.max(next, spec.min ?? -Infinity), spec.max ?? Infinity));
		},
	}, format, set);
	return { body: [h("label", { for: ids.input }, spec.label), box], show: (value) => show((current = value)) };
}

/** The options of a list; those in a row that have the same group are below its name. */
function makeOptions(list) {
	const elements = [];
	for (const [value, text, group] of list) {
		const option = h("option", { value: String(value) }, text);
		if (group && elements.at(-1)?.label !== group) elements.push(h("optgroup", { label: group }));
		if (group) elements.at(-1).append(option);
		else elements.push(option);
	}
	return elements;
}

function makeSelect(spec, set, ids) {
	const input = h("select", { id: ids.input, "aria-describedby": ids.error, onchange: () => set(values[input.selectedIndex]) });
	let values = [];
	let listed = "";
	const options = (list) => {
		if (listed === JSON.stringify(list)) return; // a list that is open stays open
		listed = JSON.stringify(list);
		values = list.map(([value]) => value);
		put(input, makeOptions(list));
	};
	options(spec.options);
	const show = (value) => {
		input.selectedIndex = values.indexOf(value);
	};
	return { body: [h("label", { for: ids.input }, spec.label), input], show, options };
}

function makeToggle(spec, set, ids) {
	const input = h("input", {
		type: "checkbox", role: "switch", id: ids.input, "aria-describedby": ids.error, onchange: () => set(input.checked),
	});
	const show = (value) => {
		input.checked = value;
	};
	return { body: [h("label", { class: "switch", for: ids.input }, input, h("span", {}, spec.label))], show };
}

function makeText(spec, set, ids) {
	const { rows, maxlength, placeholder } = spec;
	const tag = rows ? "textarea" : "input";
	const input = h(tag, {
		id: ids.input, class: "box", rows, maxlength, placeholder, "aria-describedby": ids.error, spellcheck: "false",
		oninput: () => set(input.value),
	});
	const show = (value) => {
		if (input.value !== value) input.value = value;
	};
	return { body: [h("label", { for: ids.input }, spec.label), input], show };
}

function makeFile(spec, set, ids) {
	const input = h("input", {
		type: "file", id: ids.input, class: "unseen", accept: spec.accept, "aria-describedby": ids.error,
		onchange: () => {
			const [file] = input.files;
			if (file) spec.onfile(file);
			input.value = "";
		},
	});
	return { body: [h("label", { class: "opener" }, input, h("span", {}, spec.label))], show: () => {} };
}

function makeButton(spec, set, ids) {
	const input = h("button", { type: "button", id: ids.input, onclick: spec.onclick }, spec.label);
	return { body: [input], show: () => {} };
}

const KINDS = {
	slider: makeSlider, number: makeNumber, select: makeSelect, toggle: makeToggle, text: makeText, file: makeFile, button: makeButton,
};

/**
 * A row of controls in `parent`. `set({ name: value })` is called for a change. Returns
 * { refresh(state), options(name, list), toggle(name, visible), label(name, text), showError(field, sentence), clearErrors() }.
 */
export function makeControls(parent, specs, set) {
	const parts = new Map();
	const row = h("div", { class: "controls" });
	for (const spec of specs) {
		const ids = { input: newId(), error: newId() };
		const error = h("p", { class: "error", id: ids.error, role: "alert" });
		const part = KINDS[spec.kind](spec, (value) => set({ [spec.name]: value }), ids);
		const element = h("div", { class: `control ${spec.kind}`, "data-control": spec.name }, part.body, error);
		parts.set(spec.name, { ...part, spec, element, error, input: element.querySelector(`#${ids.input}`) });
		row.append(element);
	}
	parent.append(row);

	const find = (field) => {
		const fits = [...parts.values()].filter(({ spec }) => {
			const name = spec.field ?? spec.name;
			return field === name || field.startsWith(`${name}.`);
		});
		return fits.sort((a, b) => (b.spec.field ?? b.spec.name).length - (a.spec.field ?? a.spec.name).length)[0];
	};
	return {
		element: row,
		refresh(state) {
			for (const [name, part] of parts) if (name in state) part.show(state[name]);
		},
		options: (name, list) => parts.get(name).options(list),
		toggle(name, visible) {
			parts.get(name).element.hidden = !visible;
		},
		label(name, text) {
			const part = parts.get(name);
			const place = part.element.querySelector("label, button");
			(place.querySelector("span") ?? place).textContent = text;
		},
		showError(field, sentence) {
			const part = find(field);
			if (!part?.element.offsetParent) return false; // there is none in sight
			part.error.textContent = sentence;
			part.input.setAttribute("aria-invalid", "true");
			return true;
		},
		clearErrors() {
			for (const part of parts.values()) {
				if (part.error.textContent) part.error.textContent = "";
				part.input.removeAttribute("aria-invalid");
			}
		},
	};
}
