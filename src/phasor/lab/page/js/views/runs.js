// Runs: loss curves of run folders, also while they train, and the reports of evaluate --lengths and compare.

import { h, makeTable, put } from "../core/dom.js";
import { fixed, integer } from "../core/numbers.js";
import { lineChart } from "../core/plots/line.js";

export const id = "runs";

const PAUSE = 2000; // milliseconds between two looks at the folders
const COLORS = ["c1", "c2", "c3", "c5", "c4", "c6"].map((name) => `var(--${name})`);
const DASHES = [undefined, "6 3", "2 3", "9 3 2 3"];
const NAMED = 10; // curves that have their names beside them

export const texts = {
	en: {
		nothing: "No run yet to look at",
		nothingLead: "Start the lab with the folder of a run, or with one that holds several, as in **phasor lab runs**. A run appears as soon as **phasor train** writes to it, and its curve grows while it trains.",
		best: "{name} has the lowest validation loss: {loss} at step {step}",
		bestOf: "Of {count} runs on {data}, {name} has the lowest validation loss: {loss} at step {step}",
		only: "{name}, alone on {data}: lowest validation loss {loss} at step {step}",
		single: "Validation loss {loss} at step {step}, the lowest of this run",
		fell: "The loss fell from {from} to {to} in {steps} steps",
		started: "{name} has begun: its first line is yet to come",
		onlyReports: "{name}: the loss by length",
		lead: "Loss in nats per token by step. Thin lines are training, thick ones validation, and a dot marks its lowest value. Runs on other data have their own plot. Runs that train are read every two seconds.",
		group: "runs that can be compared", groupOption: "{task}, {data} ({count})", data: "{name}, {tokenizer}, {length} tokens",
		metric: "metric", log: "logarithmic loss", reading: "report",
		lossCurves: "Loss by step", curves: "{metric} by step", curvesNote: "choose a run below to hide or show it", step: "step",
		run: "run", position: "positions", state: "state", steps: "step", last: "loss", lowest: "lowest validation loss", at: "at step",
		training: "training", finished: "finished", stopped: "stopped",
		of: "{step} of {steps}", leftOut: "{count} more runs are not shown.",
		reportLead: "The same tokens are predicted at every length. A difference counts where its interval, over documents or rows, excludes 0.",
		byLength: "Loss by length", byLengthNote: "nats per token, with intervals of 95 %", length: "tokens of context", trained: "trained at {length}",
		byPosition: "Loss by position", byPositionNote: "in a context of {length} tokens", place: "position",
		model: "model", differences: "Difference to {baseline}, paired", orders: "Orders, lowest loss first", how: "How it was measured", loss: "loss",
		notShown: "{order}: not shown", alone: "one model, nothing to compare", colon: ": ", semicolon: "; ",
		reportTitle: "At {length} tokens the lowest loss is that of {name}: {loss}",
	},
	zh: {
		nothing: "还没有可看的训练",
		nothingLead: "启动时给出一次训练的文件夹，或者包含多次训练的文件夹，例如 **phasor lab runs**。**phasor train** 一写入，这里就会出现，曲线随训练一起增长。",
		best: "{name} 的验证损失最低：第 {step} 步时为 {loss}",
		bestOf: "在 {data} 上的 {count} 次训练中，{name} 的验证损失最低：第 {step} 步时为 {loss}",
		only: "{data} 上只有 {name}：验证损失在第 {step} 步最低，为 {loss}",
		single: "验证损失在第 {step} 步最低：{loss}",
		fell: "{steps} 步之内，损失从 {from} 降到 {to}",
		started: "{name} 已经开始，第一行记录还没有写出",
		onlyReports: "{name}：损失随长度的变化",
		lead: "每步的损失，单位是每词元的奈特。细线是训练损失，粗线是验证损失，圆点是它的最低值。数据不同的训练分开画图。正在训练的每两秒读取一次。",
		group: "可以比较的训练", groupOption: "{task}，{data}（{count}）", data: "{name}，{tokenizer}，{length} 个词元",
		metric: "指标", log: "对数坐标", reading: "报告",
		lossCurves: "损失随步数的变化", curves: "{metric} 随步数的变化", curvesNote: "在下表点击一次训练可以隐藏或显示它", step: "步",
		run: "训练", position: "位置编码", state: "状态", steps: "步数", last: "损失", lowest: "最低验证损失", at: "所在步",
		training: "训练中", finished: "已完成", stopped: "已停止",
		of: "{step} / {steps}", leftOut: "另有 {count} 次训练没有显示。",
		reportLead: "每个长度都预测同样的词元。差异的区间（按文档或行）不含 0 时，差异才算数。",
		byLength: "损失随长度的变化", byLengthNote: "每词元的奈特，区间为 95 %", length: "上下文的词元数", trained: "训练长度 {length}",
		byPosition: "损失随位置的变化", byPositionNote: "上下文有 {length} 个词元", place: "位置",
		model: "模型", differences: "与 {baseline} 的配对差", orders: "排序，损失低的在前", how: "怎样测量", loss: "损失",
		notShown: "{order}：无法断定", alone: "只有一个模型，无从比较", colon: "：", semicolon: "；",
		"how.last": "只预测每行末尾的 {targets_per_row} 个词元", "how.sliding": "窗口每次移动 {stride} 个词元，只计新的目标", "how.truncated": "窗口互不重叠",
		measured: "方式 {protocol}：{what}。共 {targets} 个目标，来自 {documents} 篇文档的 {row_count} 行，每个长度都相同；95 % 的区间按 {units} 个{of}计算。",
		document: "文档", row: "行",
		reportTitle: "{length} 个词元时，{name} 的损失最低：{loss}",
	},
};

