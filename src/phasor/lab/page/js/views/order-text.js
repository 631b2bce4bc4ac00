// A text of the reader's own, as the model of a folder reads it: attention by layer and head, and likely tokens.

import { h, put, rich } from "../core/dom.js";
import { fixed } from "../core/numbers.js";
import { heatMap } from "../core/plots/heat.js";
import { rowChart } from "../core/plots/rows.js";

const MOST = 1 << 21; // weights that one answer may have

export const textTexts = {
	en: {
		own: "Your own text",
		noModel: "Start the lab with the folder of a model or of a run, as in **phasor lab FOLDER**: its attention, layer by layer and head by head, and its next tokens appear here.",
		find: "Layer {layer}, head {head} gives {share} % of its attention to {whom}",
		before: "the token before", itself: "the token itself", start: "the first token", after: "the token after",
		findSpread: "Layer {layer}, head {head} looks {back} tokens away on average",
		findCross: "Layer {layer}, head {head}: the source token that a target token looks at most gets {share} %",
		folder: "model", text: "text", target: "target (empty: what the model writes)", source: "source", kind: "attention", crossing: "cross",
		textLayer: "layer", textHead: "head",
		attentionMap: "Attention of layer {layer}, head {head}", attentionNote: "rows ask, columns answer; choose a row to see its next tokens",
		allHeads: "All heads", allHeadsNote: "a row per layer, a column per head; choose one", layerHeads: "All heads of layer {layer}",
		next: "Next token after “{token}”", fills: "What stands at “{token}”", likelyNote: "probability", loading: "Loading the model …", bad: "This folder cannot be read: {why}",
	},
	zh: {
		own: "自己的文本",
		noModel: "启动时给出模型或训练的文件夹，例如 **phasor lab FOLDER**：这里会逐层逐头显示它的注意力，以及下一个词元的概率。",
		find: "第 {layer} 层第 {head} 个头把 {share} % 的注意力给了{whom}",
		before: "前一个词元", itself: "词元自己", start: "第一个词元", after: "后一个词元",
		findSpread: "第 {layer} 层第 {head} 个头平均看向 {back} 个词元之外",
		findCross: "第 {layer} 层第 {head} 个头：目标词元最关注的源词元平均得到 {share} %",
		folder: "模型", text: "文本", target: "目标文本（留空则由模型生成）", source: "源文本", kind: "注意力", crossing: "交叉",
		textLayer: "层", textHead: "头",
		attentionMap: "第 {layer} 层第 {head} 个头的注意力", attentionNote: "行是提问的词元，列是回答的词元；点一行看它之后的词元",
		allHeads: "所有的头", allHeadsNote: "每行一层，每列一个头；点击选择", layerHeads: "第 {layer} 层所有的头",
		next: "“{token}”之后的词元", fills: "“{token}”处应是什么", likelyNote: "概率", loading: "正在加载模型……", bad: "这个文件夹读不了：{why}",
	},
};

export const textDefaults = { f: -1, x: "The cat sat on the mat because it was tired.", s: "The cat sat on the mat.", y: "", k: "", fl: 1, fh: 1, i: -1 };

export const count = (most) => Array.from({ length: most }, (_, i) => [i + 1, String(i + 1)]);

/** What a head attends to most, over all rows but the first: { key, whom, share }, or how far it looks. */
function describeHead(weights, [rows, columns], cross) {
	const sums = { before: 0, itself: 0, start: 0, after: 0 };
	let away = 0;
	let peak = 0;
	const from = cross || rows === 1 ? 0 : 1;
	for (let i = from; i < rows; i++) {
		const row = weights.subarray(i * columns, (i + 1) * columns);
		const places = { before: i - 1, itself: i, start: i > 1 ? 0 : -1, after: i + 1 };
		for (const [whom, place] of Object.entries(places)) sums[whom] += row[place] ?? 0;
		peak += Math.max(...row);
		row.forEach((weight, j) => (away += weight * Math.abs(i - j)));
	}
	const count = rows - from;
	if (cross) return { key: "findCross", share: peak / count };
	const [whom, most] = Object.entries(sums).sort((a, b) => b[1] - a[1])[0];
	return most / count > 0.35 ? { key: "find", whom, share: most / count } : { key: "findSpread", back: away / count };
}

