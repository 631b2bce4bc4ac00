// Light and dark: by the system until the switch is used. Colors of canvases are read from the style sheet.

const system = matchMedia("(prefers-color-scheme: dark)");
let colors = new Map();

/** "light" or "dark". */
export function currentTheme() {
  return localStorage.getItem("theme") ?? (system.matches ? "dark" : "light");
}

function apply() {
  document.documentElement.dataset.theme = currentTheme();
  colors = new Map();
  dispatchEvent(new Event("theme"));
}

/** Change to the other theme; the event "theme" of the window has plots drawn again. */
export function toggleTheme() {
  localStorage.setItem("theme", currentTheme() === "dark" ? "light" : "dark");
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