export const defaults = { g: "", m: "loss", log: false, off: "", r: -1 };

const short = (name) => name.split("/").pop();

/** The names of runs without what they all begin with. */
function shortNames(runs) {
	const last = runs.map((run) => short(run.name));
	return new Map(runs.map((run, i) => [run.folder, last.indexOf(last[i]) === last.lastIndexOf(last[i]) ? last[i] : run.name]));
}

/** Runs that are validated on the same data, as a list of lists; the group with the most runs comes first. */
function groupRuns(runs) {
	const groups = new Map();
	for (const run of runs) groups.set(run.validation, [...(groups.get(run.validation) ?? []), run]);
	return [...groups.values()].sort((a, b) => b.length - a.length);
}

/** A mean with half the width of its interval. */
function interval({ estimate, high }, sign = false) {
	if (estimate === null) return "–";
	const plus = sign && estimate >= 0.0005 ? "+" : "";
	return `${plus}${fixed(Math.round(estimate * 1000) / 1000 + 0, 3)}${high === null ? "" : ` ± ${fixed(high - estimate, 3)}`}`;
}

export function render(root, state, tools) {
	const { t } = tools;
	const header = tools.header(root);
	const body = h("div", { class: "stack", hidden: true });
	root.append(body);
	const controls = tools.controls(body, [
		{ name: "g", kind: "select", label: t("group"), options: [] },
		{ name: "m", field: "metric", kind: "select", label: t("metric"), options: [["loss", t("loss")]] },
		{ name: "log", kind: "toggle", label: t("log") },
	]);
	const chart = lineChart(body, { name: " ", height: 420, x: { label: t("step"), name: t("step"), format: integer } });
	chart.element.classList.add("drawing");
	const table = h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": t("run") });
	body.append(table);
	const updateReport = renderReport(root, state, tools);
	let found = null;
	let timer;
	let left = false; // for another view

	const hidden = () => new Set(state.off.split(",").filter(Boolean).map(Number));
	function toggleRun(folder) {
		const off = hidden();
		if (!off.delete(folder)) off.add(folder);
		tools.set({ off: [...off].sort((a, b) => a - b).join(",") });
	}

	async function look() {
		const same = found?.metric === state.m ? found.revision : "";
		const answer = await tools.post("curves", { metric: state.m, revision: same });
		if (answer?.changed) found = { ...answer, metric: state.m };
		return answer;
	}
	const wait = () => {
		clearTimeout(timer);
		if (!left) timer = setTimeout(poll, PAUSE);
	};
	async function poll() {
		if (!document.hidden && (await look())?.changed) await show();
		wait();
	}
	tools.onClose(() => {
		left = true;
		clearTimeout(timer);
	});

	async function show() {
		draw();
		await updateReport(found.reports);
	}

	function draw() {
		const groups = groupRuns(found.runs.filter((run) => !run.error));
		const runs = groups.find(([run]) => run.validation === state.g) ?? groups[0] ?? [];
		controls.options("g", groups.map((group) => [group[0].validation, t("groupOption", { task: group[0].task[tools.language], data: describeData(group[0], t), count: group.length })]));
		controls.toggle("g", groups.length > 1);
		body.hidden = found.runs.length === 0;
		header.set(...describe(runs, groups.length, found.reports, t));
		const names = shortNames(runs);
		const off = hidden();
		const colors = new Map(runs.map((run, i) => [run.folder, [COLORS[i % COLORS.length], DASHES[Math.floor(i / COLORS.length) % DASHES.length]]]));
		const shown = runs.filter((run) => !off.has(run.folder));
		const valued = (run) => run.best?.value ?? run.last.loss ?? Infinity;
		const named = new Set([...shown].sort((a, b) => valued(a) - valued(b)).slice(0, NAMED).map((run) => run.folder));
		const mainMetric = (run) => (state.m === "loss" && run.curves.validation_loss?.steps.length > 1 ? "validation_loss" : state.m);
		const series = shown.flatMap((run) => {
			const [color, dash] = colors.get(run.folder);
			return Object.entries(run.curves).map(([metric, { steps, values }]) => {
				const main = metric === mainMetric(run);
				const name = names.get(run.folder);
				return { x: steps, y: values, color, dash, label: main && named.has(run.folder) ? name : undefined, name: `${name} ${metric}`, width: metric === "validation_loss" ? 2.8 : main ? 1.6 : 1, opacity: main ? 1 : 0.6 };
			});
		});
		const points = shown.filter((run) => run.best && state.m === "loss").map((run) => ({ x: run.best.step, y: run.best.value, color: colors.get(run.folder)[0] }));
		controls.options("m", [...new Set(["loss", state.m, ...found.metrics.filter((name) => name !== "validation_loss")])].map((name) => [name, name === "loss" ? t("loss") : name]));
		controls.refresh({ ...state, g: runs[0]?.validation });
		chart.caption(state.m === "loss" ? t("lossCurves") : t("curves", { metric: state.m }), runs.length > 1 ? t("curvesNote") : "");
		chart.draw({ series, points, yAxis: { scale: state.log ? "log" : "linear" } });
		const focused = table.contains(document.activeElement) && document.activeElement.dataset.folder;
		put(table, drawTable([...runs, ...found.runs.filter((run) => run.error)], names, colors, off), found.left_out > 0 && h("p", { class: "note" }, t("leftOut", { count: found.left_out })));
		if (focused) table.querySelector(`[data-folder="${focused}"]`)?.focus({ preventScroll: true }); // it was made anew
	}

	function drawTable(runs, names, colors, off) {
		const positioned = runs.some((run) => run.position);
		const row = (run) => {
			if (run.error) return h("tr", {}, h("td", {}, run.name), h("td", { colspan: 6, class: "error" }, run.error));
			const [color] = colors.get(run.folder);
			const name = h(
				"button",
				{ type: "button", class: "toggle", "data-folder": run.folder, "aria-pressed": String(!off.has(run.folder)), title: run.name, onclick: () => toggleRun(run.folder) },
				h("i", { style: { background: off.has(run.folder) ? "transparent" : color, "border-color": color } }), names.get(run.folder),
			);
			const step = run.steps ? t("of", { step: integer(run.step), steps: integer(run.steps) }) : integer(run.step);
			return h(
				"tr", {}, h("td", {}, name), positioned && h("td", {}, run.position ?? "–"), h("td", { class: `state ${run.state}` }, t(run.state)), h("td", {}, step),
				h("td", {}, fixed(run.last.loss, 4)), h("td", {}, run.best ? fixed(run.best.value, 4) : "–"), h("td", {}, run.best ? integer(run.best.step) : "–"),
			);
		};
		const heads = ["run", positioned && "position", "state", "steps", "last", "lowest", "at"].filter(Boolean).map((name) => h("th", { scope: "col" }, t(name)));
		return h("table", { class: "runs" }, h("thead", {}, h("tr", {}, heads)), h("tbody", {}, runs.map(row)));
	}

	return async () => {
		clearTimeout(timer); // a second request would end the first
		if (!found || found.metric !== state.m) await look();
		if (found) await show();
		wait();
	};
}

