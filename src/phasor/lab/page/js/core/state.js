// The state of a view in the address: #/phasors?q=3&k=7, only what differs from the defaults.

/** { view, query } of the current address. */
export function readAddress() {
	const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
	return { view: path, query };
}

/** The state that a query stands for: every key of the defaults, with values of the same types. */
export function parseState(query, defaults) {
	const state = { ...defaults };
	for (const [name, text] of new URLSearchParams(query)) {
		if (!(name in defaults)) continue;
		const value = parseValue(text, defaults[name]);
		if (value !== undefined) state[name] = value;
	}
	return state;
}

function parseValue(text, like) {
	if (typeof like === "boolean") return text === "1" ? true : text === "0" ? false : undefined;
	if (typeof like === "bigint") return /^-?\d{1,19}$/.test(text) ? BigInt(text) : undefined;
	if (typeof like === "number") return text !== "" && Number.isFinite(Number(text)) ? Number(text) : undefined;
	return text.slice(0, 4096);
}

/** The query of a state, without what is at its default. */
export function formatState(state, defaults) {
	const query = new URLSearchParams();
	for (const name of Object.keys(defaults)) {
		const value = state[name];
		if (value !== defaults[name]) query.set(name, typeof value === "boolean" ? Number(value) : String(value));
	}
	return query.toString().replaceAll("%2C", ",").replaceAll("%3A", ":");
}

/** Write a state into the address without a new entry of the history. */
export function writeAddress(view, state, defaults) {
	const query = formatState(state, defaults);
	history.replaceState(null, "", query ? `#/${view}?${query}` : `#/${view}`);
}
