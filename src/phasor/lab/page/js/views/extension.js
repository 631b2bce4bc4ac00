// The view "extension": what each method of reading further does to the pairs of a rotary scheme.

import { about } from "../core/about.js";
import { h, makeTable, put, rich } from "../core/dom.js";
import { digits, fixed, integer } from "../core/numbers.js";
import { dials } from "../core/plots/dials.js";
import { lineChart } from "../core/plots/line.js";
import { texts } from "./extension.texts.js";

export const id = "extension";
export { texts };

const METHODS = about.extensions;
const SHOWN = ["none", "linear", "ntk", "yarn"]; // at first
const HUES = { none: "c6", linear: "c1", ntk: "c4", "dynamic-ntk": "c4", yarn: "c3", "dynamic-yarn": "c3", llama3: "c5", longrope: "c5", proportional: "c1", model: "ink", other: "c2" };
const colorOf = (row) => `var(--${HUES[row.id] ?? "c6"})`;
const DASHES = { none: "5 4", "dynamic-ntk": "7 3", "dynamic-yarn": "7 3", longrope: "7 3", proportional: "2 3" };
const EFFECTS = ["kept", "blended", "slowed", "faster", "still"];
const HANDS = 8;
const CONFIG_BYTES = 2 ** 20; // of a config.json, as the server has it

// The fields of methods by their names in requests. `state` is the name in the address where it is another one; methods
// of one kind share the state. A text that is left empty stands for what the library chooses.
const slider = (name, min, max, more) => ({ name, kind: "slider", min, max, scale: "log", ...more });
const optional = (name, placeholder = "automatic") => ({ name, kind: "text", placeholder, maxlength: 3000 });
const RAMP = [
	slider("beta_fast", 1, 256), slider("beta_slow", 0.1, 32), { name: "truncate", kind: "toggle" },
	optional("attention"), optional("mscale"), optional("mscale_all_dim"),
];
const FIELDS = {
	yarn: RAMP,
	"dynamic-yarn": RAMP,
	"dynamic-ntk": [slider("factor", 1, 16, { state: "growth" })],
	llama3: [slider("low_freq_factor", 0.25, 16), slider("high_freq_factor", 0.5, 64)],
	longrope: [optional("short_factor", "ones"), optional("long_factor", "ramp"), optional("attention")],
	proportional: [{ name: "fraction", kind: "slider", min: 0.05, max: 1, step: 0.05 }],
};

export const defaults = {
	model: "llama-2", trained: 4096, times: 8, base: 10000, dim: 128, method: "yarn", other: "",
	...Object.fromEntries(METHODS.map((method) => [method, SHOWN.includes(method)])),
	beta_fast: 32, beta_slow: 1, truncate: true, attention: "", mscale: "", mscale_all_dim: "", growth: 1, low_freq_factor: 1,
	high_freq_factor: 4, short_factor: "", long_factor: "", fraction: 0.5,
};

const parseOptional = (word) => (word.trim() && Number.isFinite(Number(word)) ? Number(word) : word);
const isFile = (model) => model.includes(",");

/** An opened file in the address: its name, and the fields of the request as paths with their values. */
function formatModel(name, request) {
	const parts = [name.replace(/[,:]/g, " ") || "config.json"];
	const walk = (value, path) => {
		if (Array.isArray(value)) parts.push(`${path}:${value.join("*")}*`);
		else if (typeof value === "object") for (const [key, one] of Object.entries(value)) walk(one, path ? `${path}.${key}` : key);
		else parts.push(`${path}:${value}`);
	};
	walk(request, "");
	return parts.join(",");
}

/** A model of the state, a preset's name or an opened file: { name, request }. */
function parseModel(text) {
	if (!isFile(text)) return { name: text, request: { preset: text } };
	const [name, ...parts] = text.split(",");
	const request = {};
	const parse = (word) => (/^(true|false)$/.test(word) ? word === "true" : parseOptional(word));
	for (const part of parts) {
		const [path, value = ""] = part.split(":");
		const keys = path.split(".");
		const last = keys.pop();
		let place = request;
		for (const key of keys) place = place[key] = Object.assign(Object.create(null), place[key]);
		place[last] = value.endsWith("*") ? value.slice(0, -1).split("*").map(parse) : parse(value);
	}
	return { name, request };
}

