// Light and dark: by the system until the switch is used. Colors of canvases are read from the style sheet.

import { remember, remembered } from "./remember.js";

const system = matchMedia("(prefers-color-scheme: dark)");
let chosen = remembered("theme", ["light", "dark"]);
let colors = new Map();

const currentTheme = () => chosen ?? (system.matches ? "dark" : "light");

function apply() {
	document.documentElement.dataset.theme = currentTheme();
	colors = new Map();
	dispatchEvent(new Event("theme"));
}

/** Change to the other theme; the event "theme" of the window has plots drawn again. */
export function toggleTheme() {
	chosen = currentTheme() === "dark" ? "light" : "dark";
	remember("theme", chosen);
	apply();
}

/** The value of a color of style.css: color("query") is that of --query. */
export function color(name) {
	if (!colors.has(name)) colors.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
	return colors.get(name);
}

/** A text in which every var(--name) is replaced by its value, for pictures that leave the page. */
export const resolveColors = (text) => text.replace(/var\(--([\w-]+)\)/g, (_, name) => color(name));

system.addEventListener("change", apply);
apply();
