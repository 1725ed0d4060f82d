// The report's completions: filters, search, conversations as bubbles, and two answers side by side; after diff.js.

const PAGE = 8; // groups at a time
let MOST_SHOWN = PAGE, CHOSEN = null; // CHOSEN: the row that the next one is compared with
const at = (id) => document.getElementById(id);

function options(select, pairs) {
  const before = select.value;
  select.replaceChildren(...pairs.map(([value, text]) => make("option", { value }, text)));
  if (pairs.some(([value]) => String(value) === before)) select.value = before;
}

function fillFilters() {
  const rows = DATA.completions.rows, steps = [...new Set(rows.map((row) => row.s))].sort((a, b) => a - b);
  options(at("run"), [["", "all"], ...DATA.runs.map((name, i) => [i, name])]);
  at("run").parentNode.hidden = DATA.runs.length < 2;
  options(at("step"), [["", "all"], ...steps.map((step) => [step, step])]);
  at("filters").hidden = !rows.length;
}

function promptText(row) { return DATA.completions.prompts[row.p].map(([, text]) => text).join("\n"); }

function matching() {
  const text = at("text").value.toLowerCase(), run = at("run").value, step = at("step").value;
  const low = at("low").value === "" ? -Infinity : Number(at("low").value), high = at("high").value === "" ? Infinity : Number(at("high").value);
  const bounded = low !== -Infinity || high !== Infinity;
  const found = DATA.completions.rows.filter((row) =>
    (run === "" || row.r === Number(run)) && (step === "" || row.s === Number(step)) &&
    (!bounded || (row.w !== undefined && row.w >= low && row.w <= high)) &&
    (!text || row.c.toLowerCase().includes(text) || promptText(row).toLowerCase().includes(text)));
  return ordered(found, at("order").value);
}

function ordered(rows, order) {
  const reward = (row, none) => row.w ?? none;
  if (order === "best") return rows.toSorted((a, b) => reward(b, -Infinity) - reward(a, -Infinity));
  if (order === "worst") return rows.toSorted((a, b) => reward(a, Infinity) - reward(b, Infinity));
  if (order === "long") return rows.toSorted((a, b) => (b.n ?? b.c.length) - (a.n ?? a.c.length));
  if (order !== "groups") return rows;
  const groups = Object.values(Object.groupBy(rows, (row) => `${row.r} ${row.s} ${row.g ?? row.p}`));
  const spread = (group) => Math.max(...group.map((row) => reward(row, 0))) - Math.min(...group.map((row) => reward(row, 0)));
  return groups.map((group) => [spread(group), group]).sort(([a], [b]) => b - a).flatMap(([, group]) => group);
}

// ---- a row

function bubble(kind, who, text) {
  const node = make("div", { class: `bubble ${kind}` });
  if (who) node.append(make("span", { class: "who" }, who));
  const sought = at("text").value.toLowerCase();
  if (!sought) { node.append(text); return node; }
  let from = 0;
  for (let i; (i = text.toLowerCase().indexOf(sought, from)) >= 0; from = i + sought.length)
    node.append(text.slice(from, i), make("mark", {}, text.slice(i, i + sought.length)));
  node.append(text.slice(from));
  return node;
}

function asked(row) {
  return DATA.completions.prompts[row.p].map(([who, text, places]) => {
    const node = bubble(who === "assistant" ? "answer" : "asks", who, text.trim());
    for (const place of places ?? [])
      node.append(make("img", { class: "picture", src: DATA.completions.pictures[place], alt: "picture of the prompt" }));
    return node;
  });
}

function answered(row) {
  if (row.u) return row.u.map(([who, text]) => bubble(who === "policy" ? "answer" : "asks", who, text.trim()));
  return [bubble("answer", row.d ? "demonstration" : "", row.c.trim())];
}

function facts(row) {
  const tags = [...(row.t ? ["cut off"] : []), ...(row.d ? ["demonstration"] : [])];
  const said = [
    row.n === undefined ? null : `${row.n} tokens`,
    row.b === undefined ? null : `read as ${row.b} texts`,
    row.a === undefined ? null : `advantage ${row.e === undefined ? "" : `${DATA.completions.said[row.e]} = `}${number(row.a)}`,
  ].filter(Boolean);
  return make("div", { class: "facts" },
    make("span", { class: "reward" }, row.w === undefined ? "no reward" : `reward ${number(row.w)}`),
    ...Object.entries(row.x ?? {}).map(([name, value]) => make("span", { class: "tag" }, `${name.split("/").at(-1)} ${number(value)}`)),
    ...said.map((text) => make("span", {}, text)), ...tags.map((text) => make("span", { class: "tag" }, text)));
}

