// A heat map on a canvas, with a color bar, labels of rows and columns, and a cursor.

import { h, put } from "../dom.js";
import { digits } from "../numbers.js";
import { color } from "../theme.js";
import { Figure } from "./figure.js";
import { textWidth } from "./scale.js";

const LEVELS = 256;
const STOPS = { diverging: ["div-0", "div-1", "div-2", "div-3", "div-4"], sequential: ["seq-0", "seq-1", "seq-2", "seq-3"] };

/** The colors of a palette, from the least to the greatest value, as 32-bit pixels. */
function lookup(palette) {
	const stops = STOPS[palette].map((name) => color(name).match(/[\da-f]{2}/gi).map((two) => parseInt(two, 16)));
	const table = new Uint32Array(LEVELS);
	for (let i = 0; i < LEVELS; i++) {
		const place = (i / (LEVELS - 1)) * (stops.length - 1);
		const low = Math.min(Math.floor(place), stops.length - 2);
		const [r, g, b] = stops[low].map((from, c) => Math.round(from + (stops[low + 1][c] - from) * (place - low)));
		table[i] = (255 << 24) | (b << 16) | (g << 8) | r;
	}
	return table;
}

class HeatMap extends Figure {
	static defaults = { palette: "diverging", bar: true };
	cell = null;

	get picture() {
		return "PNG";
	}

	paint(width, data) {
		const o = { ...this.options, ...data };
		const [rows, columns] = data.shape;
		const ratio = devicePixelRatio || 1;
		const rowText = (i) => o.rowLabels?.[i] ?? "";
		const left = o.rowLabels ? Math.min(Math.max(...o.rowLabels.map((one) => textWidth(one))) + 8, width * 0.3) : 0;
		const bottom = o.columnLabels ? 22 : 0;
		const bar = o.bar ? 34 : 0;
		const tall = o.square ? Math.min(((width - left) * rows) / columns, o.maxHeight ?? Infinity) : o.height;
		const wide = o.square ? (tall * columns) / rows : width - left;
		const height = Math.round(tall + bottom + bar);
		if (!this.canvas) this.build();
		const canvas = this.canvas;
		canvas.width = Math.round(width * ratio);
		canvas.height = Math.round(height * ratio);
		canvas.style.setProperty("width", `${width}px`);
		canvas.style.setProperty("height", `${height}px`);
		const pen = canvas.getContext("2d");
		pen.scale(ratio, ratio);
		pen.fillStyle = color("paper");
		pen.fillRect(0, 0, width, height);

		const [low, high] = this.range(data, o);
		const table = lookup(o.palette);
		const image = new ImageData(columns, rows);
		const pixels = new Uint32Array(image.data.buffer);
		const gain = (LEVELS - 1) / (high - low || 1);
		for (let i = 0; i < pixels.length; i++) {
			const value = data.data[i];
			if (Number.isFinite(value)) pixels[i] = table[Math.max(0, Math.min(LEVELS - 1, Math.round((value - low) * gain)))];
		}
		const small = (this.small ??= document.createElement("canvas"));
		small.width = columns;
		small.height = rows;
		small.getContext("2d").putImageData(image, 0, 0);
		pen.imageSmoothingEnabled = wide * ratio < columns || tall * ratio < rows;
		pen.drawImage(small, left, 0, wide, tall);

		pen.font = `12px ${getComputedStyle(document.body).fontFamily}`;
		pen.fillStyle = color("soft");
		pen.textBaseline = "middle";
		if (o.rowLabels) {
			const every = Math.max(1, Math.ceil((14 * rows) / tall));
			pen.textAlign = "right";
			for (let i = 0; i < rows; i += every) pen.fillText(rowText(i), left - 6, Math.max(7, ((i + 0.5) * tall) / rows), left - 6);
		}
		if (o.columnLabels) {
			pen.textAlign = "center";
			let end = -Infinity;
			for (let j = 0; j < columns; j++) {
				const words = String(o.columnLabels[j] ?? "");
				const half = textWidth(words) / 2;
				const middle = Math.min(Math.max(left + ((j + 0.5) * wide) / columns, half), width - half);
				if (!words || middle - half < end + 6) continue;
				pen.fillText(words, middle, tall + 13);
				end = middle + half;
			}
		}
		if (o.bar) this.paintBar(pen, table, low, high, left, tall + bottom + 10, Math.min(wide, 260), o);
		this.frame = { left, wide, tall, rows, columns, o };
		this.outline(pen);
	}

	paintBar(pen, table, low, high, x, y, wide, o) {
		const format = o.format ?? ((value) => digits(value, 3));
		pen.textAlign = "left";
		const first = format(low);
		const start = x + textWidth(first) + 8;
		const length = Math.max(40, wide - textWidth(first) - textWidth(format(high)) - 16);
		for (let i = 0; i < length; i++) {
			const pixel = table[Math.floor((i / length) * (LEVELS - 1))];
			pen.fillStyle = `rgb(${pixel & 255},${(pixel >> 8) & 255},${(pixel >> 16) & 255})`;
			pen.fillRect(start + i, y, 1.5, 10);
		}
		pen.fillStyle = color("soft");
		pen.fillText(first, x, y + 6);
		pen.fillText(format(high), start + length + 8, y + 6);
	}

