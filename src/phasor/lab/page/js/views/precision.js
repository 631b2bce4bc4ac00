// The view "precision": how far cosines and sines are off by position, and what that does to logits.

import { h, put } from "../core/dom.js";
import { latest } from "../core/latest.js";
import { digits, integer, superscript } from "../core/numbers.js";
import { barChart } from "../core/plots/bars.js";
import { heatMap } from "../core/plots/heat.js";
import { lineChart } from "../core/plots/line.js";

export const id = "precision";
export const defaults = { base: 10000, dim: 64, seed: 0, method: "float32", at: 2 ** 24 };

const LAST = 2 ** 36;
const COLORS = { phasor: "var(--c3)", float32: "var(--c5)", bfloat16: "var(--c4)" };
const FAR = 0.1; // an error of cosine and sine that the title reports
const POWERS = [0, 6, 12, 18, 24, 30, 36];

const power = (value) => `2${superscript(value)}`;
const position = (value) => (Number.isInteger(Math.log2(value)) ? power(Math.log2(value)) : integer(value));
const tenTo = (value) => `10${superscript(value)}`;
const decade = (value) => (value >= 0.01 && value <= 100 ? digits(value, 2) : tenTo(Math.round(Math.log10(value))));
const small = (value) => (value === 0 ? "0" : digits(value, 2));

export const texts = {
	en: {
		title: "phasor is exact to {exact} up to position 2³⁶; float32 is off by 0.1 at {float32}, bfloat16 at {bfloat16}",
		plainTitle: "phasor is exact up to position 2³⁶",
		lead: "A float32 has 24 bits, a bfloat16 has 8, and the full rotations of an angle take the leading ones. phasor multiplies 64-bit integers: full rotations overflow and vanish, and every bit that stays is a bit of the angle.",
		never: "no position", base: "base", dim: "head dimension", seed: "which positions", method: "errors of", at: "the text begins at",
		errors: "Worst error of cosine and sine", errorsNote: "over all pairs",
		position: "position", rounding: "rounding: 2⁻²⁵", lost: "off by 1",
		map: "Error by pair", mapNote: "fast pairs above", mapAside: "Pair 0 has the frequency 1, which every float holds exactly: it stays exact as long as the position does, up to 2²⁴ in float32 and 2⁸ in bfloat16.", pair: "pair", upTo: "up to",
		logitsTitle: "What it does to logits",
		logitsLead: "The same {tokens} tokens through a small decoder with random weights, first at position 0, then further along. Rotary promises the same logits.",
		changes: "Largest change of a logit", changesNote: "relative to the largest logit",
		begins: "the text begins at", change: "by {change} of the largest; {changed} of {tokens} predictions differ",
		lasts: "Change of every logit after the last token", entry: "entry {entry} of the vocabulary",
	},
	zh: {
		title: "直到位置 2³⁶，phasor 的误差不超过 {exact}；float32 在 {float32}、bfloat16 在 {bfloat16} 处就差了 0.1",
		plainTitle: "phasor 直到位置 2³⁶ 都是精确的",
		lead: "float32 有 24 位有效数字，bfloat16 只有 8 位，而角度中的整圈数占掉了最高的那些位。phasor 用 64 位整数相乘：整圈自然溢出消失，剩下的每一位都属于角度本身。",
		never: "任何位置都没有", base: "底数 base", dim: "头维度", seed: "抽取哪些位置", method: "查看误差", at: "文本从哪里开始",
		errors: "余弦和正弦的最大误差", errorsNote: "所有特征对中",
		position: "位置", rounding: "舍入：2⁻²⁵", lost: "误差为 1",
		map: "按特征对看误差", mapNote: "上快下慢", mapAside: "第 0 对的频率是 1，任何浮点数都能精确表示：只要位置本身精确（float32 到 2²⁴，bfloat16 到 2⁸），它就是精确的。", pair: "特征对", upTo: "位置不超过",
		logitsTitle: "对 logits 的影响",
		logitsLead: "同样的 {tokens} 个词元通过一个随机权重的小解码器，先从位置 0 开始，再往后移。旋转位置编码本应给出相同的 logits。",
		changes: "logits 的最大变化", changesNote: "相对于最大的 logit",
		begins: "文本起始位置", change: "相对变化 {change}；{tokens} 个预测中有 {changed} 个不同",
		lasts: "最后一个词元之后每个 logit 的变化", entry: "词表第 {entry} 项",
	},
};