/** What a run is trained and validated on. */
const describeData = ({ data: { name, tokenizer, sequence_length: length } }, t) => t("data", { name, tokenizer, length: integer(length) });

/** The title about runs that can be compared, given the number of groups, and the sentence below it. */
function describe(runs, groups, reports, t) {
	if (!runs.length) return reports.length ? [t("onlyReports", { name: reports[0].name }), t("reportLead")] : [t("nothing"), t("nothingLead")];
	const names = shortNames(runs);
	const evaluated = runs.filter((run) => run.best).sort((a, b) => a.best.value - b.best.value);
	if (evaluated.length) {
		const [{ folder, best }] = evaluated;
		const values = { name: names.get(folder), loss: fixed(best.value, 3), step: integer(best.step), data: runs[0].data.name, count: evaluated.length };
		const key = groups > 1 ? (runs.length === 1 ? "only" : "bestOf") : runs.length === 1 ? "single" : "best";
		return [t(key, values), t("lead")];
	}
	const logged = runs.find((run) => run.curves.loss?.values.length);
	if (!logged) return [t("started", { name: names.get(runs[0].folder) }), t("lead")];
	const { steps, values } = logged.curves.loss;
	return [t("fell", { from: fixed(values[0], 3), to: fixed(values.at(-1), 3), steps: integer(steps.at(-1)) }), t("lead")];
}

