// Work that is done at most once per frame of the screen.

const waiting = new Set();
let asked = false;

/** Run a function in the next frame, once however often it is scheduled; within a frame, at its end. */
export function schedule(work) {
	waiting.add(work);
	if (!asked) requestAnimationFrame(flush);
	asked = true;
}

function flush() {
	for (const work of waiting) {
		waiting.delete(work);
		try {
			work();
		} catch (error) {
			reportError(error);
		}
	}
	asked = false;
}