export function render(root, state, tools) {
	const { t } = tools;
	const header = tools.header(root);
	header.set(t("plainTitle"), t("lead"));
	tools.controls(root, [
		{ name: "base", kind: "slider", label: t("base"), min: 100, max: 1e7, scale: "log", format: integer },
		{ name: "dim", kind: "select", label: t("dim"), options: [2, 8, 16, 32, 64, 128, 256, 512].map((n) => [n, String(n)]), field: "head_dim" },
		{ name: "seed", kind: "number", label: t("seed"), min: 0, max: 2 ** 31, step: 1 },
		{ name: "method", kind: "select", label: t("method"), options: Object.keys(COLORS).map((name) => [name, name]) },
	]);
	const upper = h("div", { class: "halves drawing" });
	root.append(upper);
	const axis = { scale: "log", min: 1, max: LAST, ticks: POWERS.map((p) => 2 ** p), format: position };
	const move = (x) => tools.set({ at: Math.min(2 ** Math.round(Math.log2(Math.max(x, 1))), LAST) });
	const errors = lineChart(upper, {
		name: t("errors"), note: t("errorsNote"), height: 340,
		x: { ...axis, name: t("upTo"), label: t("position") }, y: { scale: "log", min: 1e-8, max: 10, ticks: [1e-8, 1e-6, 1e-4, 1e-2, 1], format: decade, readout: small },
		onPick: move,
	});
	const right = h("div", { class: "stack tight" });
	upper.append(right);
	const map = heatMap(right, {
		name: t("map"), note: t("mapNote"), palette: "sequential", height: 270, min: -8, max: 0, format: (value) => tenTo(Math.round(value)),
	});

	right.append(h("p", { class: "note" }, t("mapAside")));

	const title = h("h2", {}, t("logitsTitle"));
	const lead = h("p", { class: "note" });
	root.append(h("div", {}, title, lead));
	tools.controls(root, [
		{ name: "at", kind: "slider", label: t("at"), min: 1, max: LAST, step: 1, scale: "log", zero: true, format: position, field: "offset" },
	]);
	const lower = h("div", { class: "halves" });
	root.append(lower);
	const changes = lineChart(lower, {
		name: t("changes"), note: t("changesNote"), height: 300,
		x: { ...axis, name: t("begins"), label: t("begins") }, y: { scale: "log", min: 1e-8, max: 1, ticks: [1e-8, 1e-6, 1e-4, 1e-2, 1], format: decade, readout: small },
		onPick: move,
	});
	const stack = h("div", { class: "stack tight" });
	stack.append(h("h3", {}, t("lasts")));
	lower.append(stack);
	const lasts = Object.entries(COLORS).map(([name, color]) => barChart(stack, { name, height: 84, positive: color, negative: color }));

	let answer = null;
	const drawMap = () => {
		const [, powers, pairs] = answer.shape;
		const from = answer.notes.methods.indexOf(state.method) * powers * pairs;
		const data = new Float32Array(pairs * powers);
		for (let i = 0; i < pairs; i++)
			for (let p = 0; p < powers; p++) data[i * powers + p] = Math.log10(Math.max(answer.data[from + p * pairs + i], 1e-9));
		map.caption(`${t("map")}: ${state.method}`, t("mapNote"));
		map.draw({
			data, shape: [pairs, powers],
			rowLabels: Array.from({ length: pairs }, (_, i) => String(i)),
			columnLabels: Array.from({ length: powers }, (_, p) => (p % 6 ? "" : power(p))),
			readout: ({ row, column }, value) => [`${t("pair")} ${row}, ${t("upTo")} ${power(column)}`, small(10 ** value)],
		});
	};

	const drawErrors = () => {
		const { data, shape: [count, powers, pairs], notes } = answer;
		const worst = Array.from({ length: count }, (_, m) =>
			Array.from({ length: powers }, (_, p) => data.subarray((m * powers + p) * pairs, (m * powers + p + 1) * pairs).reduce((a, b) => Math.max(a, b), 0)));
		const first = (name) => {
			const at = worst[notes.methods.indexOf(name)].findIndex((error) => error > FAR);
			return at < 0 ? t("never") : power(notes.powers[at]);
		};
		header.set(t("title", { exact: small(Math.max(...worst[0])), float32: first("float32"), bfloat16: first("bfloat16") }), t("lead"));
		errors.draw({
			x: notes.powers.map((p) => 2 ** p),
			series: notes.methods.map((name, m) => ({ label: name, y: worst[m], color: COLORS[name], width: 2.2 })).reverse(),
			rules: [{ y: notes.rounding, label: t("rounding"), labelX: 2 ** 19 }, { y: 1, label: t("lost"), labelX: 2 ** 13, below: true, color: "var(--bad)" }],
		});
		drawMap();
	};

	const drawLogits = ({ powers, tokens, methods }) => {
		put(lead, t("logitsLead", { tokens }));
		const at = Math.max(state.at, 1);
		changes.draw({
			x: powers.map((p) => 2 ** p),
			series: Object.entries(methods).map(([name, one]) => ({ label: name, y: one.changes, color: COLORS[name], width: 2.2 })),
			rules: [{ x: at, label: position(state.at) }],
			points: Object.entries(methods).map(([name, one]) => ({ x: at, y: Math.max(one.change, 1e-8), color: COLORS[name] })),
		});
		const moved = Object.values(methods).map((one) => one.last.map((logit, i) => logit - one.last_unmoved[i]));
		const most = Math.max(0.1, ...moved.flat().map(Math.abs));
		Object.entries(methods).forEach(([name, one], m) => {
			lasts[m].caption(name, t("change", { change: small(one.change), changed: one.predictions_changed, tokens }));
			lasts[m].draw({ values: moved[m], names: moved[m].map((_, i) => t("entry", { entry: i })), min: -most, max: most });
		});
	};

	const loadErrors = latest(tools, "errors", (found) => {
		answer = found;
		drawErrors();
	});
	const loadLogits = latest(tools, "logits", drawLogits);

	return () => {
		const angles = () => ({ head_dim: state.dim, base: state.base, seed: state.seed });
		if (answer) drawMap();
		loadErrors(angles);
		loadLogits(() => ({ ...angles(), offset: state.at }));
	};
}
