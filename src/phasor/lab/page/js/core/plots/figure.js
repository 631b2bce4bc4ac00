// What every plot shares: a caption, a read-out, downloads, and drawing again when its width or the colors change.

import { h, newId, put, s } from "../dom.js";
import { schedule } from "../frame.js";
import { translator } from "../i18n.js";
import { resolveColors } from "../theme.js";

const figures = new Set();
const t = translator({});
const observer = new ResizeObserver((entries) => {
	for (const { target } of entries) target.figure?.resize();
});

/** Draw all figures again, in the colors of the theme. */
export function redrawFigures() {
	for (const figure of figures) figure.redraw();
}

/** Forget the figures of a view that is left. */
export function closeFigures() {
	for (const figure of figures) observer.unobserve(figure.box);
	figures.clear();
}

function save(blob, name) {
	const url = URL.createObjectURL(blob);
	h("a", { href: url, download: name }).click();
	setTimeout(() => URL.revokeObjectURL(url), 1000);
}

const cell = (value) => (/[",\r\n]/.test(String(value)) ? `"${String(value).replaceAll('"', '""')}"` : String(value ?? ""));

/**
 * The base of plots. A subclass has paint(width, data), which draws into this.box, and table(data), rows for CSV; its
 * options are `defaults` and those given. Options of every plot: name (what it shows), note (beside it, in gray), height.
 */
export class Figure {
	static defaults = {};

	constructor(parent, options) {
		this.options = { height: 260, ...new.target.defaults, ...options };
		this.data = null;
		this.readoutId = newId();
		this.title = h("b", {});
		this.note = h("span", { class: "note" });
		this.buttons = h("span", { class: "downloads" });
		this.box = h("div", { class: "plot" });
		this.tip = h("div", { class: "tip", hidden: true });
		this.spoken = h("p", { class: "spoken", "aria-live": "polite", id: this.readoutId });
		const head = h("figcaption", {}, h("span", {}, this.title, " ", this.note), this.buttons);
		this.element = h("figure", { class: "figure empty" }, head, h("div", { class: "around" }, this.box, this.tip), this.spoken);
		this.box.style.setProperty("min-height", `${this.options.height}px`); // its place, until there is something drawn
		this.box.figure = this;
		this.caption(options.name, options.note);
		parent.append(this.element);
		figures.add(this);
		observer.observe(this.box);
		this.redraw = () => this.data && schedule(this.run);
		this.run = () => {
			const width = Math.floor(this.box.clientWidth);
			if (width < 40) return; // hidden: drawn when it is shown
			this.width = width;
			const start = performance.now();
			this.paint(width, this.data);
			this.element.classList.remove("empty");
			this.box.style.removeProperty("min-height");
			performance.measure("draw", { start, end: performance.now(), detail: this.name });
		};
	}

	/** Change what the caption says. */
	caption(name = "", note = "") {
		if (this.name === name && this.note.textContent === note) return;
		this.name = name;
		put(this.title, name);
		put(this.note, note);
		this.box.firstElementChild?.setAttribute("aria-label", this.describe());
		const button = (kind, work) =>
			h("button", { type: "button", class: "small", "aria-label": t("download", { what: kind, name }), onclick: work }, kind);
		put(this.buttons, button("CSV", () => this.saveTable()), button(this.canvas ? "PNG" : this.picture, () => this.savePicture()));
	}

	get picture() {
		return "SVG";
	}

	describe() {
		return [this.name, this.note.textContent].filter(Boolean).join(": ");
	}

	/** Show new data, in the next frame. */
	draw(data) {
		this.data = data;
		schedule(this.run);
	}

	/** Make the SVG of the figure where there is none, with the listeners of build(), and give it a size. */
	sizeSvg(width, height) {
		if (!this.svg) {
			this.svg = s("svg", { role: "img", "aria-label": this.describe(), tabindex: 0, "aria-describedby": this.readoutId });
			this.box.append(this.svg);
			this.build();
		}
		const size = { viewBox: `0 0 ${width} ${height}`, width, height };
		for (const [name, value] of Object.entries(size)) this.svg.setAttribute(name, value);
	}

	/**
	 * Listeners of a cursor over the `count()` things that are drawn, where the pointer is at the thing find(event). A plot has
	 * point(i), which is { mark, x, y, lines } of a thing: its mark is put into this.mark; and it may have pick(i).
	 */
	followCursor(count, find) {
		const { svg } = this;
		this.count = count;
		if (find) svg.addEventListener("pointermove", (event) => this.moveTo(find(event)));
		if (find) svg.addEventListener("pointerdown", (event) => this.pick?.(find(event)));
		for (const end of ["pointerleave", "blur"]) svg.addEventListener(end, () => this.moveTo(-1));
		svg.addEventListener("keydown", (event) => {
			const row = this.frame?.columns ?? 1;
			const way = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -row, ArrowDown: row, Home: -Infinity, End: Infinity }[event.key];
			if (event.key === "Escape") this.moveTo(-1);
			if (event.key === "Enter" && this.at !== undefined) this.pick?.(this.at);
			if (way === undefined) return;
			event.preventDefault();
			const from = this.at ?? (Number.isFinite(way) ? -way : 0); // the first key moves to the first thing
			this.moveTo(Math.min(Math.max(from + way, 0), count() - 1), true);
		});
	}

	/** Move the cursor to a thing, or take it away where there is none, as at -1. */
	moveTo(i, aloud = false) {
		this.at = i >= 0 && i < this.count() ? i : undefined;
		const { mark, x, y, lines } = this.at === undefined ? {} : this.point(i);
		put(this.mark, mark);
		if (lines) this.showTip(x, y, lines, aloud);
		else this.hideTip();
	}

	resize() {
		if (this.data && Math.floor(this.box.clientWidth) !== this.width) this.redraw();
	}

	/** A small window with lines of text at a point of the plot; speaks them where `aloud`. */
	showTip(x, y, lines, aloud = false) {
		put(this.tip, lines.map((line) => (Array.isArray(line) ? h("div", {}, h("i", { style: { background: line[1] } }), line[0]) : h("div", {}, line))));
		this.tip.hidden = false;
		const { offsetWidth: w, offsetHeight: tall } = this.tip;
		const left = x + 14 + w > this.width ? Math.max(0, x - w - 14) : x + 14;
		this.tip.style.setProperty("left", `${left}px`);
		this.tip.style.setProperty("top", `${Math.max(0, y - tall - 10)}px`);
		if (aloud) this.spoken.textContent = lines.map((line) => (Array.isArray(line) ? line[0] : line)).join("; ");
	}

	hideTip() {
		this.tip.hidden = true;
	}

	saveTable() {
		if (!this.data) return;
		const text = this.table(this.data).map((row) => row.map(cell).join(",")).join("\n");
		save(new Blob([`\ufeff${text}\n`], { type: "text/csv" }), `${this.fileName()}.csv`);
	}

	savePicture() {
		if (!this.data) return;
		const canvas = this.box.querySelector("canvas");
		if (canvas) {
			canvas.toBlob((blob) => save(blob, `${this.fileName()}.png`));
			return;
		}
		const svg = this.box.querySelector("svg").cloneNode(true);
		svg.setAttribute("xmlns", "http://www.w3.org/2000/svg");
		svg.style.setProperty("background", resolveColors("var(--paper)"));
		svg.style.setProperty("font-family", "sans-serif");
		const text = resolveColors(new XMLSerializer().serializeToString(svg));
		save(new Blob([text], { type: "image/svg+xml" }), `${this.fileName()}.svg`);
	}

	fileName() {
		return `phasor-${this.name.trim().toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "")}`;
	}
}
