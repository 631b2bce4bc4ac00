// Encodings: what every position scheme gives each position, beside a binary counter, and which criteria it meets.

import { h, put } from "../core/dom.js";
import { compact, digits, fixed, integer } from "../core/numbers.js";
import { angles, parseIncrements } from "../core/phase.js";
import { barChart } from "../core/plots/bars.js";
import { binaryCounter } from "../core/plots/counter.js";
import { dials } from "../core/plots/dials.js";
import { heatMap } from "../core/plots/heat.js";
import { lineChart } from "../core/plots/line.js";
import { format } from "../core/i18n.js";
import { describePlaces, listSchemes, schemeOptions } from "../core/schemes.js";
import { texts } from "./encodings.texts.js";

export const id = "encodings";
export { texts };

export const defaults = {
	s: "sinusoidal", t: 11, dim: 128, n: 64, start: 0, base: 10000, layout: "halves", pairing: "half", head: 1, side: "decoder",
	max_bias: 8, num_buckets: 32, max_distance: 128, decay: 512, k: 5, std: 0.5, width: 32,
};

const FIELDS = ["base", "layout", "pairing", "decay", "max_bias", "num_buckets", "max_distance"]; // of schemes, with a control each
const HEADS = 8;
const CARDS = 5; // asked for at once
const HEIGHT = 480;
const CRITERIA = ["unique", "consistent", "bounded", "deterministic"];

/** The configuration of a scheme, as a request has it. */
const makePosition = ({ kind, fields }, state) => Object.fromEntries([["kind", kind], ...FIELDS.filter((name) => fields.includes(name)).map((name) => [name, state[name]])]);

/** Where a scheme has cosines and sines: what the two of a pair are called, and whether they are in halves; else null. */
function findPairs({ fields }, { layout, pairing }) {
	if (fields.includes("layout")) return { names: ["sin", "cos"], halves: layout === "halves", note: "halvesNote" };
	return fields.includes("pairing") ? { names: ["cos", "sin"], halves: pairing === "half", note: "rotaryNote" } : null;
}

const percent = (value) => `${digits(100 * value, 3)}\u00a0%`;