	range(data, o) {
		if (o.min !== undefined && o.max !== undefined) return [o.min, o.max];
		let low = Infinity;
		let high = -Infinity;
		for (const value of data.data) {
			if (value < low) low = value;
			if (value > high && value !== Infinity) high = value;
		}
		if (low === -Infinity || low > high) [low, high] = [o.min ?? -1, high > -Infinity ? high : 1];
		if (o.palette === "diverging") {
			const most = Math.max(Math.abs(low), Math.abs(high)) || 1;
			return [o.min ?? -most, o.max ?? most];
		}
		return [o.min ?? low, o.max ?? (high > low ? high : low + 1)];
	}

	outline(pen) {
		const { left, wide, tall, rows, columns, o } = this.frame;
		const frame = (x, y, w, t) => {
			pen.lineWidth = 3.5;
			pen.strokeStyle = color("paper");
			pen.strokeRect(x, y, w, t);
			pen.lineWidth = 1.75;
			pen.strokeStyle = color("ink");
			pen.strokeRect(x, y, w, t);
		};
		for (const mark of o.marks ?? []) {
			const { row, column } = mark;
			const x = left + (column === undefined ? 0 : (column * wide) / columns);
			const y = row === undefined ? 0 : (row * tall) / rows;
			frame(x, y, column === undefined ? wide : wide / columns, row === undefined ? tall : tall / rows);
		}
		if (this.cell) frame(left + (this.cell.column * wide) / columns, (this.cell.row * tall) / rows, wide / columns, tall / rows);
	}

	build() {
		this.canvas = h("canvas", { role: "img", "aria-label": this.describe(), tabindex: 0, "aria-describedby": this.readoutId });
		this.box.append(this.canvas);
		const at = (event) => {
			const { left, wide, tall, rows, columns } = this.frame;
			const column = Math.floor(((event.offsetX - left) / wide) * columns);
			const row = Math.floor((event.offsetY / tall) * rows);
			return column >= 0 && column < columns && row >= 0 && row < rows ? { row, column } : null;
		};
		this.canvas.addEventListener("pointermove", (event) => this.moveTo(at(event)));
		this.canvas.addEventListener("pointerdown", (event) => {
			const cell = at(event);
			if (cell) this.options.onPick?.(cell);
		});
		this.canvas.addEventListener("pointerleave", () => this.moveTo(null));
		this.canvas.addEventListener("blur", () => this.moveTo(null));
		this.canvas.addEventListener("keydown", (event) => {
			const { rows, columns } = this.frame;
			const way = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
			if (event.key === "Escape") this.moveTo(null);
			if (event.key === "Enter" && this.cell) this.options.onPick?.(this.cell);
			if (!way) return;
			event.preventDefault();
			const { row, column } = this.cell ?? { row: 0, column: -1 };
			const cell = { row: Math.min(Math.max(row + way[0], 0), rows - 1), column: Math.min(Math.max(column + way[1], 0), columns - 1) };
			this.moveTo(cell, true);
		});
	}

	moveTo(cell, aloud = false) {
		if (cell?.row === this.cell?.row && cell?.column === this.cell?.column) return;
		this.cell = cell;
		this.redraw();
		if (!cell) {
			this.hideTip();
			return;
		}
		const { left, wide, tall, rows, columns, o } = this.frame;
		const value = this.data.data[cell.row * columns + cell.column];
		const lines = o.readout?.(cell, value) ?? [
			`${o.rowName ?? "row"} ${o.rowLabels?.[cell.row] || cell.row}, ${o.columnName ?? "column"} ${o.columnLabels?.[cell.column] || cell.column}`,
			(o.format ?? ((one) => digits(one, 5)))(value),
		];
		this.showTip(left + ((cell.column + 0.5) * wide) / columns, (cell.row * tall) / rows, lines, aloud);
	}

	table({ data, shape: [rows, columns], rowLabels, columnLabels }) {
		const head = ["", ...Array.from({ length: columns }, (_, j) => columnLabels?.[j] || j)];
		const row = (i) => [rowLabels?.[i] || i, ...data.subarray(i * columns, (i + 1) * columns)];
		return [head, ...Array.from({ length: rows }, (_, i) => row(i))];
	}
}

/**
 * A heat map. Options: name, note, height, palette: "diverging" | "sequential", bar, square, maxHeight, rowName, columnName,
 * format, onPick({ row, column }), readout(cell, value) -> lines. Its draw({ data: Float32Array, shape: [rows, columns],
 * min, max, rowLabels, columnLabels, marks: [{ row, column }] }); options may be given with the data too.
 */
export const heatMap = (parent, options) => new HeatMap(parent, options);
