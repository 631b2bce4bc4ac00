// Parts: why scores are divided by sqrt(d), activations and their gates, norms, and where norms are placed.

import { h, put } from "../core/dom.js";
import { digits, fixed, integer } from "../core/numbers.js";
import { barChart } from "../core/plots/bars.js";
import { blockDiagram } from "../core/plots/block.js";
import { heatMap } from "../core/plots/heat.js";
import { lineChart } from "../core/plots/line.js";
import { texts } from "./parts.texts.js";

export const id = "parts";
export { texts };

export const defaults = {
	part: "scale", d: 64, keys: 32, seed: 0, a: "swiglu", reach: 4, slopes: false, dim: 24, mean: 2, std: 3, outlier: 0,
	layers: 12, gain: 1, norm: "rmsnorm", width: 32,
};

const PARTS = ["scale", "activations", "norms", "placements"];
const COLORS = ["c1", "c2", "c3", "c4", "c5", "c6"].map((name) => `var(--${name})`);

export function render(root, state, tools) {
	const { t } = tools;
	const header = tools.header(root);
	const tab = (name) => h("button", { type: "button", onclick: () => tools.set({ part: name }) }, t(`tab.${name}`));
	const tabs = h("div", { class: "tabs", role: "group", "aria-label": t("parts") }, PARTS.map(tab));
	root.append(tabs);
	const sections = { scale: scaleSection(tools), activations: activationSection(tools), norms: normSection(tools), placements: placementSection(tools) };
	for (const part of PARTS) root.append(sections[part].element);

	let shown = null;
	return async () => {
		const part = PARTS.includes(state.part) ? state.part : "scale";
		PARTS.forEach((name, i) => {
			tabs.children[i].setAttribute("aria-pressed", String(name === part));
			sections[name].element.hidden = name !== part;
		});
		if (part !== shown) header.set(t(`tab.${part}`), ""); // until there is something found
		shown = part;
		await sections[part].update(state, header);
	};
}

function scaleSection({ t, controls, post }) {
	const element = h("section", { class: "stack" });
	controls(element, [
		{ name: "d", kind: "slider", label: t("d"), min: 1, max: 512, step: 1, scale: "log", field: "head_dim" },
		{ name: "keys", kind: "slider", label: t("keys"), min: 2, max: 256, step: 1, scale: "log" },
		{ name: "seed", kind: "slider", label: t("seed"), min: 0, max: 20, step: 1 },
	]);
	const upper = h("div", { class: "halves level drawing" });
	const lower = h("div", { class: "halves level" });
	element.append(upper, lower);
	const ways = [["divided", "var(--query)", "var(--query-text)"], ["plain", "var(--key)", "var(--key-text)"]];
	const bars = ways.map(([way, color]) => barChart(upper, { name: t(`weights.${way}`), height: 190, positive: color, format: (value) => fixed(value, 4) }));
	const x = { label: t("d"), scale: "log", ticks: [1, 4, 16, 64, 256, 512], format: integer };
	const variance = lineChart(lower, { name: t("variance"), note: t("varianceNote"), height: 250, x, y: { scale: "log" } });
	const gradient = lineChart(lower, { name: t("gradient"), note: t("gradientNote"), height: 250, x, y: { min: 0 } });
	return {
		element,
		async update({ d, keys, seed }, header) {
			const found = await post("scale", { head_dim: d, keys, seed });
			if (!found) return;
			const { divided, plain, curves } = found;
			const percent = (value) => `${Math.round(100 * value)}\u00a0%`;
			header.set(t("title.scale", { d: integer(d), keys, top: percent(plain.largest), kept: percent(divided.largest) }), t("lead.scale", { variance: digits(plain.variance, 3), kept: digits(divided.variance, 3) }));
			bars.forEach((chart, i) => {
				const one = found[ways[i][0]];
				chart.caption(t(`weights.${ways[i][0]}`), t("weightsNote", { largest: percent(one.largest), queries: found.queries }));
				chart.draw({ values: one.weights, names: one.weights.map((_, j) => t("rank", { rank: j + 1 })), min: 0, max: 1 });
			});
			const both = (name) => ways.map(([way, color, textColor]) => ({ x: curves.head_dim, y: curves[way][name], label: t(way), color, textColor }));
			const rules = [{ x: d, label: `d = ${integer(d)}` }];
			variance.draw({ series: both("variance"), rules });
			gradient.draw({ series: both("gradient"), rules });
		},
	};
}

