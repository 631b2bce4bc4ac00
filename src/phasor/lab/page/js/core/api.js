// Requests to the server that served this page.

const running = new Map();

/** A mistake that the server found: one sentence, and the field of the request it is about, if any. */
export class Mistake extends Error {
	constructor(sentence, field) {
		super(sentence);
		this.field = field;
	}
}

/** Plain data by GET; without an answer the sentence is empty. */
export async function get(path) {
	const response = await fetch(path).catch(unreachable);
	return response.ok ? response.json().catch(unreachable) : unreachable();
}

function unreachable() {
	throw new Mistake("", null);
}

const pause = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));

/**
 * The answer of POST /api/<view>/<name>: plain data, or { data: Float32Array, shape, notes } of a matrix.
 * A newer request under the same key aborts an older one, whose answer is then null.
 */
export async function post(view, name, body, key) {
	running.get(key)?.abort();
	const control = new AbortController();
	running.set(key, control);
	const text = JSON.stringify(body);
	try {
		for (let attempt = 0; ; attempt++) {
			const response = await fetch(`/api/${view}/${name}`, {
				method: "POST",
				headers: { "Content-Type": "application/json", "Accept-Language": document.documentElement.lang },
				body: text,
				signal: control.signal,
			});
			if (response.status === 503 && attempt < 5) {
				await pause(200 * 2 ** attempt);
				if (control.signal.aborted) return null;
				continue;
			}
			if (!response.ok) {
				const { error, field } = await response.json();
				throw new Mistake(error, field);
			}
			if (response.headers.get("Content-Type") !== "application/octet-stream") return await response.json();
			const data = new Float32Array(await response.arrayBuffer());
			const shape = response.headers.get("X-Shape").split(",").filter(Boolean).map(Number);
			return { data, shape, notes: JSON.parse(response.headers.get("X-Notes")) };
		}
	} catch (error) {
		if (control.signal.aborted) return null;
		return error instanceof Mistake ? Promise.reject(error) : unreachable(); // no answer, or half of one
	} finally {
		if (running.get(key) === control) running.delete(key);
	}
}

/** Abort what is still asked for, when a view is left. */
export function abortAll() {
	for (const control of running.values()) control.abort();
	running.clear();
}
