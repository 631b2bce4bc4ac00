// Order: two sentences of the same words with and without positions, and texts as the model of a folder reads them.

import { h, put } from "../core/dom.js";
import { digits, fixed } from "../core/numbers.js";
import { barChart } from "../core/plots/bars.js";
import { heatMap } from "../core/plots/heat.js";
import { lineChart } from "../core/plots/line.js";
import { listSchemes, schemeOptions } from "../core/schemes.js";
import { count, renderText, textDefaults, textTexts } from "./order-text.js";

export const id = "order";

const SENTENCES = {
	en: ["a train ticket from Beijing to Shanghai", "a train ticket from Shanghai to Beijing"],
	zh: ["从 北京 到 上海 的 火车票", "从 上海 到 北京 的 火车票"],
};

export const texts = {
	en: {
		same: "Without positions, both {what} are the same",
		mask: "A causal mask alone tells the {what} apart, by {plain} %",
		differ: "Without positions, both {what} are the same; with {scheme} positions they are {far} % apart",
		both: "A causal mask alone tells the {what} apart by {plain} %; with {scheme} positions it is {far} %",
		without: "Without positions", with: "With {scheme} positions", equal: "the two lines are one", apart: "{far} % apart",
		twice: "The same sentence twice: there is nothing to tell apart",
		other: "Other words, other vectors: {far} % apart",
		tickets: "tickets", sentences: "sentences",
		lead: "Attention sums what all words say, and a sum has no order: without positions, {token} gets one and the same vector from both sentences, with any weights, here random ones. Positions tell the sentences apart; so does a mask that hides what follows.",
		leadCausal: "A mask that hides what follows lets each word look at other words than the next one does, so that order counts even without positions. {token} stands last and has seen all words.",
		scheme: "positions", attention: "attention", bidirectional: "bidirectional", causal: "causal", first: "first sentence", second: "second sentence",
		swap: "Swap two words", layers: "layers", heads: "heads", seed: "seed of the weights", layer: "layer shown", head: "head shown",
		moved: "How far each word’s vector moves with the swap", movedNote: "{which}, in % of its length",
		vector: "{which}: what {token} becomes",
		firstShort: "first", secondShort: "second", number: "number",
		map: "Attention in the {which} sentence", mapNote: "{positions}; rows ask, columns answer",
		query: "from", key: "to",
	},
	zh: {
		same: "没有位置信息，两{what}就是同一{what}",
		mask: "只靠因果掩码，也能分辨两{what}：相差 {plain} %",
		differ: "没有位置信息，两{what}就是同一{what}；加上{scheme}位置，相差 {far} %",
		both: "只靠因果掩码，两{what}相差 {plain} %；加上{scheme}位置，相差 {far} %",
		without: "没有位置编码", with: "{scheme}位置", equal: "两条线重合", apart: "相差 {far} %",
		twice: "同一句话出现两次，没有什么可分辨",
		other: "词不同，向量自然不同：相差 {far} %",
		tickets: "张票", sentences: "句话",
		lead: "注意力把所有词的信息加起来，而求和不分先后：没有位置编码，不论权重取什么值（这里是随机的），{token} 从两句话得到的向量完全相同。有了位置编码，或者有了遮住后文的掩码，才分得清谁在前、谁在后。",
		leadCausal: "遮住后文的掩码让每个词能看到的词各不相同，所以即使没有位置编码，语序也起作用。{token} 排在最后，看得到所有的词。",
		scheme: "位置编码", attention: "注意力", bidirectional: "双向", causal: "因果", first: "第一句", second: "第二句",
		swap: "交换两个词", layers: "层数", heads: "头数", seed: "权重的随机种子", layer: "看第几层", head: "看第几个头",
		moved: "换序之后，每个词的向量移动了多远", movedNote: "{which}，占向量长度的百分比",
		vector: "{which}：{token} 变成了什么",
		firstShort: "第一句", secondShort: "第二句", number: "第几个数",
		map: "{which}里的注意力", mapNote: "{positions}；行是提问的词，列是回答的词",
		query: "从", key: "到",
	},
};
for (const language of ["en", "zh"]) Object.assign(texts[language], textTexts[language]);

// A sentence that is left empty is that of the page's language.
export const defaults = { pos: "rotary", att: "bidirectional", a: "", b: "", n: 2, h: 2, seed: 0, l: 1, d: 1, ...textDefaults };

/** The words of both sentences, one below the other; those that differ stand out. */
function drawSentences(element, [first, second]) {
	const chip = (word, other, kind) => h("span", { class: `chip${word === other ? "" : ` ${kind}`}` }, word);
	const row = (words, others, kind) => h("div", { class: "chips" }, words.map((word, i) => chip(word, others[i], kind)));
	put(element, row(first, second, "ask"), row(second, first, "reply"));
}

/** Another sentence with the same words: the first and the last change places. */
function swapWords(sentence) {
	const [first, ...rest] = sentence.trim().split(/\s+/);
	return [rest.pop(), ...rest, first].join(" ").trim();
}

