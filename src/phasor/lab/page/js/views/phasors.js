// The view "phasors": every pair of features is a dial, and only the distance of two words matters.

import { h, put, rich } from "../core/dom.js";
import { latest } from "../core/latest.js";
import { compact, fixed, integer, superscript } from "../core/numbers.js";
import { angles, parseIncrements } from "../core/phase.js";
import { barChart } from "../core/plots/bars.js";
import { dials } from "../core/plots/dials.js";
import { lineChart } from "../core/plots/line.js";
import { pairingFigure } from "./phasors/pairing.js";
import { makeRuler } from "./phasors/ruler.js";
import { texts as ownTexts } from "./phasors/texts.js";

export const id = "phasors";
export const texts = ownTexts;
export const defaults = { q: 40, k: 28, at: 0, alike: 1, base: 10000, dim: 64, pairing: "half", rotate: "after", seed: 0 };

const SPAN = 256; // positions of the ruler
const LAST = 2 ** 36 - SPAN; // how far both are moved along
const MOST_DIALS = 64;
const SAME = 1e-5; // a score that differs by less has not changed

const shiftText = (place) => (place === 0 ? "0" : place === 1 ? "1" : `2${superscript(place - 1)}`);
const placeOf = (shift) => (shift < 1 ? 0 : 1 + Math.log2(shift));