function activationSection({ t, controls, post }) {
	const element = h("section", { class: "stack" });
	const row = controls(element, [
		{ name: "a", kind: "select", label: t("activation"), options: [], field: "activation" },
		{ name: "reach", kind: "slider", label: t("reach"), min: 1, max: 10, step: 0.5 },
		{ name: "slopes", kind: "toggle", label: t("slopes") },
	]);
	const upper = h("div", { class: "halves level drawing" });
	const lower = h("div", { class: "halves" });
	element.append(upper, lower);
	const plain = lineChart(upper, { name: t("plainCurves"), height: 300, x: { label: "x" } });
	const gated = lineChart(upper, { name: t("gatedCurves"), height: 300, x: { label: t("gateValue") } });
	const map = heatMap(lower, { name: t("gateMap"), height: 380, square: true, maxHeight: 380 });
	const cuts = lineChart(lower, { name: t("cuts"), note: t("cutsNote"), height: 300, x: { label: t("gateValue") } });
	const text = h("p", { class: "aside" });
	element.append(text);
	return {
		element,
		async update({ a, reach, slopes }, header) {
			const points = 121; // so that the middle and the ends have labels, however tall the map is
			const [found, matrix] = await Promise.all([post("curves", { reach, points: 161 }), post("gate", { activation: a, reach, points })]);
			if (!found) return;
			const { x, curves } = found;
			const [plainKinds, gatedKinds] = [false, true].map((gated) => Object.keys(curves).filter((kind) => curves[kind].gated === gated));
			row.options("a", gatedKinds.map((kind) => [kind, kind]));
			row.refresh({ a });
			if (!matrix) return;
			const what = slopes ? "slopes" : "values";
			const least = Math.min(...curves.gelu.values);
			header.set(t("title.activations", { least: fixed(least, 2), at: fixed(x[curves.gelu.values.indexOf(least)], 2) }), t("lead.activations"));
			const draw = (chart, kinds, name) => {
				chart.caption(t(name), t(slopes ? "slopesNote" : "valuesNote"));
				chart.draw({ series: kinds.map((kind, i) => ({ x, y: curves[kind][what], label: kind, color: COLORS[i % COLORS.length], width: kind === a ? 3 : 1.7, dash: kind.endsWith("tanh") ? "5 4" : undefined })), rules: [{ y: 0, dash: "none", color: "var(--faint)" }, { x: 0, dash: "none", color: "var(--faint)" }] });
			};
			draw(plain, plainKinds, "plainCurves");
			draw(gated, gatedKinds, "gatedCurves");
			const axis = (i) => -reach + (2 * reach * i) / (points - 1);
			const ends = [digits(-reach, 3), "0", digits(reach, 3)];
			const columnLabels = [];
			[columnLabels[0], columnLabels[(points - 1) / 2], columnLabels[points - 1]] = ends;
			const rowLabels = Array.from({ length: points }, () => "");
			[rowLabels[points - 1], rowLabels[(points - 1) / 2], rowLabels[0]] = ends;
			map.caption(t("gateMap"), t("gateNote", { activation: a }));
			map.draw({ data: matrix.data, shape: matrix.shape, columnLabels, rowLabels, readout: ({ row, column }, value) => [`${t("gateValue")} ${fixed(axis(column), 2)}`, `${t("upValue")} ${fixed(-axis(row), 2)}`, digits(value, 4)] });
			const at = Array.from({ length: points }, (_, i) => axis(i));
			const rows = [0, 0.25, 0.5, 0.75, 1].map((part) => Math.round(part * (points - 1)));
			cuts.draw({ series: rows.map((row, i) => ({ x: at, y: matrix.data.subarray(row * points, (row + 1) * points), label: `${t("upValue")} ${digits(-axis(row), 3)}`, color: COLORS[i] })) });
			const open = matrix.data[points - 1] / reach; // what passes of the largest up projection through the widest gate
			const near = (value) => Math.abs(open - value) < 0.05 * value;
			put(text, h("strong", {}, a), " = ", h("span", { lang: "en" }, curves[a].line), ". ", t("gateText"), " ", t(near(1) ? "gateUp" : near(reach) ? "gateProduct" : "gateOther", { open: digits(open, 3) }));
		},
	};
}

