// What the browser remembers of this page. It may refuse to, and other programs at this address store theirs there too.

const PREFIX = "phasor-lab-";

/** The value that was remembered, where it is one of these. */
export function remembered(name, values) {
	try {
		return values.find((value) => value === localStorage.getItem(PREFIX + name));
	} catch {
		return undefined;
	}
}

/** Remember a value, where the browser keeps any. */
export function remember(name, value) {
	try {
		localStorage.setItem(PREFIX + name, value);
	} catch {
		// it lasts until the page is left
	}
}
