// The report's page put together, and renewed where a server follows the run; last of the scripts.

const SECONDS = 2; // between two questions to the server
let picked = DATA.first[0] ?? Object.keys(DATA.metrics)[0], redraw = () => {};

function pick(name) {
  picked = name;
  at("picker").value = name;
  show();
}

function show() {
  picked ??= DATA.first[0] ?? Object.keys(DATA.metrics)[0];
  fillPicker(at("picker"));
  if (picked) at("picker").value = picked;
  const draws = [showCurves(picked, pick), timeline(at("timeline"))];
  redraw = () => draws.forEach((draw) => draw());
}

at("picker").addEventListener("change", (event) => pick(event.target.value));
at("legend").addEventListener("click", () => redraw());
show();
startCompletions();

// ---- live

let stamp = null;

// The page as it now is: its data, and the pieces of text that change. Filters stay as they are.
function renew(text) {
  const fresh = new DOMParser().parseFromString(text, "text/html");
  DATA = JSON.parse(fresh.getElementById("data").textContent);
  CHOSEN = null;
  for (const node of fresh.querySelectorAll("[data-live]")) {
    const old = document.querySelector(`[data-live="${node.dataset.live}"]`);
    const open = [...old.querySelectorAll("details")].map((d) => d.open);
    old.replaceWith(node);
    node.querySelectorAll("details").forEach((d, i) => { d.open = open[i] ?? d.open; });
  }
  show();
  fillFilters();
  list();
}

async function follow() {
  try {
    const answer = await fetch(`stamp${location.search}`, { cache: "no-store" });
    if (!answer.ok) throw new Error(answer.status);
    const now = await answer.text();
    if (stamp !== null && now !== stamp) renew(await (await fetch(location.href, { cache: "no-store" })).text());
    stamp = now;
    at("pulse").textContent = "";
  } catch {
    at("pulse").textContent = "The server does not answer: what is shown is the last that it said.";
  }
  setTimeout(follow, SECONDS * 1000);
}

if (at("pulse")) follow();