/** A picture of all heads, `[layers, heads, rows, columns]`, as one matrix with gaps between them. */
function tile({ data, shape: [layers, heads, rows, columns] }) {
	const gap = Math.max(1, Math.round(rows / 12));
	const wide = heads * (columns + gap) - gap;
	const tall = layers * (rows + gap) - gap;
	const all = new Float32Array(wide * tall).fill(NaN);
	for (let l = 0; l < layers; l++)
		for (let k = 0; k < heads; k++) {
			const from = (l * heads + k) * rows * columns;
			let most = 0;
			for (let i = from; i < from + rows * columns; i++) most = Math.max(most, data[i]);
			for (let i = 0; i < rows; i++)
				for (let j = 0; j < columns; j++)
					all[(l * (rows + gap) + i) * wide + k * (columns + gap) + j] = data[from + i * columns + j] / (most || 1);
		}
	return { data: all, shape: [tall, wide], layers, rows: rows + gap, columns: columns + gap };
}

/** The part of the view below the ticket; returns the function that brings it up to date. */
export function renderText(root, state, tools) {
	const { t } = tools;
	const title = h("h2", { class: "section" }, t("own"));
	const note = h("p", { class: "note" }, t("loading"));
	const body = h("div", { class: "stack", hidden: true });
	root.append(title, note, body);
	let models = null;
	let listing = null;
	let built = null;

	async function list() {
		listing ??= tools.post("models", {});
		const answer = await listing;
		if (!answer) return void (listing = null);
		models = answer.models;
		const readable = models.filter((model) => !model.error);
		put(note, models.length ? models.filter((model) => model.error).map((model) => h("span", {}, t("bad", { why: model.error }))) : rich(t("noModel")));
		if (!readable.length) return;
		body.hidden = false;
		built ??= build(readable);
	}

	function build(readable) {
		const controls = tools.controls(body, [
			{ name: "f", field: "folder", kind: "select", label: t("folder"), options: readable.map((model) => [model.folder, model.name]) },
			{ name: "s", field: "source", kind: "text", rows: 2, label: t("source"), maxlength: 16384 },
			{ name: "x", field: "text", kind: "text", rows: 2, label: t("text"), maxlength: 16384 },
			{ name: "y", field: "text", kind: "text", rows: 2, label: t("target"), maxlength: 16384 },
			{ name: "k", field: "kind", kind: "select", label: t("kind"), options: [] },
			{ name: "fl", field: "layer", kind: "select", label: t("textLayer"), options: [] },
			{ name: "fh", field: "head", kind: "select", label: t("textHead"), options: [] },
		]);
		for (const name of ["k", "fl", "fh"]) controls.toggle(name, false);
		const loading = h("p", { class: "note", role: "status" }, t("loading"));
		const columns = h("div", { class: "columns", hidden: true });
		body.append(loading, columns);
		const map = heatMap(columns, {
			name: " ", square: true, maxHeight: 620, palette: "sequential", min: 0, rowName: t("query"), columnName: t("key"),
			onPick: ({ row }) => !(state.k === "bidirectional" && reading.source.length) && tools.set({ i: row }),
		});
		const side = h("div", { class: "stack" });
		columns.append(side);
		const likely = rowChart(side, { name: " ", format: (value) => `${fixed(100 * value, value < 0.01 ? 2 : 1)} %` });
		const heads = heatMap(side, {
			name: " ", palette: "sequential", min: 0, max: 1, bar: false, square: true, maxHeight: 520,
			onPick: (cell) => tools.set({ fl: headAt(cell).layer, fh: headAt(cell).head }),
			readout: (cell) => [t("attentionMap", headAt(cell))],
		});
		const headAt = ({ row, column }) => ({
			layer: tiles.layers > 1 ? 1 + Math.floor(row / tiles.rows) : state.fl,
			head: 1 + Math.floor(column / tiles.columns),
		});
		let reading = null;
		let weights = null;
		let tiles = null;
		const asked = {};

		async function once(name, request) {
			const text = JSON.stringify(request);
			if (asked[name] === text) return undefined;
			asked[name] = text;
			return tools.post(name, request);
		}

		return async () => {
			const model = readable.find((one) => one.folder === state.f) ?? readable[0];
			const crossing = model.shape === "encoder-decoder";
			controls.toggle("s", crossing);
			controls.toggle("y", crossing);
			controls.toggle("x", !crossing);
			controls.refresh({ f: model.folder });
			const request = { folder: model.folder, text: crossing ? state.y : state.x, source: crossing ? state.s : "" };
			const index = reading?.request === JSON.stringify(request) && state.i in reading.tokens ? state.i : null;
			const wish = { ...request, index };
			loading.hidden = reading?.folder === model.folder;
			const answer = await once("text", wish);
			if (answer !== undefined && asked.text === JSON.stringify(wish)) loading.hidden = true;
			if (answer) reading = { ...answer, request: JSON.stringify(request), folder: model.folder };
			if (answer === null || reading?.request !== JSON.stringify(request)) return; // what there is belongs to another text
			columns.hidden = false;

			const kinds = Object.keys(reading.kinds);
			const kind = kinds.includes(state.k) ? state.k : kinds[0];
			const layers = reading.kinds[kind];
			const layer = Math.min(Math.max(state.fl, 1), layers);
			const head = Math.min(Math.max(state.fh, 1), reading.heads);
			controls.options("k", kinds.map((name) => [name, name === "cross" ? t("crossing") : t(name)]));
			controls.options("fl", count(layers));
			controls.options("fh", count(reading.heads));
			controls.refresh({ k: kind, fl: layer, fh: head });
			controls.toggle("k", kinds.length > 1);
			controls.toggle("fl", true);
			controls.toggle("fh", true);

			const ofSource = kind === "bidirectional" && reading.source.length > 0;
			const rows = ofSource ? reading.source : reading.tokens;
			const keys = kind === "cross" || ofSource ? reading.source : reading.tokens;
			const one = rows.length * keys.length;
			const wanted = { ...request, kind, layer: layers * reading.heads * one <= MOST ? null : layer - 1, head: reading.heads * one <= MOST ? null : head - 1 };
			const matrix = await once("attention", wanted);
			if (matrix) {
				weights = { ...matrix, wanted: asked.attention };
				tiles = tile(matrix);
				tools.refresh(); // choices may be others by now
			}
			if (matrix !== undefined || weights?.wanted !== asked.attention) return;
			const [shownLayers, shownHeads] = weights.shape;
			const at = ((shownLayers > 1 ? layer - 1 : 0) * shownHeads + (shownHeads > 1 ? head - 1 : 0)) * one;
			const chosen = weights.data.subarray(at, at + one);
			const found = describeHead(chosen, [rows.length, keys.length], kind === "cross");
			put(title, t(found.key, { layer, head, whom: found.whom && t(found.whom), share: fixed(100 * found.share, 0), back: fixed(found.back, 1) }));
			const picked = ofSource ? [] : [{ row: reading.index }];
			map.caption(t("attentionMap", { layer, head }), t("attentionNote"));
			map.draw({ data: chosen, shape: [rows.length, keys.length], rowLabels: rows, columnLabels: keys, marks: picked });

			const token = reading.tokens[reading.index].trim();
			likely.element.hidden = reading.likely.length === 0;
			likely.caption(t(reading.fills ? "fills" : "next", { token }), t("likelyNote"));
			likely.draw({ values: reading.likely.map((each) => each.probability), labels: reading.likely.map((each) => each.token.trim() || "␣") });

			heads.element.hidden = shownHeads * shownLayers === 1;
			heads.caption(shownLayers > 1 ? t("allHeads") : t("layerHeads", { layer }), t("allHeadsNote"));
			heads.draw({ data: tiles.data, shape: tiles.shape });
		};
	}

	return async () => {
		if (!models) await list();
		await built?.();
	};
}
