// Elements of HTML and SVG, made in one expression.

const SVG = "http://www.w3.org/2000/svg";

const nodes = (children) => children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);

function fill(element, properties, children) {
	for (const [name, value] of Object.entries(properties ?? {})) {
		if (value === undefined || value === null || value === false) continue;
		if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
		else if (name === "style") for (const [key, one] of Object.entries(value)) element.style.setProperty(key, one);
		else element.setAttribute(name, value === true ? "" : value);
	}
	element.append(...nodes(children));
	return element;
}

/** An HTML element: h("button", { class: "small", onclick: f }, "text"). `style` is an object of properties. */
export function h(tag, properties, ...children) {
	return fill(document.createElement(tag), properties, children);
}

/** An SVG element: s("circle", { cx: 3, fill: "var(--query)" }). */
export function s(tag, attributes, ...children) {
	return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** Replace what an element contains. */
export function put(element, ...children) {
	element.replaceChildren(...nodes(children));
	return element;
}

/** A table of cells, which are texts or elements. */
export function makeTable(head, rows, caption) {
	const line = (tag, cells) => h("tr", {}, cells.map((cell, i) => h(tag, { scope: tag === "th" && "col", class: i === 0 && "name" }, cell)));
	return h("table", {}, caption && h("caption", {}, caption), h("thead", {}, line("th", head)), h("tbody", {}, rows.map((row) => line("td", row))));
}

let ids = 0;
/** A new id, for labels and descriptions. */
export const newId = () => `i${++ids}`;

/** A heading that breaks between words, also in Chinese, and not between a number and what it counts. */
export function breakable(text) {
	const segmenter = new Intl.Segmenter("zh", { granularity: "word" });
	const words = (part) => [...segmenter.segment(part)].map((one) => [one.isWordLike && /\p{Script=Han}$/u.test(part.slice(0, one.index)) && h("wbr", {}), one.segment]);
	return text.split(/((?<![\w.])[\d.,]+ \p{Script=Han})/u).map((part, i) => (i % 2 ? [h("wbr", {}), h("span", { class: "whole" }, part)] : words(part)));
}

/** A text with parts in **bold**, {q:query} in blue and {k:key} in vermilion, as nodes. */
export function rich(text) {
	return text.split(/(\*\*[^*]+\*\*|\{[qk]:[^}]+\})/).map((part) => {
		if (part.startsWith("**")) return h("strong", {}, part.slice(2, -2));
		if (part.startsWith("{q:") || part.startsWith("{k:"))
			return h("strong", { class: part[1] === "q" ? "query" : "key" }, part.slice(3, -1));
		return part;
	});
}
