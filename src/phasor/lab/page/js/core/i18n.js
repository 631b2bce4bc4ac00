// English and Chinese: the texts of the frame, and the choice of a language.

import { remember, remembered } from "./remember.js";

const TEXTS = {
	en: {
		extension: "Extension", phasors: "Phasors", encodings: "Encodings", order: "Order", precision: "Precision",
		parts: "Parts", runs: "Runs", sources: "Index", language: "中文", languageName: "Switch to Chinese",
		theme: "Light or dark", views: "Views", skip: "Skip to the content", download: "Download {what}: {name}",
		unreachable: "The lab does not answer. Is phasor lab still running?",
		missing: "There is no view {name}.", comma: ", ", nextView: "Next:",
		"words.order": "A **token** is a word or a part of one. **Attention** lets every token take in what others say. **<cls>** stands for the whole sentence. A **causal mask** hides what comes after a token.",
		"words.encodings": "A **code** is what a scheme gives a position: numbers added to the token’s vector, a rotation of queries and keys, or a **bias** on the **score** of two tokens.",
		"words.phasors": "A token’s **query** is what it asks, the **key** what it is found by; their inner product is the **score**. A **phasor** is a pair of features that rotates with the position.",
		"words.precision": "**float32** and **bfloat16** have 24 and 8 significant bits. A **pair** is two features rotated by one angle. A **logit** is the score of a possible next token.",
		"words.extension": "A **pair** is two features that rotate with the position; the **base** sets how slow the slowest is. **PI**, **NTK**, **YaRN** and others change the rotations so that a model reads further.",
		"words.parts": "**Softmax** turns scores into weights that sum to 1. A **norm** brings a vector to one size. The **residual stream** is the vector that every block adds to.",
		"words.runs": "The **loss** is −log of the probability of the right token, in nats; **validation** measures it on text that is not trained on.",
		"words.sources": "A link opens the view that shows it.",
		"place.input": "input", "place.queries": "queries", "place.keys": "keys", "place.values": "values", "place.scores": "scores", "place.none": "nothing",
	},
	zh: {
		extension: "长度扩展", phasors: "相量", encodings: "编码", order: "语序", precision: "精度",
		parts: "部件", runs: "训练", sources: "索引", language: "English", languageName: "切换到英文",
		theme: "浅色或深色", views: "视图", skip: "跳到正文", download: "下载 {what}：{name}",
		unreachable: "服务没有响应。phasor lab 还在运行吗？",
		missing: "没有名为 {name} 的视图。", comma: "、", nextView: "下一页：",
		"words.order": "**词元**是一个词或词的一部分。**注意力**让每个词元吸收其他词元的信息。**<cls>** 代表整句话。**因果掩码**遮住一个词元之后的内容。",
		"words.encodings": "**编码**是一种方案给一个位置的东西：加到词向量上的数、query 和 key 的旋转，或者加到两个词元**分数**上的**偏置**。",
		"words.phasors": "词元的**查询**（query）是它要找什么，**键**（key）是它凭什么被找到；两者的内积是**分数**。**相量**是随位置旋转的一对特征。",
		"words.precision": "**float32** 和 **bfloat16** 有 24 位和 8 位有效数字。**一对**是按同一个角度旋转的两个特征。**logit** 是下一个词元候选的分数。",
		"words.extension": "**一对**是随位置旋转的两个特征；**底数**决定最慢的一对有多慢。**PI**、**NTK**、**YaRN** 等方法改变这些旋转，让模型读得更远。",
		"words.parts": "**Softmax** 把分数变成总和为 1 的权重。**归一化**把向量缩放到同一大小。**残差流**是每个块都往上加的那个向量。",
		"words.runs": "**损失**是正确词元概率的 −log，单位是奈特；**验证**在没有用来训练的文本上测量它。",
		"words.sources": "点链接，打开显示它的视图。",
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
