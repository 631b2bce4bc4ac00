// Numbers as people read them: thousands separated, true minus signs, short forms for axes.

const minus = (text) => text.replace("-", "−");

/** An integer with separators; BigInt too: 68,719,476,736. */
export function integer(value) {
	return minus((typeof value === "bigint" ? value : Math.round(value)).toLocaleString("en-US"));
}

/** A number with a fixed count of decimals. */
export function fixed(value, decimals = 2) {
	if (value === null || value === undefined || Number.isNaN(value)) return "–";
	return minus(value.toLocaleString("en-US", { minimumFractionDigits: decimals, maximumFractionDigits: decimals }));
}

/** A number with `count` significant digits, in scientific notation where it is tiny or huge. */
export function digits(value, count = 4) {
	if (value === null || value === undefined || Number.isNaN(value)) return "–";
	if (value === 0) return "0";
	const size = Math.abs(value);
	if (size >= 1e-4 && size < 1e15) {
		if (Number.isInteger(value)) return integer(value);
		return minus(value.toLocaleString("en-US", { maximumSignificantDigits: Math.max(count, Math.floor(Math.log10(size)) + 1) }));
	}
	const power = Math.floor(Math.log10(size));
	return minus(`${Number((value / 10 ** power).toPrecision(Math.min(count, 3)))}×10${superscript(power)}`);
}

/** A short form for axes and dials: 512, 4,096, 11.2 k, 2.1 M. */
export function compact(value) {
	const size = Math.abs(value);
	for (const [unit, name] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]])
		if (size >= unit * 10 || (size >= unit && unit > 1e3)) {
			const short = value / unit;
			return minus(`${Number(short.toFixed(short < 100 ? 1 : 0))} ${name}`);
		}
	return size >= 100 || Number.isInteger(value) ? integer(value) : digits(value, 2);
}

const RAISED = "⁰¹²³⁴⁵⁶⁷⁸⁹";
/** An exponent: 10 to the superscript(-6). */
export function superscript(power) {
	return String(power).replace("-", "⁻").replace(/\d/g, (digit) => RAISED[digit]);
}
