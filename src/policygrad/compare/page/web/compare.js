// The comparison's page: curves with bands over an axis that can be chosen, a matrix of pairs, tables that sort; after plots.js.

const CHOSEN = { axis: "tokens", measure: "tokens" };
const MOST = 12; // rows that a tip names

const COLOURS = [0, 1, 2, 3, 4, 6]; // s5 is too near to s0 to do without a dash of its own

function colour(i) { return `var(--s${COLOURS[i % COLOURS.length]})`; }

function dash(i) { return DASHES[Math.floor(i / COLOURS.length) % DASHES.length]; }

function swatch(i) {
  const line = make("line", { x1: 0, x2: 22, y1: 6, y2: 6, stroke: colour(i), "stroke-width": 2.5, "stroke-dasharray": dash(i) });
  return make("svg", { class: "key", width: 22, height: 12, "aria-hidden": "true" }, line);
}

// ---- curves

function curves(figure, kind) {
  const hidden = new Set(), buttons = legend(kind.rows.map((row) => row.label), hidden, swatch, () => draw());
  const svg = make("svg", { tabindex: 0, role: "img", "aria-label": "Held-out score. Arrow keys read the values." });
  let at = null, pixels = [], draw = () => {};
  const xs = () => DATA.axes[CHOSEN.axis].values;
  const shown = () => kind.rows.map((row, i) => [row.curves[CHOSEN.axis], i]).filter(([, i]) => !hidden.has(i));
  draw = () => {
    const width = svg.parentNode.clientWidth, height = Math.max(260, Math.min(430, width * 0.52));
    const box = { left: 46, right: width - 14, top: 10, bottom: height - 46 };
    svg.setAttribute("height", height);
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.replaceChildren();
    const lines = shown(), all = lines.length ? lines : kind.rows.map((row, i) => [row.curves[CHOSEN.axis], i]);
    const [low, high] = ends(all.flatMap(([c]) => [...c.low, ...c.high]));
    const last = Math.max(...all.map(([c]) => c.value.findLastIndex((v) => v !== null)), 1);
    const right = xs()[last], x = scale(0, right, box.left, box.right, false), y = scale(low, high, box.bottom, box.top, false);
    const inside = frame(svg, box, x, y, ticks(0, right, false, 6), ticks(low, high, false, 5), DATA.axes[CHOSEN.axis].label);
    if (kind.threshold !== null) inside.append(make("line", { class: "mark-line", x1: box.left, x2: box.right, y1: y(kind.threshold), y2: y(kind.threshold) }));
    const equal = kind.equal[CHOSEN.axis];
    if (equal < right) inside.append(make("line", { class: "mark-line", x1: x(equal), x2: x(equal), y1: box.top, y2: box.bottom }));
    for (const [c, i] of lines) inside.append(make("path", { class: "band", d: area(c, x, y), fill: colour(i) }));
    for (const [c, i] of lines)
      inside.append(make("path", { class: "curve", "data-series": i, d: path(c.value, x, y), stroke: colour(i), "stroke-dasharray": dash(i) }));
    if (at !== null) {
      inside.append(make("line", { class: "hover", x1: x(xs()[at]), x2: x(xs()[at]), y1: box.top, y2: box.bottom }));
      for (const [c, i] of lines) if (c.value[at] !== null) inside.append(make("circle", { cx: x(xs()[at]), cy: y(c.value[at]), r: 4, fill: colour(i) }));
    }
    pixels = xs().slice(0, last + 1).map(x);
  };
  const path = (values, x, y) => values.map((v, i) => (v === null ? "" : `${i ? "L" : "M"}${x(xs()[i]).toFixed(1)} ${y(v).toFixed(1)}`)).join("");
  const area = (c, x, y) => {
    const there = c.value.map((v, i) => i).filter((i) => c.value[i] !== null);
    const side = (values, order) => order.map((i) => `${x(xs()[i]).toFixed(1)} ${y(values[i]).toFixed(1)}`).join("L");
    return there.length ? `M${side(c.high, there)}L${side(c.low, [...there].reverse())}Z` : "";
  };
  const read = (i) => {
    at = i;
    draw();
    const box = svg.getBoundingClientRect();
    const rows = shown().filter(([c]) => c.value[i] !== null).sort(([a], [b]) => b.value[i] - a.value[i]);
    const told = rows.slice(0, MOST).map(([c, n]) => [swatch(n), kind.rows[n].label, `${number(c.value[i])} [${number(c.low[i])}, ${number(c.high[i])}]`]);
    if (rows.length > MOST) told.push([null, `and ${rows.length - MOST} below`, ""]);
    tell(`${DATA.axes[CHOSEN.axis].label}: ${number(xs()[i])}`, told, box.left + pixels[i], box.top + box.height / 2);
  };
  const leave = () => { at = null; hush(); draw(); };
  svg.onpointermove = (event) => {
    const px = event.clientX - svg.getBoundingClientRect().left;
    read(pixels.reduce((best, p, i) => (Math.abs(p - px) < Math.abs(pixels[best] - px) ? i : best), 0));
  };
  svg.onpointerdown = svg.onpointermove; // a finger does not hover
  svg.onpointerleave = (event) => (event.pointerType === "touch" ? undefined : leave());
  svg.onblur = leave;
  svg.onkeydown = (event) => {
    const end = pixels.length - 1;
    const to = { ArrowRight: at === null ? 0 : at + 1, ArrowLeft: at === null ? end : at - 1, Home: 0, End: end }[event.key];
    if (event.key === "Escape") return leave();
    if (to === undefined) return undefined;
    event.preventDefault();
    return read(Math.max(0, Math.min(end, to)));
  };
  figure.append(buttons, all(buttons), make("div", { class: "panel" }, make("p", { class: "axis-name" }, "held-out score, interquartile mean"), svg));
  kind.rows.forEach((row, i) => { if (row.hidden) buttons.querySelector(`[data-series="${i}"]`).click(); });
  watch(figure, () => draw());
  return () => { at = null; draw(); };
}