/** The part of the view about reports of lengths; returns the function that brings it up to date. */
function renderReport(root, state, tools) {
	const { t } = tools;
	const title = h("h2", { class: "section" });
	const lead = h("p", { class: "note" }, t("reportLead"));
	const body = h("div", { class: "stack", hidden: true }, title, lead);
	root.append(body);
	const controls = tools.controls(body, [{ name: "r", field: "folder", kind: "select", label: t("reading"), options: [] }]);
	const pair = h("div", { class: "halves" });
	const tables = h("div", { class: "halves" });
	body.append(pair, tables);
	const byLength = lineChart(pair, { name: t("byLength"), note: t("byLengthNote"), height: 320, x: { label: t("length"), name: t("length"), scale: "log", format: integer } });
	const byPosition = lineChart(pair, { name: t("byPosition"), height: 320, x: { label: t("place"), name: t("place"), format: (value) => integer(value) } });
	let report = null;

	function draw() {
		const names = Object.keys(report.names);
		const others = names.filter((name) => name !== report.baseline);
		const color = (name) => (name === report.baseline ? "var(--c6)" : COLORS[others.indexOf(name) % 5]);
		const rowsOf = (name) => report.rows.filter((row) => row.extension === name && row.loss.estimate !== null);
		const longest = report.lengths.at(-1);
		const [best] = report.rows.filter((row) => row.length === longest && row.loss.estimate !== null).sort((a, b) => a.loss.estimate - b.loss.estimate);
		put(title, best ? t("reportTitle", { length: integer(longest), name: best.extension, loss: fixed(best.loss.estimate, 3) }) : t("byLength"));
		const look = (name) => ({ label: name, color: color(name), dash: name === report.baseline ? "5 4" : DASHES[Math.floor(others.indexOf(name) / 5) % DASHES.length] });
		const series = names.map((name) => ({ x: rowsOf(name).map((row) => row.length), y: rowsOf(name).map((row) => row.loss.estimate), ...look(name) }));
		const points = names.flatMap((name) => rowsOf(name).map(({ length, loss }) => ({ x: length, y: loss.estimate, color: color(name), r: 4, ...loss })));
		const whiskers = points.filter((point) => point.low !== null);
		const ends = points.flatMap(({ y, low, high }) => [y, low ?? y, high ?? y]);
		const spare = 0.05 * (Math.max(...ends) - Math.min(...ends)) || 0.5;
		const trained = { x: report.trained_length, label: t("trained", { length: integer(report.trained_length) }) };
		byLength.draw({ series: series.filter((one) => one.y.length), points, whiskers, rules: [trained], xAxis: { ticks: report.lengths }, yAxis: { min: Math.min(...ends) - spare, max: Math.max(...ends) + spare } });
		const { edges, loss, length } = report.positions;
		const middles = edges.slice(1).map((edge, i) => (edge + edges[i]) / 2);
		byPosition.caption(t("byPosition"), t("byPositionNote", { length: integer(length) }));
		byPosition.draw({ x: middles, series: names.map((name) => ({ y: loss[name], ...look(name) })), rules: [trained] });

		const cell = (name, column, sign) => report.lengths.map((size) => {
			const row = report.rows.find((one) => one.extension === name && one.length === size);
			return row?.[column] ? interval(row[column], sign) : "–";
		});
		const grid = (caption, column, list, sign) => h(
			"div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
			makeTable([t("model"), ...report.lengths.map(integer)], list.map((name) => [name, ...cell(name, column, sign)]), caption),
		);
		const chain = ({ names: list, shown }) => (shown ? list.join(" < ") : t("notShown", { order: list.join(" < ") }));
		const orders = report.orders.map(({ length: size, chains }) => `${integer(size)}${t("colon")}${chains.map(chain).join(t("semicolon")) || t("alone")}`);
		put(
			tables,
			h("div", { class: "stack" }, grid(t("byLength"), "loss", names), others.length > 0 && grid(t("differences", { baseline: report.baseline }), "difference", others, true)),
			h("div", { class: "stack" },
				h("div", {}, h("h3", {}, t("orders")), h("ul", {}, orders.map((line) => h("li", {}, line)))),
				h("div", {}, h("h3", {}, t("how")), h("p", { class: "note" }, measured()), h("ul", { class: "note", lang: "en" }, report.notes.map((line) => h("li", {}, line))))),
		);
	}

	/** How it was measured, in a sentence; the library has the English one. */
	function measured() {
		if (tools.language === "en") return report.how;
		const numbers = ["targets", "targets_per_row", "stride", "row_count", "documents", "units"].map((name) => [name, integer(report[name] ?? 0)]);
		const values = Object.fromEntries(numbers);
		return t("measured", { ...values, protocol: report.protocol, what: t(`how.${report.protocol}`, values), of: t(report.unit) });
	}

	return async (reports) => {
		body.hidden = reports.length === 0;
		if (!reports.length) return;
		const chosen = reports.find((one) => one.folder === state.r) ?? reports[0];
		controls.options("r", reports.map((one) => [one.folder, one.name]));
		controls.refresh({ r: chosen.folder });
		controls.toggle("r", reports.length > 1);
		report = (await tools.postChanged("report", { folder: chosen.folder })) ?? report;
		if (report) draw();
	};
}