/** The fields of a method that are not at rest, as a request has them. */
function givenFields(method, state) {
	const given = {};
	for (const { name, kind, state: key = name } of FIELDS[method] ?? []) {
		const value = state[key];
		if (value === defaults[key]) continue;
		if (kind !== "text") given[name] = value;
		else if (name.endsWith("_factor")) given[name] = value.split(/[\s,;]+/).filter(Boolean).map(parseOptional);
		else given[name] = parseOptional(value);
	}
	return given;
}

function makeRequest(state) {
	const chosen = METHODS.filter((method) => state[method]);
	const methods = chosen.length ? chosen : ["none"];
	const fields = {};
	for (const method of methods) {
		const given = givenFields(method, state);
		if (Object.keys(given).length) fields[method] = given;
	}
	const { base, dim: head_dim, trained: trained_length, times: factor } = state;
	const other = state.other ? parseModel(state.other).request : null;
	return { model: parseModel(state.model).request, base, head_dim, trained_length, factor, methods, fields, other };
}

export function render(root, state, tools) {
	const { t } = tools;
	const methodName = (method) => (method in texts.en ? t(method) : method);
	const header = tools.header(root);
	header.set(t("titleStart"), t("lead"));
	const opened = { model: null, other: null };
	let presets = [];
	let last = null;
	let opening = 0;

	/** Take the settings of an opened model into the state. */
	function take(which, index) {
		const { name, schemes } = opened[which];
		const scheme = schemes[index];
		const model = scheme.model.preset ?? formatModel(name, scheme.model);
		if (which === "other") return tools.set({ other: model });
		const times = scheme.extension && scheme.factor > 1 ? scheme.factor : defaults.times;
		return tools.set({ model, trained: scheme.trained_length, times, base: scheme.base, dim: scheme.head_dim });
	}
	async function open(which, request, name) {
		opening++;
		const answer = await tools.post("open", request, `open-${which}`);
		opening--;
		if (!answer) return tools.refresh();
		opened[which] = { name, schemes: answer.schemes };
		if (which === "model")
			modelRow.options("scheme", answer.schemes.map((scheme, i) => [i, `${scheme.layers} (base ${digits(scheme.base)})`]));
		return take(which, 0);
	}
	async function openFile(which, file) {
		const key = `open-${which}`;
		if (file.size > CONFIG_BYTES) tools.mistake(key, t("tooLarge", { name: file.name }), "text");
		else open(which, { text: await file.text() }, file.name);
	}
	const pick = (row, name, work) => row.element.querySelector(`[data-control="${name}"] select`).addEventListener("change", (event) => work(event.target));
	const fileOf = (which, name) => ({ name, kind: "file", label: t("file"), accept: ".json", field: `open-${which}.text`, onfile: (file) => openFile(which, file) });

	const modelRow = tools.controls(root, [
		{ name: "model", kind: "select", label: t("model"), options: [[state.model, parseModel(state.model).name]] },
		fileOf("model", "file"),
		{ name: "scheme", kind: "select", label: t("layers"), options: [[0, ""]] },
		{ name: "trained", kind: "slider", label: t("trained"), min: 128, max: 1048576, step: 64, scale: "log", format: integer, field: "trained_length" },
		{ name: "times", kind: "slider", label: t("times"), min: 1, max: 128, step: 0.5, scale: "log", format: (value) => digits(value, 4), field: "factor" },
		{ name: "base", kind: "slider", label: t("base"), min: 100, max: 1e7, step: 100, scale: "log", format: (value) => digits(value, 7) },
		{ name: "dim", kind: "slider", label: t("dim"), min: 8, max: 512, step: 8, format: integer, field: "head_dim" },
	]);
	pick(modelRow, "model", ({ value }) => !isFile(value) && open("model", { preset: value }, value));
	pick(modelRow, "scheme", ({ selectedIndex }) => take("model", selectedIndex));

	const shown = h("div", { class: "choices", role: "group", "aria-label": t("show") }, h("span", { class: "note" }, t("show")));
	root.append(shown);

	const detail = h("div", { class: "controls joined" }); // the method and its fields stand in one grid
	root.append(detail);
	const methodRow = tools.controls(detail, [
		{ name: "method", kind: "select", label: t("method"), options: METHODS.filter((method) => method !== "none").map((method) => [method, methodName(method)]) },
	]);
	const fieldRows = Object.entries(FIELDS).map(([method, specs]) => {
		const row = tools.controls(detail, specs.map(({ state: key, placeholder, ...spec }) => ({
			...spec, name: key ?? spec.name, label: t(key ?? spec.name), field: `fields.${method}.${spec.name}`, placeholder: placeholder && t(placeholder),
		})));
		return { method, row, names: specs.map(({ name, state: key = name }) => key) };
	});
	// After the fields, so that a mistake in one of them is shown there.
	tools.controls(shown, METHODS.map((method) => ({ name: method, kind: "toggle", label: methodName(method), field: `fields.${method}` })));
	pick(methodRow, "method", ({ value }) => tools.set({ [value]: true }));

	const keys = h("p", { class: "keys" }, ["seen", "new", "never"].map((one) => h("span", {}, h("i", { style: { background: `var(--${one})` } }), t(one))));
	const dialFigure = dials(root, { name: t("dials"), size: 56, gap: 12, least: 34 });
	dialFigure.element.querySelector("figcaption").after(keys);
	dialFigure.element.classList.add("drawing");

	const left = h("div", { class: "stack" });
	const right = h("div", { class: "stack" });
	root.append(h("div", { class: "halves" }, left, right));
	const byPair = (name) => ({ x: { label: t("pair"), format: integer }, y: { scale: "log", name, readout: (value) => digits(value, 6) } });
	const waves = lineChart(left, { height: 470, ...byPair(t("wavelength")) });
	const tableTitle = h("h2", {});
	const table = h("div", { class: "scroll", tabindex: 0, role: "region" });
	const trade = h("p", { class: "aside" });
	left.append(trade);
	right.append(h("section", {}, tableTitle, table));
	const similarity = lineChart(right, { name: t("similarity"), note: t("similarityNote"), height: 240, x: { scale: "log", label: t("distance") }, y: { readout: (value) => fixed(value, 4) } });

	const compareBox = h("section", { class: "stack" }, h("h2", {}, t("compare")));
	root.append(compareBox);
	const otherRow = tools.controls(compareBox, [
		{ name: "other", kind: "select", label: t("other"), options: [["", t("nobody")]] },
		fileOf("other", "otherFile"),
	]);
	pick(otherRow, "other", () => tools.mistake("open-other", null));
	const both = h("div", { class: "halves" });
	const ratioBox = h("div", {});
	const ratio = lineChart(ratioBox, { height: 240, ...byPair(t("ratioName")) });
	const differences = h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": t("differ") });
	both.append(h("section", {}, h("h3", {}, t("differ")), differences), ratioBox);
	compareBox.append(both);

	const resize = () => last && drawDials(last, visible(last)); // as many dials as there is room for
	addEventListener("resize", resize);
	tools.onClose(() => removeEventListener("resize", resize));
	tools.post("presets", {}).then((answer) => {
		presets = answer ?? [];
		tools.refresh();
	});

	const rowName = (row) => {
		if (row.id === "model") return parseModel(state.model).name;
		if (row.id !== "other") return methodName(row.id);
		const name = parseModel(state.other).name;
		return name === parseModel(state.model).name ? `${name} (2)` : name;
	};

	const styleOf = (row) => ({ label: rowName(row), color: colorOf(row), dash: DASHES[row.id], width: row.id === state.method ? 2.6 : 1.5 });

	function showModels() {
		const options = presets.map(({ name }) => [name, name]);
		const withFile = (model, list) => (model && !list.some(([value]) => value === model) ? [...list, [model, parseModel(model).name]] : list);
		modelRow.options("model", withFile(state.model, options));
		otherRow.options("other", withFile(state.other, [["", t("nobody")], ...options]));
		modelRow.refresh({ model: state.model });
		otherRow.refresh({ other: state.other });
		modelRow.toggle("scheme", isFile(state.model) && (opened.model?.schemes.length ?? 0) > 1);
		for (const { method, row, names } of fieldRows) {
			for (const name of names) row.toggle(name, method === state.method);
			row.element.hidden = method !== state.method;
		}
	}

	function drawTitle(answer, rows) {
		const plain = answer.rows.find((row) => row.id === "none") ?? answer.rows[0];
		const focus = rows.find((row) => row.id === state.method);
		const values = {
			times: digits(answer.factor, 4), pairs: plain?.effects.length, plain: plain?.counts.new, method: focus && rowName(focus), count: focus?.counts.new,
		};
		const which = !plain?.counts.new ? "titleNone" : !focus || focus === plain ? "titlePlain" : focus.counts.new ? "titleSome" : "title";
		header.set(t(which, values), t("lead"));
	}

	function drawDials(answer, rows) {
		const most = Math.max(0, ...rows.map((row) => row.effects.length));
		const count = Math.min(most, dialFigure.fit(rows.map(rowName)), 20);
		const of = (pairs) => [...new Set(Array.from({ length: count }, (_, i) => Math.round((i * (pairs - 1)) / Math.max(1, count - 1))))];
		const sameCount = rows.every((row) => row.effects.length === most);
		const valueNames = ["pair", "seen", "reached", "new"];
		dialFigure.caption(t("dials"), t("dialsNote", { trained: integer(answer.trained_length), length: integer(answer.length) }));
		dialFigure.draw({
			wrap: false, valueNames, heads: sameCount ? of(most).map((i, n) => (n === 0 ? `${t("pair")} ${i}` : String(i))) : undefined,
			rows: rows.map((row) => ({
				label: rowName(row), color: colorOf(row),
				dials: of(row.effects.length).map((i) => ({ ...makeDial(row, i), label: sameCount ? undefined : String(i) })),
			})),
		});
	}

	function makeDial(row, i) {
		const [seen, reached, fresh] = ["seen", "reached", "new"].map((name) => row.angles[name][i]);
		const turn = 2 * Math.PI;
		const wave = row.pairs.extended_wavelength[i];
		const frequency = row.pairs.extended_frequency[i];
		const rays = { angles: Array.from({ length: HANDS }, (_, token) => token * frequency), length: 0.68, width: 1 };
		const arc = (name, from, to) => ({ from: from * turn, to: to * turn, color: `var(--${name})`, width: 5 });
		const arcs = [arc("never", 0, 1), arc("seen", 0, seen), ...(fresh > 0 ? [arc("new", seen, reached)] : [])];
		const lines = [
			`${rowName(row)}, ${t("pair")} ${i}: ${t(row.effects[i])}`,
			wave === null ? t("readStill") : t("readWave", { tokens: digits(wave, 5) }),
			t("readSeen", { share: fixed(seen, 3) }),
			fresh > 0 ? t("readNew", { share: fixed(fresh, 3) }) : t("readNoNew"),
		];
		return { readout: lines, rays, arcs, values: [i, seen, reached, fresh] };
	}

	function drawWaves(answer, rows) {
		const focus = rows.find((row) => row.id === state.method);
		const longest = Math.max(...rows.flatMap((row) => row.pairs.extended_wavelength.filter((wave) => wave !== null)));
		const bands = [{ bottom: answer.trained_length, color: "var(--new)", opacity: 0.08 }];
		for (const run of focus ? runsOf(focus.effects) : []) {
			const strong = { blended: 0.2, slowed: 0.1 }[run.effect] ?? 0;
			bands.push({ from: run.from - 0.5, to: run.to + 0.5, top: answer.trained_length, color: colorOf(focus), opacity: strong, label: t(run.effect), textColor: colorOf(focus) });
		}
		const indices = Object.fromEntries(rows.map((row) => [row.effects.length, row.pairs.index])); // one list for rows of one size
		waves.caption(t("waves"), t("wavesNote", { method: focus ? rowName(focus) : "–" }));
		waves.draw({
			series: rows.map((row) => ({
				...styleOf(row), x: indices[row.effects.length], y: row.pairs.extended_wavelength,
			})),
			bands,
			rules: [
				{ y: answer.trained_length, label: t("trainedRule", { tokens: integer(answer.trained_length) }), color: "var(--ink)", dash: "none" },
				{ y: answer.length, label: t("lengthRule", { tokens: integer(answer.length) }) },
			],
			yAxis: { min: 5, max: longest * 1.6 },
		});
	}

	function drawTable(answer, rows) {
		const effects = EFFECTS.filter((effect, i) => i < 3 || rows.some((row) => row.counts[effect]));
		tableTitle.textContent = t("table", { pairs: rows[0]?.effects.length ?? 0 });
		table.setAttribute("aria-label", tableTitle.textContent);
		const head = ["", ...effects.map((effect) => t(effect)), t("newAngles"), t("step"), t("factor")];
		put(table, makeTable(head, rows.map((row) => [
			[h("i", { class: "swatch", style: { background: colorOf(row) } }), rowName(row), ownFactor(row)],
			...effects.map((effect) => row.counts[effect]),
			row.counts.new ? h("strong", { class: "key" }, row.counts.new) : 0,
			fixed(row.pairs.extended_frequency[0], 3),
			fixed(row.report.attention_factor, 3),
		])));
		const [flat] = rows.filter((row) => row.pairs.slowed[0] > 1.0005).sort((a, b) => b.pairs.slowed[0] - a.pairs.slowed[0]);
		const kept = rows.filter((row) => row.id !== "none" && row.effects[0] === "kept");
		const best = kept.find((row) => row.id === state.method) ?? kept[0];
		put(trade, rich(flat && best ? t("trade", { flat: rowName(flat), times: digits(flat.pairs.slowed[0], 3), best: rowName(best) }) : t("tradeNone")));
		trade.hidden = Boolean(flat && !best);
	}

	function drawSimilarity(answer, rows) {
		const curves = new Map(answer.rows.map((row) => [row.id, row.similarity.slice(1)]));
		similarity.draw({
			x: answer.distances.slice(1),
			series: rows.map((row) => ({ ...styleOf(row), y: curves.get(row.id) ?? [] })),
			rules: [{ y: 0, dash: "none", color: "var(--faint)" }, { x: answer.trained_length, label: t("trainedRule", { tokens: integer(answer.trained_length) }) }],
		});
	}

	function drawComparison(answer) {
		both.hidden = !answer.differences;
		if (!answer.differences) return;
		const [model, other] = answer.rows.slice(-2);
		const say = (value) => {
			if (Array.isArray(value)) return `${value.slice(0, 3).map((one) => digits(one)).join(", ")}, …`;
			return typeof value === "number" ? digits(value, 7) : String(value ?? "–");
		};
		const head = [t("field"), rowName(model), rowName(other)];
		put(differences, answer.differences.length
			? makeTable(head, answer.differences.map((one) => [one.field, say(one.model), say(one.other)]))
			: h("p", { class: "note" }, t("same")));
		const alike = model.effects.length === other.effects.length;
		if (!alike) differences.append(h("p", { class: "note" }, t("unlike", { one: model.effects.length, two: other.effects.length })));
		ratioBox.hidden = !alike;
		if (!alike) return;
		ratio.caption(t("ratio", { model: rowName(model), other: rowName(other) }), t("ratioNote", { length: integer(answer.length) }));
		const waves = (row, i) => row.pairs.extended_wavelength[i];
		const y = model.pairs.index.map((i) => (waves(model, i) && waves(other, i) ? waves(other, i) / waves(model, i) : null));
		const range = [1, ...y.filter((one) => one !== null)];
		ratio.draw({
			series: [{ label: rowName(other), x: model.pairs.index, y, color: colorOf(other), width: 2.2 }],
			rules: [{ y: 1, label: rowName(model), dash: "none", color: "var(--ink)" }],
			yAxis: { min: Math.min(...range) / 1.5, max: Math.max(...range) * 1.8 },
		});
	}

	return async (now) => {
		if (opening) return;
		showModels();
		const body = makeRequest(now);
		const [answer, curves] = await Promise.all([
			tools.post("methods", body).then((found) => {
				if (found) draw(found);
				return found;
			}),
			tools.post("similarity", body),
		]);
		if (answer && curves) drawSimilarity(curves, visible(answer));
	};

	/** Rows in the order they are shown; a model without an extension is the one that is not extended. */
	function visible(answer) {
		const hasPlain = answer.rows.some((row) => row.id === "none");
		return answer.rows.filter((row) => !(row.id === "model" && !row.extension && hasPlain));
	}

	function draw(answer) {
		const rows = visible(answer);
		last = answer;
		drawTitle(answer, rows);
		drawDials(answer, rows);
		drawWaves(answer, rows);
		drawTable(answer, rows);
		drawComparison(answer);
	}
}

/** Runs of equal effects: [{ effect, from, to }]. */
function runsOf(effects) {
	const runs = [];
	effects.forEach((effect, i) => {
		if (runs.at(-1)?.effect === effect) runs.at(-1).to = i;
		else runs.push({ effect, from: i, to: i });
	});
	return runs;
}

/** The method and the factor of a model's own extension. */
function ownFactor(row) {
	const extension = row.report.settings.extension;
	if (!extension || (row.id !== "model" && row.id !== "other")) return null;
	return h("span", { class: "note" }, ` ${extension.kind}${extension.factor ? ` ×${digits(extension.factor)}` : ""}`);
}
