// What the server does, asked for once a second.

const SECONDS = 120;
const samples = [];
const form = document.getElementById("key");
const show = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });

function card(value, label) {
	const box = document.createElement("div");
	const number = document.createElement("b");
	const text = document.createElement("span");
	number.textContent = value;
	text.textContent = label;
	box.append(number, text);
	return box;
}

function rates() {
	return samples.slice(1).map((now, i) => (now.new_tokens - samples[i].new_tokens) / (now.time - samples[i].time));
}

function draw(values) {
	const most = Math.max(1, ...values);
	const step = 600 / (SECONDS - 1);
	const points = values.map((value, i) => `${600 - (values.length - 1 - i) * step},${150 - (140 * value) / most}`);
	const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
	line.setAttribute("points", points.join(" "));
	document.getElementById("chart").replaceChildren(line);
	document.getElementById("most").textContent = `The top of the chart is ${show.format(most)} tokens per second.`;
}

async function update() {
	const state = document.getElementById("state");
	try {
		const key = sessionStorage.getItem("key");
		const response = await fetch("/stats", { headers: key === null ? {} : { Authorization: `Bearer ${key}` } });
		form.hidden = response.status !== 401;
		if (response.status === 401) {
			state.textContent = key === null ? "This server asks for its API key." : "This is not the API key of this server.";
			state.className = key === null ? "" : "bad";
			return;
		}
		if (!response.ok) throw new Error((await response.json()).error.message);
		const stats = await response.json();
		document.getElementById("model").textContent = stats.model;
		state.className = "";
		if (stats.running === undefined) {
			state.textContent = "This model gives embeddings.";
			return;
		}
		samples.push(stats);
		if (samples.length > SECONDS + 1) samples.shift();
		const values = rates();
		state.textContent = stats.running + stats.waiting ? "answering" : "idle";
		document.getElementById("cards").replaceChildren(
			card(show.format(values.at(-1) ?? 0), "new tokens per second"),
			card(show.format(stats.running), "answers computed"),
			card(show.format(stats.waiting), "requests waiting"),
			card(`${show.format((100 * stats.pages_held) / Math.max(1, stats.pages))} %`, "of the cache in use"),
			card(show.format(stats.prompt_tokens), "prompt tokens read"),
			card(show.format(stats.cached_tokens), "prompt tokens shared"),
			card(show.format(stats.new_tokens), "tokens generated"),
			card(show.format(stats.finished), "requests answered"),
		);
		draw(values);
	} catch (error) {
		state.textContent = error instanceof TypeError ? "The server does not answer." : error.message;
		state.className = "bad";
	}
}

form.addEventListener("submit", (event) => {
	event.preventDefault();
	sessionStorage.setItem("key", form.elements.key.value.trim());
	form.reset();
	update();
});

update();
setInterval(update, 1000);
