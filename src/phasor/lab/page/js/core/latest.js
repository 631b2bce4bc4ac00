// Requests while something is dragged: one at a time, and always the newest next.

/**
 * A function load(make): it posts make() to an endpoint of the view, hands the answer to draw(answer), and goes on as long as
 * make() has changed in the meantime. An older request is not aborted, so that a drag shows every step that can be computed.
 */
export function latest(tools, name, draw) {
	let asking = false;
	let asked = "";
	return async (make) => {
		if (asking) return;
		asking = true;
		try {
			for (let body = make(); JSON.stringify(body) !== asked; body = make()) {
				asked = JSON.stringify(body);
				const answer = await tools.post(name, body);
				if (answer !== null) draw(answer);
			}
		} finally {
			asking = false;
		}
	};
}