export function render(root, state, tools) {
	const { t } = tools;
	const schemes = listSchemes(tools);
	const chosen = () => schemes.find((scheme) => scheme.kind === state.s) ?? { kind: state.s, acts_on: [], fields: [] };
	const onScores = (scheme) => scheme.acts_on.includes("scores");
	const header = tools.header(root);
	header.set(t("encodings"), ""); // until there is something found
	const properties = h("p", { class: "note" });
	root.append(properties);
	const first = tools.controls(root, [
		{ name: "s", kind: "select", label: t("scheme"), options: schemeOptions(schemes, t), field: "position" },
		{ name: "t", kind: "slider", label: t("position"), min: 0, max: 255, step: 1 },
		{ name: "dim", kind: "slider", label: t("dim"), min: 8, max: 256, step: 8 },
		{ name: "n", kind: "slider", label: t("length"), min: 16, max: 256, step: 8, field: "length" },
		{ name: "base", kind: "slider", label: t("base"), min: 10, max: 1e6, scale: "log", field: "position.base", format: integer },
		{ name: "start", kind: "number", label: t("start"), min: 0, max: 2 ** 36, format: integer },
		{ name: "layout", kind: "select", label: t("layout"), options: ["halves", "interleaved"].map((one) => [one, t(one)]), field: "position.layout" },
		{ name: "pairing", kind: "select", label: t("pairing"), options: ["half", "adjacent"].map((one) => [one, t(one)]), field: "position.pairing" },
		{ name: "decay", kind: "slider", label: t("decay"), min: 16, max: 4096, scale: "log", step: 1, field: "position.decay" },
		{ name: "head", kind: "slider", label: t("head"), min: 1, max: HEADS, step: 1 },
		{ name: "side", kind: "select", label: t("side"), options: ["decoder", "encoder"].map((one) => [one, t(one)]) },
		{ name: "max_bias", kind: "slider", label: t("max_bias"), min: 1, max: 16, step: 0.5, field: "position.max_bias" },
		{ name: "num_buckets", kind: "slider", label: t("num_buckets"), min: 8, max: 64, step: 4, field: "position.num_buckets" },
		{ name: "max_distance", kind: "slider", label: t("max_distance"), min: 33, max: 512, step: 1, field: "position.max_distance" },
	]);

	const top = h("div", { class: "counter drawing" });
	const left = h("div", {});
	const right = h("div", { class: "stack" });
	root.append(put(top, left, right));
	const pick = (row) => tools.set({ t: Math.min(Math.max(row, 0), state.n - 1) });
	const counter = binaryCounter(left, { name: t("binary"), height: HEIGHT, onPick: pick });
	const matrix = heatMap(right, { name: t("matrix"), height: HEIGHT, rowName: t("position"), onPick: ({ row }) => pick(row) });
	const rowChart = lineChart(right, { name: " ", height: 150, x: { name: t("feature") } });

	const middle = h("div", { class: "halves level" });
	root.append(middle);
	const similarity = lineChart(middle, { name: t("similarity"), height: 240, x: { label: t("distance") } });
	const nearest = lineChart(middle, { name: t("nearest"), height: 240, x: { label: t("feature") } });

	const rotationControls = tools.controls(root, [{ name: "k", kind: "slider", label: t("shift"), min: 0, max: 128, step: 1, field: "shift" }]);
	const rotationDials = dials(root, { name: t("rotated"), size: 72 });
	const rotationText = h("p", { class: "aside" });
	root.append(rotationText);

	const card = h("table", { class: "criteria" });
	const cardNote = h("span", { class: "note" });
	root.append(h("section", { class: "stack tight" }, h("h2", {}, t("card")), cardNote, card));

	const sumControls = h("section", { class: "stack" }, h("h2", {}, t("sumTitle")));
	root.append(sumControls);
	tools.controls(sumControls, [
		{ name: "std", kind: "slider", label: t("token_std"), min: 0.01, max: 10, scale: "log", field: "token_std" },
		{ name: "width", kind: "slider", label: t("width"), min: 2, max: 256, step: 2 },
	]);
	const both = h("div", { class: "halves" });
	sumControls.append(both);
	const deviations = barChart(both, { name: t("moves"), height: 190, positive: "var(--c1)" });
	const sumTable = h("table", {});
	const sumText = h("p", { class: "aside" });
	both.append(h("div", { class: "stack tight" }, sumTable, h("p", { class: "note" }, t("readNote")), sumText));

	let codes = null; // the last matrix, with the state it was asked for
	let shown = null; // the last facts
	let increments = [];
	let rotation = null;
	const beside = h("div", { class: "stack" }); // the map of a bias: charts are to its right
	let arranged = null;

	/** The cards of all schemes, a few at a time: what a slider asks for next does not wait for all of them. */
	async function askCards(body) {
		let found = await tools.postChanged("criteria", { ...body, first: 0, count: CARDS });
		if (!found) return null;
		for (let part = found; part.length === CARDS; found = found.concat(part)) {
			part = await tools.post("criteria", { ...body, first: found.length, count: CARDS });
			if (!part) return null;
		}
		return found;
	}

	function showControls() {
		const scheme = chosen();
		const scores = onScores(scheme);
		for (const name of FIELDS) first.toggle(name, scheme.fields.includes(name));
		for (const name of ["head", "side"]) first.toggle(name, scores);
		for (const name of ["start", "dim"]) first.toggle(name, !scores);
		sumControls.hidden = !scheme.fields.includes("combine");
		left.hidden = scores;
		top.classList.toggle("wide", scores);
		if (arranged === scores) return;
		arranged = scores;
		right.className = scores ? "halves" : "stack";
		put(right, matrix.element, scores ? put(beside, rowChart.element, similarity.element, nearest.element) : rowChart.element);
		put(middle, scores ? null : [similarity.element, nearest.element]);
	}

	const row = () => Math.min(Math.max(Math.round(state.t), 0), codes.shape[0] - 1);

	/** What a column of the matrix is, in words. */
	function columnName({ names, halves }, count, column) {
		return halves ? `${names[column < count ? 0 : 1]} ${column % count}` : `${names[column % 2]} ${column >> 1}`;
	}

	function drawMatrix() {
		const { scheme, start, head, pairs, data } = codes;
		const [rows, columns] = codes.shape;
		const scores = onScores(scheme);
		const at = row();
		const label = (i) => integer(BigInt(start) + BigInt(i));
		const half = columns / 2;
		const columnLabels = [];
		if (scores) for (let j = 0; j < columns; j += 16) columnLabels[j] = String(j);
		else if (pairs?.halves) for (const j of [0, half - 1, half, columns - 1]) columnLabels[j] = columnName(pairs, half, j);
		else [columnLabels[0], columnLabels[columns - 1]] = ["0", String(columns - 1)];
		matrix.caption(scores ? t("biasMap") : t("matrix"), scores ? t("biasNote", { head }) : t(pairs?.halves ? pairs.note : "matrixNote"));
		const wave = pairs !== null && data.every((value) => Math.abs(value) < 1 + 1e-6);
		const palette = scores && !data.some((value) => value > 0) ? "sequential" : "diverging";
		matrix.draw({
			data, shape: codes.shape, palette, marks: [{ row: at }], columnLabels,
			square: scores, maxHeight: 560, min: wave ? -1 : undefined, max: wave ? 1 : undefined,
			readout: ({ row: i, column }, value) => [
				scores ? `query ${i}, key ${column}` : `${t("position")} ${label(i)}, ${pairs ? columnName(pairs, half, column) : `${t("feature")} ${column}`}`, digits(value, 5),
			],
		});
		const values = data.subarray(at * columns, (at + 1) * columns);
		rowChart.caption(t(scores ? "biasRow" : "rowOf", { row: label(at) }), t(scores ? "biasRowNote" : "rowNote"));
		rowChart.draw({ series: [{ y: values, name: "" }], xAxis: { name: scores ? "key" : t("feature") }, yAxis: wave ? { min: -1.1, max: 1.1, ticks: [-1, 0, 1] } : {} });
		if (!scores) {
			const bits = Math.max(4, Math.ceil(Math.log2(rows)));
			counter.draw({ start: BigInt(start), count: rows, bits, row: at });
		}
	}

	function title() {
		const { scheme, nearest: pair, similarity: curves, bias, buckets } = shown;
		const last = shown.count - 1;
		const values = { count: shown.count, last };
		if (pair) values.percent = percent(pair.relative);
		if (curves) [values.one, values.far] = [fixed(curves.mean[1], 2), percent(curves.mean[last])];
		if (buckets) values.used = new Set(buckets).size;
		if (bias) {
			const slopes = bias.map((curve) => -curve[1]).sort((a, b) => a - b);
			const costs = bias.map((curve) => -curve[last]);
			Object.assign(values, { steep: digits(-slopes.at(-1), 3), flat: digits(-slopes[0], 3), least: digits(Math.min(...costs), 3), cost: digits(Math.max(...costs), 3) });
		}
		header.set(format(scheme.headline, values), format(scheme.about, values));
		const { shift_invariant: shifts, depends_on_length: lengths, learned, axes } = scheme;
		put(properties, [
			t("actsOn", { places: describePlaces(scheme, t) }), t(shifts ? "shiftSame" : "shiftOther"), lengths && t("byLength"), axes > 1 && t("manyAxes", { axes }), t(learned ? "withWeights" : "noWeights"),
		].filter(Boolean).join(" · "));
	}

	function drawFacts() {
		const { scheme, nearest: pair, similarity: curves, bias, buckets } = shown;
		const pairSeries = (read) => [[pair.a, "query"], [pair.b, "key"]].map(([at, name]) => ({ y: read(at), label: integer(at), color: `var(--${name})`, textColor: `var(--${name}-text)` }));
		if (bias) {
			similarity.caption(t("biasBy"), t("biasByNote"));
			similarity.draw({ series: bias.map((y, i) => ({ y, label: t("headName", { head: i + 1 }), color: `var(--c${1 + (i % 6)})`, dash: i < 6 ? undefined : "6 3", width: i + 1 === shown.head ? 3 : 1.4 })) });
			if (buckets) {
				nearest.caption(t("bucket"), t("bucketNote"));
				nearest.draw({ series: [{ y: buckets, name: t("bucket") }], xAxis: { label: t("distance") } });
			} else {
				nearest.caption(t("nearestBias"), t("nearestBiasNote", pair));
				const heads = bias.map((_, i) => i + 1);
				nearest.draw({ x: heads, series: pairSeries((at) => bias.map((curve) => curve[at])), xAxis: { label: t("head"), ticks: heads } });
			}
			return;
		}
		similarity.caption(t("similarity"), t(scheme.acts_on.includes("queries") ? "scoreNote" : "similarityNote"));
		const wide = curves.most.some((most, i) => most - curves.least[i] > 1e-9);
		const series = [{ y: curves.mean, label: wide ? t("mean") : undefined, name: t("mean"), color: "var(--ink)" }];
		if (wide) for (const name of ["least", "most"]) series.push({ y: curves[name], label: t(name), color: name === "least" ? "var(--c1)" : "var(--c2)", width: 1.3 });
		similarity.draw({ series, rules: [{ y: 0, dash: "none", color: "var(--faint)" }] });
		nearest.caption(t("nearest"), t(pair.relative < 1e-9 ? "nearestSame" : "nearestNote", { a: integer(pair.a), b: integer(pair.b), percent: percent(pair.relative) }));
		const columns = codes.shape[1];
		const rowAt = (position) => codes.data.subarray((position - codes.start) * columns, (position - codes.start + 1) * columns);
		if (codes.scheme === scheme && codes.start <= pair.a && pair.b < codes.start + codes.shape[0])
			nearest.draw({ series: pairSeries(rowAt), xAxis: { label: t("feature") } });
	}

	function drawRotation() {
		const has = increments.length > 0;
		rotationDials.element.hidden = !has;
		rotationControls.element.hidden = !has;
		if (!has) {
			put(rotationText, t("noRotation"));
			return;
		}
		const at = state.start + row();
		const later = at + state.k;
		const [before, after] = [angles(increments, at), angles(increments, later)];
		const step = angles(increments, state.k);
		const most = Math.min(increments.length, 24);
		const list = Array.from({ length: most }, (_, i) => Math.round((i * (increments.length - 1)) / Math.max(1, most - 1)));
		rotationDials.caption(t("rotated"), t("rotatedNote", { t: integer(at), later: integer(later) }));
		rotationDials.draw({
			valueNames: ["angle of t", "angle of t + k"],
			dials: list.map((pair) => ({
				label: compact(2 ** 64 / Math.abs(Number(increments[pair]))),
				hands: [{ angle: after[pair], color: "var(--key)" }, { angle: before[pair], color: "var(--query)" }],
				wedges: [{ from: before[pair], to: before[pair] + step[pair], color: "var(--soft)", opacity: 0.18 }],
				readout: [t("pairName", { pair }), [`${digits(before[pair], 5)} rad`, "var(--query)"], [`${digits(after[pair], 5)} rad`, "var(--key)"]],
			})),
		});
		if (rotation) put(rotationText, t(rotation.error < 1e-6 ? "rotatedText" : "scaledText", { t: integer(rotation.t), later: integer(rotation.later), error: digits(rotation.error, 2) }));
	}

	function drawCard(cards, length) {
		put(cardNote, t("cardNote", { length }));
		const by = Object.fromEntries(cards.map((one) => [one.kind, one]));
		const found = {
			unique: ({ nearest: pair }) => (pair.relative < 1e-9 ? t("sameCode", pair) : t("nearestIs", { percent: percent(pair.relative) })),
			consistent: ({ change }) => (change < 1e-9 ? t("noChange") : t("changes", { percent: percent(change) })),
			bounded: ({ holds, refused, near, far, far_length: length }) => (refused ? t("refused", { length: compact(length) }) : t(holds ? "upTo" : "grows", { from: compact(near), size: compact(far), length: compact(length) })),
			deterministic: ({ holds, learned }) => t(!holds ? "follows" : learned ? "learned" : "fixed"),
		};
		const cell = (name, one) =>
			h("td", { class: one.holds ? "yes" : "no" }, h("b", { "aria-label": t(one.holds ? "yes" : "no"), role: "img" }, one.holds ? "✓" : "✗"), h("span", {}, found[name](one)));
		put(
			card,
			h("thead", {}, h("tr", {}, h("th", { scope: "col" }, t("scheme")), CRITERIA.map((name) => h("th", { scope: "col" }, h("span", { class: "long" }, t(name)), h("span", { class: "short" }, t(`${name}Short`)))))),
			h("tbody", {}, schemes.map(({ kind, name: schemeName }) =>
				h("tr", {}, h("th", { scope: "row" }, h("button", { type: "button", class: "plain", onclick: () => { tools.set({ s: kind }); scrollTo({ top: 0 }); } }, schemeName)), CRITERIA.map((name) => cell(name, by[kind][name]))))),
		);
		markRow(chosen());
	}

	/** Mark the row of a scheme in the table of criteria. */
	function markRow(scheme) {
		[...card.querySelectorAll("tbody tr")].forEach((line, i) => {
			line.classList.toggle("chosen", schemes[i] === scheme);
			line.querySelector("button").setAttribute("aria-pressed", String(schemes[i] === scheme));
		});
	}

	function drawSum(found, length) {
		const { sum, concat, moving, overlap } = found;
		deviations.caption(t("moves"), t("sumNote", { length }));
		deviations.draw({ values: found.feature_std, names: found.feature_std.map((_, i) => `${t("feature")} ${i}`), min: 0 });
		const share = (value) => `${Math.round(100 * value)}\u00a0%`;
		const line = (name, read) => h("tr", {}, h("th", { scope: "row" }, t(name)), read(sum), read(concat));
		const number = (text) => h("td", {}, text);
		put(
			sumTable,
			h("thead", {}, h("tr", {}, h("td", {}), h("th", { scope: "col" }, t("sum")), h("th", { scope: "col" }, t("concat")))),
			h("tbody", {},
				line("inputWidth", (one) => number(integer(one.width))),
				line("weights", (one) => number(integer(one.parameters))),
				line("positionsRead", (one) => number(share(one.positions_read))),
				line("tokensRead", (one) => number(share(one.tokens_read)))),
		);
		put(sumText, t("sumText", { moving, dim: found.feature_std.length, overlap: fixed(overlap, 2), error: digits(concat.sum_error, 2) }));
	}

	let cards = null;
	return async () => {
		showControls();
		const { dim, n, start, head, side, k, std, width, base } = state;
		const scheme = chosen();
		const position = makePosition(scheme, state);
		const pairs = findPairs(scheme, state);
		const scores = onScores(scheme);
		const span = { position, dim, length: n, start: scores ? 0 : start, head: scores ? head - 1 : 0, heads: HEADS, side };
		if (codes) drawMatrix();
		if (codes && increments) drawRotation();
		if (cards) markRow(scheme);
		const jobs = [
			Promise.all([tools.postChanged("matrix", span), tools.postChanged("facts", span)]).then(([matrixAnswer, facts]) => {
				if (!matrixAnswer || !facts) return;
				if (scores && side === "decoder") hideAhead(matrixAnswer);
				codes = { ...matrixAnswer, scheme, pairs, start: span.start, head };
				shown = { ...facts, scheme, count: n, head };
				title();
				drawMatrix();
				drawFacts();
				drawRotation();
			}),
			tools.postChanged("rotation", { position, dim, start: start + Math.min(Math.round(state.t), n - 1), shift: k }).then((answer) => {
				if (!answer) return;
				increments = parseIncrements(answer.increments);
				const at = start + Math.min(Math.round(state.t), n - 1);
				rotation = { error: answer.error, t: at, later: at + k };
				if (codes) drawRotation();
			}),
			askCards({ dim, length: n }).then((answer) => answer && drawCard((cards = answer), n)),
			scheme.fields.includes("combine") && tools.postChanged("combination", { base, dim, width, length: n, token_std: std }).then((answer) => answer && drawSum(answer, n)),
		];
		await Promise.all(jobs);
	};
}

/** Blank what a causal mask hides: keys after the query. */
function hideAhead({ data, shape: [rows, columns] }) {
	for (let i = 0; i < rows; i++) data.fill(NaN, i * columns + i + 1, (i + 1) * columns);
}
