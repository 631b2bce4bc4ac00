// English and Chinese: the texts of the frame, and the choice of a language.

import { remember, remembered } from "./remember.js";

const TEXTS = {
	en: {
		extension: "Extension", phasors: "Phasors", encodings: "Encodings", order: "Order", precision: "Precision",
		parts: "Parts", runs: "Runs", sources: "Index", language: "中文", languageName: "Switch to Chinese",
		theme: "Light or dark", views: "Views", skip: "Skip to the content", download: "Download {what}: {name}",
		unreachable: "The lab does not answer. Is phasor lab still running?",
		missing: "There is no view {name}.", comma: ", ",
		"place.input": "input", "place.queries": "queries", "place.keys": "keys", "place.values": "values", "place.scores": "scores", "place.none": "nothing",
	},
	zh: {
		extension: "长度扩展", phasors: "相量", encodings: "编码", order: "语序", precision: "精度",
		parts: "部件", runs: "训练", sources: "索引", language: "English", languageName: "切换到英文",
		theme: "浅色或深色", views: "视图", skip: "跳到正文", download: "下载 {what}：{name}",
		unreachable: "服务没有响应。phasor lab 还在运行吗？",
		missing: "没有名为 {name} 的视图。", comma: "、",
		"place.input": "输入", "place.queries": "query", "place.keys": "key", "place.values": "value", "place.scores": "分数", "place.none": "无",
	},
};

let language = remembered("language", ["en", "zh"]) ?? (navigator.language.startsWith("zh") ? "zh" : "en");
document.documentElement.lang = language === "zh" ? "zh-CN" : "en";

/** The language of the page, "en" or "zh". */
export const currentLanguage = () => language;

/** Change the language; the caller draws the page again. */
export function setLanguage(name) {
	language = name;
	remember("language", name);
	document.documentElement.lang = name === "zh" ? "zh-CN" : "en";
}

/** The function t(key, values) over the texts of a view: { en: { key: "… {value} …" }, zh: { … } }. */
export function translator(texts) {
	return (key, values = {}) => {
		const text = texts?.[language]?.[key] ?? TEXTS[language][key] ?? texts?.en?.[key] ?? TEXTS.en[key];
		if (text === undefined) throw new Error(`there is no text ${key}`);
		return format(text, values);
	};
}

/** A text with values in place of their names in braces. */
export const format = (text, values) => text.replace(/\{(\w+)\}/g, (whole, name) => (name in values ? values[name] : whole));
