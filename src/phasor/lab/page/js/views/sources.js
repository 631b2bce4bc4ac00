// The index: what the documents on positions show, each with a link to the view that shows it here.

import { h, put } from "../core/dom.js";

export const id = "sources";

export const texts = {
	en: {
		title: "{count} figures, tables and analogies, each opened by a link",
		lead: "What five texts on positions, in Chinese, draw and tell, computed here by the library and open to be changed.",
		search: "search", none: "Nothing has these words.",
	},
	zh: {
		title: "{count} 张图、表和比喻，每一个都能打开",
		lead: "五篇讲位置编码的文章里画的、说的，这里都由本库算出来，而且可以动手改。",
		search: "搜索", none: "没有找到。",
	},
};

export const defaults = { words: "" };

export function render(root, state, tools) {
	const { t } = tools;
	const header = tools.header(root);
	tools.controls(root, [{ name: "words", kind: "text", label: t("search"), maxlength: 80 }]);
	const list = h("div", { class: "index" });
	root.append(list);
	let found = null;

	return async () => {
		found ??= await tools.get("/api/figures");
		if (!found) return;
		const { documents: descriptions, figures } = found;
		header.set(t("title", { count: figures.length }), t("lead"));
		const what = (figure) => (tools.language === "zh" ? figure.what_zh : figure.what);
		const words = state.words.toLowerCase().split(/\s+/).filter(Boolean);
		const shown = figures.filter((figure) => words.every((word) => `${figure.document} ${what(figure)}`.toLowerCase().includes(word)));
		const documents = [...new Set(shown.map((figure) => figure.document))];
		put(
			list,
			documents.map((name) => [
				h("h2", { lang: "zh-CN" }, name),
				h("p", { class: "note" }, descriptions[name][tools.language]),
				h("ul", {}, shown.filter((figure) => figure.document === name).map((figure) => h("li", {}, h("a", { href: figure.url }, what(figure))))),
			]),
			shown.length === 0 && figures.length > 0 && h("p", { class: "note" }, t("none")),
		);
	};
}