// Answers to one prompt at one step, beneath it.
function item(rows) {
  const [first] = rows, same = DATA.completions.rows.filter((other) => other.p === first.p && other.r === first.r && other.s !== first.s);
  const where = [...(DATA.runs.length > 1 ? [DATA.runs[first.r]] : []), `step ${first.s}`, ...(first.g === undefined ? [] : [`group ${first.g}`]), ...(first.f === undefined ? [] : [`rewards: ${DATA.completions.said[first.f]}`])];
  return make("div", { class: "item" }, make("div", { class: "facts" }, ...where.map((text) => make("span", {}, text))), ...asked(first),
    make("div", { class: "answers" }, ...rows.map((row) => make("div", {}, facts(row), ...answered(row), others(row, same)))));
}

// What an answer can be compared with.
function others(row, same) {
  const compare = make("button", { type: "button", class: "plain", "aria-pressed": String(row === CHOSEN) }, row === CHOSEN ? "compare with …" : "compare");
  compare.addEventListener("click", () => {
    if (CHOSEN && CHOSEN !== row) { const first = CHOSEN; CHOSEN = null; pair(first, row); }
    else CHOSEN = CHOSEN === row ? null : row;
    list();
  });
  const steps = [...new Set(same.map((other) => other.s))];
  const buttons = (steps.length > 12 ? [...steps.slice(0, 6), ...steps.slice(-6)] : steps).map((step) => {
    const button = make("button", { type: "button", class: "plain" }, step);
    const best = same.filter((other) => other.s === step).reduce((a, b) => ((b.w ?? -Infinity) > (a.w ?? -Infinity) ? b : a));
    button.addEventListener("click", () => pair(...(step < row.s ? [best, row] : [row, best])));
    return button;
  });
  return make("div", { class: "others" }, compare, ...(buttons.length ? ["with the best of step", ...buttons] : []));
}

// Neighbours of one group, or of one prompt where groups are not known.
function together(rows) {
  const found = [];
  let before = null;
  for (const row of rows) {
    const name = `${row.r} ${row.s} ${row.p} ${row.g}`;
    if (name === before) found.at(-1).push(row);
    else found.push([row]);
    before = name;
  }
  return found;
}

// Two answers, what only one of them has marked.
function pair(a, b) {
  const pieces = difference(a.c, b.c);
  const where = (row) => make("p", { class: "note" }, `${DATA.runs.length > 1 ? `${DATA.runs[row.r]}, ` : ""}step ${row.s}`);
  const side = (row, own, tag) => make("div", {}, where(row), facts(row),
    make("div", { class: "text" }, ...pieces.filter(([sign]) => sign === "=" || sign === own).map(([sign, text]) => (sign === "=" ? text : make(tag, {}, text)))));
  const close = make("button", { type: "button", class: "plain" }, "close");
  close.addEventListener("click", () => { at("pair").hidden = true; });
  const prompt = a.p === b.p ? [make("p", { class: "note" }, promptText(a))] : [make("p", { class: "note" }, "Answers to different prompts.")];
  at("pair").replaceChildren(...prompt, make("div", { class: "sides" }, side(a, "-", "del"), side(b, "+", "ins")), make("div", { class: "others" }, close));
  at("pair").hidden = false;
  at("pair").scrollIntoView({ block: "nearest" });
}

function list() {
  const found = matching(), groups = together(found), all = DATA.completions.rows.length;
  at("found").textContent = all ? (found.length === all ? "" : `${found.length} of ${all} match.`) : "";
  at("list").replaceChildren(...groups.slice(0, MOST_SHOWN).map(item));
  at("more").hidden = groups.length <= MOST_SHOWN;
}

function startCompletions() {
  fillFilters();
  at("filters").addEventListener("input", () => { MOST_SHOWN = PAGE; list(); });
  at("more").addEventListener("click", () => { MOST_SHOWN += PAGE; list(); });
  list();
}
