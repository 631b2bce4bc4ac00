// Order: two sentences of the same words with and without positions, and texts as the model of a folder reads them.

import { h, put } from "../core/dom.js";
import { digits, fixed } from "../core/numbers.js";
import { barChart } from "../core/plots/bars.js";
import { heatMap } from "../core/plots/heat.js";
import { lineChart } from "../core/plots/line.js";
import { listSchemes, schemeOptions } from "../core/schemes.js";
import { count, renderText, textDefaults, textTexts } from "./order-text.js";

export const id = "order";

const FIRST = "从 北京 到 上海 的 火车票";
const SECOND = "从 上海 到 北京 的 火车票";
const GLOSS = { 从: "from", 北京: "Beijing", 到: "to", 上海: "Shanghai", 的: "’s", 火车票: "train ticket" };

export const texts = {
	en: {
		same: "Without positions, both {what} are the same",
		differ: "With {scheme} positions, the two {what} are {far} % apart",
		mask: "A causal mask alone tells the {what} apart, by {far} %",
		both: "With {scheme} positions and a causal mask, the two {what} are {far} % apart",
		twice: "The same sentence twice: there is nothing to tell apart",
		other: "Other words, other vectors: {far} % apart",
		tickets: "tickets", sentences: "sentences",
		lead: "Attention sums what all words say, and a sum has no order: without positions, {token} gets one and the same vector from both sentences, with any weights, here random ones. Positions tell the sentences apart; so does a mask that hides what follows.",
		leadCausal: "A mask that hides what follows lets each word look at other words than the next one does, so that order counts even without positions. {token} stands last and has seen all words.",
		scheme: "positions", attention: "attention", bidirectional: "bidirectional", causal: "causal", first: "first sentence", second: "second sentence",
		swap: "Swap two words", layers: "layers", heads: "heads", seed: "seed of the weights", layer: "layer shown", head: "head shown",
		moved: "How far each word’s vector moves with the swap", movedNote: "in % of its length",
		vector: "What {token} becomes", vectorNote: "its vector after the last layer",
		firstShort: "first", secondShort: "second", number: "number",
		map: "Attention in the {which} sentence", mapNote: "rows ask, columns answer",
		query: "from", key: "to",
	},
	zh: {
		same: "没有位置信息，两{what}就是同一{what}",
		differ: "加上{scheme}位置，两{what}相差 {far} %",
		mask: "只靠因果掩码，也能分辨两{what}：相差 {far} %",
		both: "{scheme}位置加因果掩码，两{what}相差 {far} %",
		twice: "同一句话出现两次，没有什么可分辨",
		other: "词不同，向量自然不同：相差 {far} %",
		tickets: "张票", sentences: "句话",
		lead: "注意力把所有词的信息加起来，而求和不分先后：没有位置编码，不论权重取什么值（这里是随机的），{token} 从两句话得到的向量完全相同。有了位置编码，或者有了遮住后文的掩码，才分得清谁在前、谁在后。",
		leadCausal: "遮住后文的掩码让每个词能看到的词各不相同，所以即使没有位置编码，语序也起作用。{token} 排在最后，看得到所有的词。",
		scheme: "位置编码", attention: "注意力", bidirectional: "双向", causal: "因果", first: "第一句", second: "第二句",
		swap: "交换两个词", layers: "层数", heads: "头数", seed: "权重的随机种子", layer: "看第几层", head: "看第几个头",
		moved: "换序之后，每个词的向量移动了多远", movedNote: "占向量长度的百分比",
		vector: "{token} 变成了什么", vectorNote: "最后一层之后的向量",
		firstShort: "第一句", secondShort: "第二句", number: "第几个数",
		map: "{which}里的注意力", mapNote: "行是提问的词，列是回答的词",
		query: "从", key: "到",
	},
};
for (const language of ["en", "zh"]) Object.assign(texts[language], textTexts[language]);

export const defaults = { pos: "none", att: "bidirectional", a: FIRST, b: SECOND, n: 2, h: 2, seed: 0, l: 1, d: 1, ...textDefaults };

/** The words of both sentences, one below the other; those that differ stand out. */
function drawSentences(element, [first, second], language) {
	const glossed = language === "en" && [...first, ...second].every((word) => word === "<cls>" || word in GLOSS);
	const chip = (word, other, kind) =>
		h("span", { class: `chip${word === other ? "" : ` ${kind}`}` }, word, glossed && word in GLOSS && h("small", {}, GLOSS[word]));
	const row = (words, others, kind) => h("div", { class: "chips" }, words.map((word, i) => chip(word, others[i], kind)));
	put(element, row(first, second, "ask"), row(second, first, "reply"));
}

/** Another sentence with the same words: the second and the fourth, or the first and the last, change places. */
function swapWords(sentence) {
	const words = sentence.trim().split(/\s+/);
	const [i, j] = words.length > 3 ? [1, 3] : [0, words.length - 1];
	[words[i], words[j]] = [words[j], words[i]];
	return words.join(" ");
}

