// An open view: its state, its controls, its requests, and what is done when something changes.

import { abortAll, get, Mistake, post } from "./api.js";
import { makeControls } from "./controls.js";
import { breakable, h, put, rich } from "./dom.js";
import { schedule } from "./frame.js";
import { currentLanguage, translator } from "./i18n.js";
import { closeFigures } from "./plots/figure.js";
import { parseState, writeAddress } from "./state.js";

/**
 * Open a view in an element. A view exports id, texts, defaults and render(root, state, tools), which builds the page
 * and returns update(state): it is called once, and after every change, at most once per frame.
 */
export function openView(module, query, main, about) {
	const { id, texts, defaults, render } = module;
	const state = parseState(query, defaults);
	const rows = [];
	const closing = [];
	const mistakes = new Map(); // by endpoint: what its last request got wrong
	const posted = new Map(); // by endpoint: the body of its last request
	const t = translator(texts);
	let update = () => {};
	let closed = false;
	let writing;
	let address = location.hash; // as it was last read or written here

	const banner = h("p", { class: "error banner", role: "alert" });
	const root = h("div", { class: `view ${id}` });

	let asked = 0;
	const busy = (more) => {
		asked += more;
		root.setAttribute("aria-busy", String(asked > 0));
	};
	const showMistakes = () => {
		for (const row of rows) row.clearErrors();
		const others = [];
		for (const [key, { message, field }] of mistakes)
			if (!field || ![`${key}.${field}`, field].some((name) => rows.some((row) => row.showError(name, message)))) others.push(message);
		banner.textContent = [...new Set(others)].join(" ");
	};
	const fail = (key, error) => {
		if (closed) return;
		if (!(error instanceof Mistake)) throw error;
		mistakes.set(key, { message: error.message || t("unreachable"), field: error.field });
		showMistakes();
	};
	const answered = async (key, promise) => {
		busy(1);
		try {
			const answer = await promise;
			if (closed || answer === null) return null;
			if (mistakes.delete(key)) showMistakes();
			return answer;
		} catch (error) {
			fail(key, error);
			return null;
		} finally {
			busy(-1);
		}
	};
	const write = () => {
		if (closed || location.hash !== address) return; // another address is about to be opened
		writeAddress(id, state, defaults);
		address = location.hash;
	};
	const run = () => {
		if (closed) return;
		for (const row of rows) row.refresh(state);
		clearTimeout(writing);
		writing = setTimeout(write, 150);
		Promise.resolve(update(state)).catch(reportError);
	};

	const tools = {
		t,
		about,
		language: currentLanguage(),
		/** Change some of the state. */
		set(changes) {
			Object.assign(state, changes);
			schedule(run);
		},
		/** Have update(state) called in the next frame. */
		refresh: () => schedule(run),
		/** The answer of an endpoint of this view; null where it is outdated or a mistake, which is shown. */
		post: (name, body, key = name) => answered(key, post(id, name, body, `${id}/${key}`)),
		/** The answer where the body is another than that of the last call; undefined where it is the same. */
		async postChanged(name, body, key = name) {
			const text = JSON.stringify(body);
			if (posted.get(key) === text) return undefined;
			posted.set(key, text);
			return tools.post(name, body, key);
		},
		/** What GET answers, or null likewise. */
		get: (path) => answered(path, get(path)),
		/** Show a mistake that the view itself found, at the control of a field; null takes it back. */
		mistake(key, sentence, field) {
			if (sentence === null) mistakes.delete(key);
			else mistakes.set(key, { message: sentence, field });
			showMistakes();
		},
		/** Controls that are bound to the state by their names; see controls.js. */
		controls(parent, specs) {
			const row = makeControls(parent, specs, tools.set);
			row.refresh(state);
			rows.push(row);
			return row;
		},
		/** The title, the sentence below it, and the line that defines the view's words: header(parent).set(title, sentence). */
		header(parent) {
			const title = h("h1", {});
			const sentence = h("p", { class: "lead" });
			parent.append(h("div", { class: "header" }, title, sentence, h("p", { class: "words" }, rich(t(`words.${id}`)))));
			return {
				set(text, lead) {
					if (closed) return; // the title of the window is that of another view
					put(title, breakable(text));
					document.title = `${title.textContent} · phasor lab`;
					if (lead !== undefined) put(sentence, rich(lead));
				},
			};
		},
		/** Call a function when the view is left. */
		onClose: (work) => closing.push(work),
	};

	put(main, root);
	const rendered = render(root, state, tools);
	if (typeof rendered === "function") update = rendered;
	(root.querySelector(".header") ?? root).append(banner);
	const next = about.views[about.views.indexOf(id) + 1];
	if (next) root.append(h("p", { class: "next" }, h("a", { href: `#/${next}` }, t("nextView"), " ", h("b", {}, t(next)), " →")));
	schedule(run);

	return {
		id,
		state,
		refresh: tools.refresh,
		/** Take the state of another address of the same view. */
		navigate(other) {
			address = location.hash;
			Object.assign(state, parseState(other, defaults));
			schedule(run);
		},
		close() {
			closed = true;
			clearTimeout(writing);
			abortAll();
			for (const work of closing) work();
			closeFigures();
		},
	};
}