export function render(root, state, tools) {
	const { t } = tools;
	const top = h("div", { class: "columns" });
	root.append(top);
	const header = tools.header(top);
	header.set(t("plainTitle"), t("lead"));
	const readout = h("div", { class: "readout" });
	top.append(readout);

	const controls = tools.controls(root, [
		{ name: "at", kind: "slider", label: t("at"), min: 1, max: LAST, step: 1, scale: "log", zero: true, format: integer, field: "query" },
		{ name: "alike", kind: "slider", label: t("alike"), min: 0, max: 1, step: 0.01, format: (value) => fixed(value, 2) },
		{ name: "base", kind: "slider", label: t("base"), min: 100, max: 1e7, scale: "log", format: integer },
		{ name: "dim", kind: "select", label: t("dim"), options: [2, 8, 16, 32, 64, 128, 256, 512].map((n) => [n, String(n)]), field: "head_dim" },
		{ name: "rotate", kind: "select", label: t("rotate"), options: [["after", t("after")], ["before", t("before")]] },
		{ name: "pairing", kind: "select", label: t("pairing"), options: [["half", t("half")], ["adjacent", t("adjacent")]] },
		{ name: "seed", kind: "number", label: t("seed"), min: 0, max: 2 ** 31, step: 1 },
		{ name: "play", kind: "button", label: t("play"), onclick: () => setPlaying(!playing) },
	]);

	const ruler = makeRuler(root, {
		span: SPAN,
		label: t("ruler"),
		handles: [
			{ name: "k", letter: "k", color: "var(--key)", label: t("keyPosition") },
			{ name: "q", letter: "q", color: "var(--query)", label: t("queryPosition") },
		],
		move: tools.set,
	});
	tools.onClose(ruler.close);

	const stacks = Array.from({ length: 4 }, () => h("div", { class: "stack" }));
	const [upperLeft, upperRight, lowerLeft, lowerRight] = stacks;
	root.append(h("div", { class: "columns drawing" }, upperLeft, upperRight), h("div", { class: "columns" }, lowerLeft, lowerRight));
	const dialPlot = dials(upperLeft, { name: " ", size: 70, gap: 20 });
	const pairing = pairingFigure(lowerLeft, { name: t("pairingFigure"), describePair: (pair, first, second) => t("features", { pair, first, second }) });
	const pairingNote = h("p", { class: "aside" });
	lowerLeft.append(pairingNote);
	const bars = barChart(upperRight, { name: t("adds"), note: t("addsNote"), height: 130 });
	const distance = lineChart(upperRight, {
		name: t("byDistance"), height: 220, x: { name: t("distance"), label: t("distanceLabel"), min: 0, max: SPAN - 1, ticks: [0, 64, 128, 192, 255] },
		onPick: (x) => tools.set(apart(Math.round(x))),
	});
	const shift = lineChart(lowerRight, {
		name: t("byShift"), height: 200,
		x: { name: t("at"), label: t("shiftLabel"), min: 0, max: 37, ticks: [0, 9, 17, 25, 33, 37], format: shiftText, readout: shiftText },
		onPick: (x) => tools.set({ at: Math.min(Math.round(x) < 1 ? 0 : 2 ** (Math.round(x) - 1), LAST) }),
	});

	const apart = (steps) => {
		const size = Math.min(Math.max(steps, 0), SPAN - 1);
		if (state.q >= state.k) return state.k + size < SPAN ? { q: state.k + size } : { q: size, k: 0 };
		return state.q + size < SPAN ? { k: state.q + size } : { k: size, q: 0 };
	};

	let playing = false;
	const setPlaying = (on) => {
		playing = on;
		controls.label("play", t(playing ? "pause" : "play"));
		if (on) tools.set({ at: state.at >= LAST ? 0 : state.at });
	};
	tools.onClose(() => (playing = false));

	const words = () => ({ head_dim: state.dim, base: state.base, pairing: state.pairing, alike: state.alike, seed: state.seed });
	let start = null; // the answer of "dials": hands before any rotation, and increments
	let answer = null; // the answer of "score"

	const drawDials = () => {
		if (!start || (state.rotate === "before" && !answer)) return;
		const hands = state.rotate === "after" ? turn(start, state) : fromVectors(answer);
		const every = Math.ceil(hands.length / MOST_DIALS);
		const shown = hands.map((_, i) => i).filter((i) => i % every === 0);
		Object.assign(dialPlot.options, dialPlot.box.clientWidth < 480 ? { size: 46, gap: 14 } : { size: 70, gap: 20 });
		dialPlot.caption(t(every === 1 ? "dials" : "someDials", { count: shown.length, all: hands.length }), t("dialsNote"));
		dialPlot.draw({
			valueNames: ["query", "key"],
			dials: shown.map((i) => {
				const [query, key] = hands[i];
				const wavelength = compact(start.wavelengths[i]);
				const between = Math.atan2(Math.sin(query.angle - key.angle), Math.cos(query.angle - key.angle));
				const agreement = Math.cos(between);
				return {
					label: wavelength,
					readout: [t("pairName", { pair: i, wavelength }), t("between", { degrees: fixed((between * 180) / Math.PI, 1) })],
					values: [query, key],
					wedges: [{ from: key.angle, to: key.angle + between, color: agreement >= 0 ? "var(--agree)" : "var(--oppose)", opacity: 0.15 + 0.35 * Math.abs(agreement) }],
					hands: [
						{ angle: query.angle, color: "var(--query)", width: 3, length: 0.92 * query.size },
						{ angle: key.angle, color: "var(--key)", width: 3, length: 0.68 * key.size },
					],
				};
			}),
		});
	};

	const showScore = () => {
		const { score, float32_score: float32, unmoved_score: unmoved } = answer;
		const off = Math.abs(float32 - score) > 0.01;
		const place = (name, value) => [h("span", { class: name }, name[0]), h("sub", { class: "number" }, integer(value))];
		const big = h("div", { class: "score number", id: "score", "data-value": String(score) }, fixed(score, 4));
		put(
			readout,
			h("div", { class: "formula" }, place("query", state.at + state.q), " · ", place("key", state.at + state.k)),
			big,
			h("dl", { class: "number" },
				h("dt", {}, t("unmoved")), h("dd", {}, fixed(unmoved, 4), " ", h("span", { class: Math.abs(unmoved - score) < SAME ? "agree" : "oppose" }, Math.abs(unmoved - score) < SAME ? "✓" : "✗")),
				h("dt", {}, t("float32")), h("dd", { id: "float32-score", "data-value": String(float32) }, fixed(float32, 4), " ", h("span", { class: off ? "oppose" : "agree" }, off ? "✗" : "✓"))),
		);
		if (state.rotate === "after") header.set(t("title", { distance: Math.abs(state.q - state.k), score: fixed(score, 2) }), t("lead"));
		else {
			const { scores } = answer.by_shift;
			header.set(t("titleBefore", { low: fixed(Math.min(...scores), 1), high: fixed(Math.max(...scores), 1) }), t("leadBefore"));
		}
	};

	const drawScore = () => {
		showScore();
		const count = answer.pairs.length;
		bars.draw({ values: answer.pairs, names: answer.pairs.map((_, i) => t("pair", { pair: i })), labels: answer.pairs.map((_, i) => (i % Math.max(1, count / 8) === 0 || i === count - 1 ? String(i) : undefined)), ...(state.rotate === "after" && { min: -1, max: 1 }) });
		const curve = ({ scores, float32_scores }) => [
			{ label: "float32", y: float32_scores, color: "var(--c5)", width: 1.3 },
			{ label: "phasor", y: scores, color: "var(--ink)", width: 2 },
		];
		distance.draw({
			series: curve(answer.by_distance),
			points: [{ x: Math.abs(state.q - state.k), y: answer.score }],
			xAxis: { label: t(state.q >= state.k ? "distanceLabel" : "distanceAfterLabel") },
		});
		const places = answer.by_shift.shifts.map(placeOf);
		shift.draw({ x: places, series: curve(answer.by_shift), points: [{ x: placeOf(state.at + Math.min(state.q, state.k)), y: answer.score }] });
		pairing.caption(t("pairingFigure"), t("pairingCaption", { count }));
		put(pairingNote, rich(t(state.pairing === "half" ? "halfNote" : "adjacentNote", { half: count, score: fixed(answer.mispaired_score, 2), own: fixed(answer.score, 2) })));
		if (state.rotate === "before") drawDials();
	};

	const loadDials = latest(tools, "dials", (found) => {
		start = { ...found, increments: parseIncrements(found.increments) };
		pairing.draw({ features: found.features });
		drawDials();
	});
	const loadScore = latest(tools, "score", (found) => {
		answer = found;
		drawScore();
	});

	return () => {
		if (playing) {
			if (state.at >= LAST) setPlaying(false);
			else requestAnimationFrame(() => playing && tools.set({ at: Math.min(state.at + 1, LAST) }));
		}
		ruler.draw({ q: state.q, k: state.k }, state.at, t("distanceText", { distance: integer(Math.abs(state.q - state.k)) }));
		drawDials();
		loadDials(words);
		loadScore(() => ({ ...words(), query: state.at + state.q, key: state.at + state.k, rotate: state.rotate }));
	};
}

/** The hands of every pair, [query, key], by exact phases. */
function turn({ increments, query_angles, key_angles }, { at, q, k }) {
	const [query, key] = [angles(increments, at + q), angles(increments, at + k)];
	return increments.map((_, i) => [
		{ angle: query_angles[i] + query[i], size: 1 },
		{ angle: key_angles[i] + key[i], size: 1 },
	]);
}

/** The hands of vectors that the projection has mixed: their lengths differ, and the longest reaches the rim. */
function fromVectors({ query_hands, key_hands }) {
	const longest = Math.max(...query_hands.concat(key_hands).map(([u, v]) => Math.hypot(u, v)));
	const hand = ([u, v]) => ({ angle: Math.atan2(v, u), size: Math.hypot(u, v) / longest });
	return query_hands.map((query, i) => [hand(query), hand(key_hands[i])]);
}
