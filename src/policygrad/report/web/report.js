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

// ---- the step in progress

function lasted(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  return seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

function inProgress(p) {
  const name = DATA.progress.length > 1 ? `${p.run}: ` : "", took = Math.max(0, Date.now() / 1000 - p.since);
  if (!p.is_running) return make("p", {}, `${name}no process takes step ${p.step}: the run was stopped, or has ended with an error.`);
  if (p.of !== null && p.step > p.of) return make("p", {}, `${name}all ${p.of} steps are done; evaluating and saving for ${lasted(took)}.`);
  const usual = p.usual ? `, usually ${p.usual < 10 ? p.usual.toPrecision(2) : Math.round(p.usual)} s` : "";
  const bar = p.usual ? [make("progress", { max: 1, value: Math.min(1, took / p.usual) })] : [];
  return make("p", {}, `${name}step ${p.step}${p.of === null ? "" : ` of ${p.of}`} in progress: ${lasted(took)}${usual} `, ...bar);
}

function showProgress() { at("now").replaceChildren(...(DATA.progress ?? []).map(inProgress)); }

if (at("now")) { showProgress(); setInterval(showProgress, 1000); }

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
  showProgress();
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