function normSection({ t, controls, post }) {
	const element = h("section", { class: "stack" });
	controls(element, [
		{ name: "mean", kind: "slider", label: t("mean"), min: -10, max: 10, step: 0.5 },
		{ name: "std", kind: "slider", label: t("std"), min: 0, max: 10, step: 0.25 },
		{ name: "outlier", kind: "slider", label: t("outlier"), min: 0, max: 100, step: 1 },
		{ name: "dim", kind: "slider", label: t("dim"), min: 4, max: 128, step: 4 },
	]);
	const row = h("div", { class: "thirds level drawing" });
	const text = h("p", { class: "aside" });
	element.append(row, text);
	const names = ["vector", "layernorm", "rmsnorm"];
	const charts = names.map((name) => barChart(row, { name: t(`norm.${name}`), height: 230, positive: "var(--c1)", negative: "var(--c2)" }));
	return {
		element,
		async update({ dim, mean, std, outlier }, header) {
			const found = await post("norms", { dim, mean, std, outlier });
			if (!found) return;
			const show = (moments) => t("moments", { mean: fixed(Math.abs(moments.mean) < 5e-13 ? 0 : moments.mean, 2), std: fixed(moments.std, 2), rms: fixed(moments.rms, 2) });
			const all = { vector: { vector: found.vector, moments: found.moments }, ...found.norms };
			header.set(t("title.norms", { mean: fixed(found.moments.mean, 2), left: fixed(found.norms.rmsnorm.moments.mean, 2) }), t("lead.norms"));
			put(text, ["layernorm", "rmsnorm"].map((name) => h("div", {}, h("strong", {}, t(`norm.${name}`)), ` = ${t(`formula.${name}`)}`)));
			const after = names.slice(1).flatMap((name) => all[name].vector);
			const most = Math.max(...after.map(Math.abs), 1e-3) * 1.05;
			names.forEach((name, i) => {
				charts[i].caption(t(`norm.${name}`), show(all[name].moments));
				charts[i].draw({ values: all[name].vector, names: all[name].vector.map((_, j) => `${t("feature")} ${j}`), ...(i ? { min: -most, max: most } : {}) });
			});
		},
	};
}

const colorAt = (i) => COLORS[i % COLORS.length];

function placementSection({ t, controls, post, about: { placements, norms } }) {
	const element = h("section", { class: "stack" });
	controls(element, [
		{ name: "layers", kind: "slider", label: t("layers"), min: 1, max: 48, step: 1, field: "num_layers" },
		{ name: "gain", kind: "slider", label: t("gain"), min: 0.1, max: 4, scale: "log" },
		{ name: "width", kind: "slider", label: t("dim"), min: 8, max: 128, step: 8, field: "dim" },
		{ name: "norm", kind: "select", label: t("norm"), options: norms.map((kind) => [kind, kind]) },
	]);
	const pictures = blockDiagram(element, { name: t("diagrams"), note: t("diagramsNote") });
	const row = h("div", { class: "halves level drawing" });
	element.append(row);
	const stream = lineChart(row, { name: t("stream"), note: t("streamNote"), height: 300, x: { label: t("block") } });
	const gradient = lineChart(row, { name: t("streamGradient"), note: t("streamGradientNote"), height: 300, x: { label: t("block") } });
	const found = new Map();
	let asked = "";
	return {
		element,
		async update({ layers, gain, width, norm }, header) {
			const equations = placements.map((kind, i) => ({ kind, equation: texts.en[`equation.${kind}`], color: colorAt(i) })).filter(({ equation }) => equation);
			pictures.draw({ blocks: equations, words: { f: t("sublayer"), norm: "norm", attention: t("attention"), feedforward: t("feedforward") } });
			const show = () => {
				const curves = (name) => placements.map((kind, i) => ({ kind, i, y: found.get(kind)?.[name] })).filter(({ y }) => y?.length === layers + 1)
					.map(({ kind, i, y }) => ({ y, label: kind, color: colorAt(i), dash: kind === "output" ? "2 4" : kind === "sandwich" ? "7 4" : undefined }));
				const steep = (name) => curves(name).some(({ y }) => Math.max(...y) > 100 * Math.min(...y));
				const step = Math.max(1, Math.ceil(layers / 6));
				const xAxis = { ticks: Array.from({ length: Math.floor(layers / step) + 1 }, (_, i) => i * step) };
				stream.draw({ series: curves("stream"), xAxis, yAxis: steep("stream") ? { scale: "log" } : { min: 0 } });
				gradient.draw({ series: curves("gradient"), xAxis, yAxis: steep("gradient") ? { scale: "log" } : { min: 0 } });
				const [pre, post] = ["pre", "post"].map((kind) => found.get(kind));
				if (pre && post) header.set(t(norm === "none" ? "title.without" : "title.placements", { layers, pre: digits(pre.stream.at(-1) / pre.stream[0], 2), post: digits(post.stream.at(-1) / post.stream[0], 2) }), norm === "none" ? "" : t("lead.placements", { pre: digits(pre.gradient.at(-1), 2), post: digits(post.gradient.at(-1), 2), size: digits(post.stream.at(-1), 2) }));
			};
			const now = JSON.stringify([layers, gain, width, norm]);
			if (now === asked) {
				show();
				return;
			}
			asked = now;
			await Promise.all(placements.map(async (kind) => {
				const answer = await post("placement", { placement: kind, num_layers: layers, gain, dim: width, norm }, `placement/${kind}`);
				if (!answer || now !== asked) return;
				found.set(kind, answer);
				show();
			}));
		},
	};
}
