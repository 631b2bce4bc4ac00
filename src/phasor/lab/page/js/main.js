// The frame of the page: navigation, language, theme, and the view that the address names.

import { about } from "./core/about.js";
import { h, put } from "./core/dom.js";
import { currentLanguage, setLanguage, translator } from "./core/i18n.js";
import { redrawFigures } from "./core/plots/figure.js";
import { formatState, readAddress } from "./core/state.js";
import { toggleTheme } from "./core/theme.js";
import { openView } from "./core/view.js";

const main = document.getElementById("view");
const t = translator({});
let open = null;
let module = null;
let routes = 0; // addresses that were opened: a newer one ends what an older one still waits for

function drawFrame(current) {
	const link = (id) => h("a", { href: `#/${id}`, "aria-current": id === current && "page" }, t(id));
	const nav = document.getElementById("nav");
	const focused = nav.contains(document.activeElement);
	nav.setAttribute("aria-label", t("views"));
	put(nav, about.views.map(link));
	const chosen = nav.querySelector("[aria-current]");
	chosen?.scrollIntoView({ block: "nearest", inline: "nearest" });
	if (focused) chosen?.focus();
	document.querySelector(".skip").textContent = t("skip");
	put(
		document.getElementById("switches"),
		h("button", { type: "button", lang: currentLanguage() === "zh" ? "en" : "zh-CN", title: t("languageName"), onclick: switchLanguage }, t("language")),
		h("button", { type: "button", "aria-label": t("theme"), title: t("theme"), onclick: toggleTheme }, "◐"),
	);
}

function switchLanguage() {
	setLanguage(currentLanguage() === "zh" ? "en" : "zh");
	if (open) {
		const { id, state } = open;
		open.close();
		drawFrame(id);
		open = openView(module, formatState(state, module.defaults), main, about);
	} else route();
	document.querySelector("#switches button").focus();
}

async function route() {
	const { view, query } = readAddress();
	const id = view === "" ? about.views[0] : view;
	if (open?.id === id) {
		if (query !== formatState(open.state, module.defaults)) open.navigate(query);
		return;
	}
	const own = ++routes;
	open?.close();
	open = module = null;
	drawFrame(id);
	if (!about.views.includes(id)) {
		put(main, h("h1", {}, t("missing", { name: id })));
		return;
	}
	const loaded = await import(`./views/${id}.js`).catch(() => null);
	if (own !== routes) return; // another address was opened while the module was loading
	if (!loaded) return void put(main, h("h1", {}, t("unreachable")));
	module = loaded;
	open = openView(module, query, main, about);
	scrollTo(0, 0);
}

document.querySelector(".skip").addEventListener("click", (event) => {
	event.preventDefault();
	main.focus();
});
addEventListener("hashchange", route);
addEventListener("theme", () => {
	redrawFigures();
	open?.refresh();
});
await route();