export function render(root, state, tools) {
	const { t } = tools;
	const schemes = listSchemes(tools).filter((scheme) => scheme.axes === 1); // a word has one position
	const [FIRST, SECOND] = SENTENCES[tools.language];
	const header = tools.header(root);
	header.set(t("same", { what: t("tickets") }), t("lead", { token: "<cls>" }));
	const sentences = h("div", { class: "sentences drawing", role: "img" });
	drawSentences(sentences, [FIRST, SECOND].map((words) => ["<cls>", ...words.split(" ")]));
	root.append(sentences);
	const both = h("div", { class: "halves drawing" });
	root.append(both);
	const lines = ["without", "with"].map(() => lineChart(both, { name: " ", height: 220, x: { name: t("number") }, y: {} }));
	tools.controls(root, [
		{ name: "pos", field: "position", kind: "select", label: t("scheme"), options: schemeOptions(schemes, t) },
		{ name: "att", field: "attention", kind: "select", label: t("attention"), options: ["bidirectional", "causal"].map((name) => [name, t(name)]) },
		{ name: "a", field: "first", kind: "text", label: t("first"), placeholder: FIRST, maxlength: 400 },
		{ name: "b", field: "second", kind: "text", label: t("second"), placeholder: SECOND, maxlength: 400 },
		{ name: "swap", kind: "button", label: t("swap"), onclick: () => tools.set({ b: state.a ? swapWords(state.a) : "" }) },
		{ name: "n", field: "num_layers", kind: "slider", label: t("layers"), min: 1, max: 4, step: 1 },
		{ name: "h", field: "num_heads", kind: "select", label: t("heads"), options: [[1, "1"], [2, "2"], [4, "4"]] },
		{ name: "seed", kind: "number", label: t("seed"), min: 0, max: 9999 },
	]);
	const bars = barChart(root, { name: t("moved"), height: 200, positive: "var(--c5)", format: (value) => (value === null ? "–" : `${digits(value, 3)} %`) });
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
		const body = { first: a || FIRST, second: b || SECOND, position: pos, attention: att, num_layers: n, num_heads: heads, seed };
		const [plain, answer] = await Promise.all([tools.postChanged("ticket", { ...body, position: "none" }, "plain"), tools.postChanged("ticket", body)]);
		if (plain === null || answer === null || !(plain ?? found?.plain) || !(answer ?? found)) return;
		found = { ...(answer ?? found), plain: plain ?? found.plain, asked: body };
	}

	/** What the summary of both sentences is, with or without positions. */
	function drawVectors(chart, which, { summary }, extent) {
		chart.caption(t("vector", { which, token: summary.tokens[0] }), summary.same ? t("equal") : t("apart", { far: digits(100 * summary.distance, 3) }));
		chart.draw({
			series: [
				{ label: t("firstShort"), y: summary.vectors[0], color: "var(--query)", width: 4.5, opacity: 0.55, textColor: "var(--query-text)" },
				{ label: t("secondShort"), y: summary.vectors[1], color: "var(--key)", width: 1.8, textColor: "var(--key-text)" },
			],
			xAxis: { format: (value) => String(Math.round(value) + 1) },
			yAxis: { min: -extent, max: extent, format: (value) => fixed(value, 1), readout: (value) => digits(value, 6) },
		});
	}

	function drawTicket() {
		const { plain, tokens, moved, summary, attention, same_words: sameWords, asked: { first, second, position, attention: kind } } = found;
		const what = t(first === FIRST && second === SECOND ? "tickets" : "sentences");
		const far = digits(100 * summary.distance, 3);
		const scheme = schemes.find((one) => one.kind === position);
		const alone = scheme.acts_on.length === 0;
		let key = plain.summary.same ? (summary.same ? "same" : "differ") : alone ? "mask" : "both";
		if (!sameWords) key = "other";
		if (String(tokens[0]) === String(tokens[1])) key = "twice";
		const token = summary.tokens[0];
		header.set(t(key, { what, far, plain: digits(100 * plain.summary.distance, 3), scheme: scheme.name }), t(kind === "causal" ? "leadCausal" : "lead", { token }));
		sentences.setAttribute("aria-label", tokens.map((words) => words.join(" ")).join(" / "));
		drawSentences(sentences, tokens);

		const which = alone ? t("without") : t("with", { scheme: scheme.name });
		const extent = 1.05 * Math.max(...[plain, found].flatMap((one) => one.summary.vectors.flat().map(Math.abs)));
		drawVectors(lines[0], t("without"), plain, extent);
		lines[1].element.hidden = alone;
		drawVectors(lines[1], which, found, extent);
		const distances = moved.map((one) => (one === null ? null : summary.same && one < 1e-12 ? 0 : 100 * one));
		bars.caption(t("moved"), t("movedNote", { which }));
		bars.draw({ values: distances, labels: tokens[0], min: 0, max: Math.max(1, ...distances) });
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
			map.caption(t("map", { which: t(i ? "secondShort" : "firstShort") }), t("mapNote", { positions: which }));
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