export function render(root, state, tools) {
	const { t } = tools;
	const schemes = listSchemes(tools).filter((scheme) => scheme.axes === 1); // a word has one position
	const header = tools.header(root);
	header.set(t("order"));
	tools.controls(root, [
		{ name: "pos", field: "position", kind: "select", label: t("scheme"), options: schemeOptions(schemes, t) },
		{ name: "att", field: "attention", kind: "select", label: t("attention"), options: ["bidirectional", "causal"].map((name) => [name, t(name)]) },
		{ name: "a", field: "first", kind: "text", label: t("first"), maxlength: 400 },
		{ name: "b", field: "second", kind: "text", label: t("second"), maxlength: 400 },
		{ name: "swap", kind: "button", label: t("swap"), onclick: () => tools.set({ b: swapWords(state.a) }) },
		{ name: "n", field: "num_layers", kind: "slider", label: t("layers"), min: 1, max: 4, step: 1 },
		{ name: "h", field: "num_heads", kind: "select", label: t("heads"), options: [[1, "1"], [2, "2"], [4, "4"]] },
		{ name: "seed", kind: "number", label: t("seed"), min: 0, max: 9999 },
	]);
	const sentences = h("div", { class: "sentences", role: "img" });
	root.append(sentences);
	const top = h("div", { class: "halves" });
	root.append(top);
	const bars = barChart(top, { name: t("moved"), note: t("movedNote"), height: 220, positive: "var(--c5)", format: (value) => (value === null ? "–" : `${digits(value, 3)} %`) });
	const lines = lineChart(top, { name: " ", height: 220, x: { name: t("number") }, y: {} });
	const choice = tools.controls(root, [
		{ name: "l", kind: "select", label: t("layer"), options: count(4) },
		{ name: "d", kind: "select", label: t("head"), options: count(4) },
	]);
	const pair = h("div", { class: "halves" });
	root.append(pair);
	const option = { name: " ", square: true, maxHeight: 430, palette: "sequential", min: 0, rowName: t("query"), columnName: t("key") };
	const maps = [1, 2].map(() => heatMap(pair, option));
	const updateText = renderText(root, state, tools);

	let found = null;
	async function readTicket() {
		const { a, b, pos, att, n, h: heads, seed } = state;
		const body = { first: a, second: b, position: pos, attention: att, num_layers: n, num_heads: heads, seed };
		const answer = await tools.postChanged("ticket", body);
		if (answer) found = { ...answer, asked: body };
	}

	function drawTicket() {
		const { tokens, moved, summary, attention, same_words: sameWords, asked: { first, second, position, attention: kind } } = found;
		const what = t(first === FIRST && second === SECOND ? "tickets" : "sentences");
		const far = digits(100 * summary.distance, 3);
		const scheme = schemes.find((one) => one.kind === position);
		let key = summary.same ? "same" : scheme.acts_on.length === 0 ? "mask" : kind === "causal" ? "both" : "differ";
		if (!sameWords) key = "other";
		if (String(tokens[0]) === String(tokens[1])) key = "twice";
		const token = summary.tokens[0];
		header.set(t(key, { what, far, scheme: scheme.name }), t(kind === "causal" ? "leadCausal" : "lead", { token }));
		sentences.setAttribute("aria-label", tokens.map((words) => words.join(" ")).join(" / "));
		drawSentences(sentences, tokens, tools.language);

		const distances = moved.map((one) => (one === null ? null : summary.same && one < 1e-12 ? 0 : 100 * one));
		bars.draw({ values: distances, labels: tokens[0], min: 0, max: Math.max(1, ...distances) });
		lines.caption(t("vector", { token }), t("vectorNote"));
		lines.draw({
			series: [
				{ label: t("firstShort"), y: summary.vectors[0], color: "var(--query)", width: 4.5, opacity: 0.55, textColor: "var(--query-text)" },
				{ label: t("secondShort"), y: summary.vectors[1], color: "var(--key)", width: 1.8, textColor: "var(--key-text)" },
			],
			xAxis: { format: (value) => String(Math.round(value) + 1) },
			yAxis: { format: (value) => fixed(value, 1), readout: (value) => digits(value, 6) },
		});
		const layers = attention[0].length;
		const heads = attention[0][0].length;
		const layer = Math.min(state.l, layers);
		const head = Math.min(state.d, heads);
		choice.options("l", count(layers));
		choice.options("d", count(heads));
		choice.refresh({ l: layer, d: head });
		const chosen = attention.map((sentence) => sentence[layer - 1][head - 1]);
		const most = Math.max(...chosen.flat(2));
		maps.forEach((map, i) => {
			map.caption(t("map", { which: t(i ? "secondShort" : "firstShort") }), t("mapNote"));
			const size = chosen[i].length;
			map.draw({ data: Float32Array.from(chosen[i].flat()), shape: [size, size], max: most, rowLabels: tokens[i], columnLabels: tokens[i] });
		});
	}

	return async () => {
		updateText();
		await readTicket();
		if (found) drawTicket();
	};
}