// "all" and "none", where there are many
function all(buttons) {
  const row = make("div", { class: "tools" });
  if (buttons.childElementCount < 6) return row;
  for (const [text, pressed] of [["show all", "false"], ["hide all", "true"]]) {
    const button = make("button", { type: "button" }, text);
    button.addEventListener("click", () => [...buttons.children].filter((b) => b.getAttribute("aria-pressed") === pressed).forEach((b) => b.click()));
    row.append(button);
  }
  return row;
}

// ---- pairs

function pairs(table, kind) {
  const labels = kind.rows.map((row) => row.label), cells = DATA.pairs[CHOSEN.measure];
  if (labels.length < 2) return;
  const cell = (a, b) => {
    if (a === b) return make("td", {}, "–");
    const [p, low, high, apart] = cells[a][b];
    const td = make("td", { title: `${a} above ${b}: ${number(p)} [${number(low)}, ${number(high)}]` }, p.toFixed(2));
    if (!apart) td.className = "open";
    else td.style.background = `color-mix(in srgb, ${p > 0.5 ? "var(--s0)" : "var(--s1)"} ${Math.round(44 * Math.abs(p - 0.5))}%, transparent)`;
    return td;
  };
  const head = make("tr", {}, make("th", { scope: "col" }, "row above column"), ...labels.map((label) => make("th", { scope: "col" }, label)));
  const rows = labels.map((a) => make("tr", {}, make("th", { scope: "row" }, a), ...labels.map((b) => cell(a, b))));
  table.replaceChildren(make("thead", {}, head), make("tbody", {}, ...rows));
}

// ---- tables

// A press on a head sorts by that column, a second one the other way; what has no number comes last.
function sortable(table) {
  const heads = [...table.querySelectorAll("thead th")], body = table.tBodies[0];
  heads.forEach((th, column) => th.firstElementChild.addEventListener("click", () => {
    const up = th.getAttribute("aria-sort") === "descending" || (column === 0 && th.getAttribute("aria-sort") !== "ascending");
    const value = (tr) => {
      const cell = tr.children[column];
      if (!cell) return null;
      if (column === 0) return cell.textContent;
      return cell.dataset.v ? Number(cell.dataset.v) : null;
    };
    const order = (a, b) => (a === null) - (b === null) || (a < b ? -1 : a > b ? 1 : 0) * (a === null ? 0 : up ? 1 : -1);
    body.append(...[...body.rows].sort((a, b) => order(value(a), value(b))));
    heads.forEach((other) => other.setAttribute("aria-sort", other === th ? (up ? "ascending" : "descending") : "none"));
  }));
}

function start() {
  const figures = [...document.querySelectorAll("[data-curves]")].filter((f) => DATA.kinds[f.dataset.curves].rows.length);
  const draws = figures.map((figure) => curves(figure, DATA.kinds[figure.dataset.curves]));
  const matrices = [...document.querySelectorAll("[data-pairs]")];
  const renew = { axis: () => draws.forEach((draw) => draw()), measure: () => matrices.forEach((table) => pairs(table, DATA.kinds[table.dataset.pairs])) };
  switches((name, value) => { CHOSEN[name] = value; renew[name](); });
  for (const figure of document.querySelectorAll("[data-rates]")) linePlot(figure, DATA.rates[figure.dataset.rates]);
  document.querySelectorAll("table.sortable").forEach(sortable);
  renew.measure();
}

start();
