// Exact phases: 64-bit fractions of a rotation, as the library computes them.

const RADIANS = (2 * Math.PI) / 2 ** 64;

/** The increments of an answer, decimal strings, as BigInts. */
export const parseIncrements = (texts) => texts.map((text) => BigInt(text));

/** The angle of each pair at a position, in radians from -pi to pi; the product wraps at 2^64, so it is exact. */
export function angles(increments, position) {
	const at = BigInt(Math.round(position)); // what is no integer is refused by the server
	return Float64Array.from(increments, (increment) => Number(BigInt.asIntN(64, increment * at)) * RADIANS);
}
