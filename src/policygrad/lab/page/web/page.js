// Plots of the lab's page: lines over x in panels, and a scatter of the estimators. Plain SVG, nothing fetched.
"use strict";

const DATA = JSON.parse(document.getElementById("data").textContent);
const TIP = document.getElementById("tip");
const DASHES = ["", "7 3", "2 3", "10 3 2 3", "", "5 2", "1 4"];

// ---- small tools

function make(name, attributes = {}, ...children) {
  const svg = ["svg", "g", "path", "line", "text", "circle", "rect", "tspan", "clipPath", "defs"].includes(name);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function number(x) {
  if (x === null || !Number.isFinite(x)) return "–";
  const size = Math.abs(x);
  if (size !== 0 && (size < 1e-3 || size >= 1e5)) {
    if (size < 1e-9) return "0"; // rounding
    const [mantissa, exponent] = x.toExponential(1).split("e");
    return `${Number(mantissa)}e${Number(exponent)}`.replace("-", "−").replace("e-", "e−");
  }
  return String(Number(x.toPrecision(3))).replace("-", "−");
}

// Round numbers between two ends, about so many.
function ticks(low, high, log, many) {
  const found = [], decades = log ? Math.log10(high / low) : 0;
  if (decades > 0.3) {
    for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++)
      for (const m of decades > 2 ? [1] : decades > 0.8 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 7]) found.push(m * 10 ** e);
  } else {
    const raw = (high - low) / many, unit = 10 ** Math.floor(Math.log10(raw));
    const step = unit * [1, 2, 5, 10].find((m) => m * unit >= raw);
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step);
  }
  return found.filter((t) => t >= low - 1e-12 && t <= high * (1 + 1e-9) + 1e-12);
}

// x -> pixels
function scale(low, high, from, to, log) {
  const f = log ? Math.log : (x) => x;
  return (x) => from + ((f(x) - f(low)) / (f(high) - f(low))) * (to - from);
}

// The ends of an axis that shows these values, a little air around them.
function ends(values, { log = false, low = null, high = null } = {}) {
  const kept = values.filter((v) => v !== null && (!log || v > 0));
  let a = Math.min(...kept), b = Math.max(...kept);
  if (!kept.length) [a, b] = [log ? 0.1 : 0, 1];
  if (a === b) [a, b] = log ? [a / 1.5, b * 1.5] : [a - (Math.abs(a) || 1) * 0.2, b + (Math.abs(b) || 1) * 0.2];
  const air = log ? (b / a) ** 0.07 : (b - a) * 0.07;
  return [low ?? (log ? a / air : a - air), high ?? (log ? b * air : b + air)];
}

function key(index, family = null) {
  const mark = family === null
    ? make("line", { x1: 0, x2: 22, y1: 6, y2: 6, stroke: `var(--s${index % 7})`, "stroke-width": 2.5, "stroke-dasharray": DASHES[index % 7] })
    : make("path", { d: shape(family, 11, 6, 5), fill: `var(--s${family})` });
  return make("svg", { class: "key", width: 22, height: 12, "aria-hidden": "true" }, mark);
}

function shape(family, x, y, r) {
  if (family === 1) return `M${x - r} ${y - r}h${2 * r}v${2 * r}h${-2 * r}z`;
  if (family === 2) return `M${x} ${y - r * 1.25}L${x + r * 1.2} ${y + r * 0.9}H${x - r * 1.2}z`;
  if (family === 3) return `M${x} ${y - r * 1.3}L${x + r * 1.3} ${y}L${x} ${y + r * 1.3}L${x - r * 1.3} ${y}z`;
  return `M${x - r} ${y}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0z`;
}

function tell(title, rows, x, y) {
  const lines = rows.map(([mark, name, value]) => make("div", {}, ...(mark ? [mark] : []), make("span", {}, name), make("span", {}, value)));
  TIP.replaceChildren(make("b", {}, title), ...lines);
  TIP.hidden = false;
  const box = TIP.getBoundingClientRect();
  const left = x + 16 + box.width > innerWidth - 8 ? x - box.width - 16 : x + 16;
  TIP.style.left = `${Math.max(8, Math.min(left, innerWidth - box.width - 8))}px`;
  TIP.style.top = `${Math.max(8, Math.min(y - box.height / 2, innerHeight - box.height - 8))}px`;
}

function hush() { TIP.hidden = true; }

// π_old with its index lowered, for an SVG text
function lowered(text) {
  return text.split(/_(ref|old)/).flatMap((piece, i) => i % 2
    ? [make("tspan", { dy: 3, "font-size": 9 }, piece), make("tspan", { dy: -3 }, "\u200b")] : [piece]);
}

// Buttons that hide and show series; `hidden` is a set of indices.
function legend(names, hidden, marks, redraw) {
  const row = make("div", { class: "legend", role: "group", "aria-label": "Series, press to hide or show" });
  names.forEach((name, i) => {
    const button = make("button", { type: "button", "aria-pressed": "true", "data-series": i }, marks(i), name);
    button.addEventListener("click", () => {
      if (!hidden.delete(i)) hidden.add(i);
      button.setAttribute("aria-pressed", String(!hidden.has(i)));
      redraw();
    });
    row.append(button);
  });
  return row;
}

// Draws again whenever the width changes.
function watch(node, draw) {
  let width = 0;
  new ResizeObserver(([entry]) => {
    const now = Math.round(entry.contentRect.width);
    if (now && now !== width) draw((width = now));
  }).observe(node);
}

// Axes, grid and their numbers; returns the group that is clipped to the plot.
let frames = 0;
function frame(svg, box, x, y, xs, ys, xLabel) {
  for (const t of ys) {
    svg.append(make("line", { class: "grid", x1: box.left, x2: box.right, y1: y(t), y2: y(t) }));
    svg.append(make("text", { x: box.left - 8, y: y(t) + 4, "text-anchor": "end" }, number(t)));
  }
  svg.append(make("line", { class: "base", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }));
  let last = -Infinity;
  for (const t of xs) {
    if (x(t) - last < number(t).length * 7 + 10) continue;
    svg.append(make("text", { x: (last = x(t)), y: box.bottom + 18, "text-anchor": "middle" }, number(t)));
  }
  svg.append(make("text", { x: (box.left + box.right) / 2, y: box.bottom + 38, "text-anchor": "middle" }, ...lowered(xLabel)));
  const id = `clip${frames++}`;
  svg.append(make("clipPath", { id }, make("rect", { x: box.left - 4, y: box.top - 4, width: box.right - box.left + 8, height: box.bottom - box.top + 8 })));
  const inside = make("g", { "clip-path": `url(#${id})` });
  svg.append(inside);
  return inside;
}

// ---- lines

function linePlot(figure, plot) {
  const hidden = new Set(), panels = [];
  const redraw = () => panels.forEach((draw) => draw());
  if (plot.series.length > 1) figure.append(legend(plot.series, hidden, (i) => key(i), redraw));
  const grid = make("div", { class: "panels" });
  figure.append(grid);
  const direct = plot.panels.length === 1;
  for (const panel of plot.panels) {
    const svg = make("svg", { tabindex: 0, role: "img", "aria-label": `${panel.label} over ${plot.x.label}. Arrow keys read the values.` });
    grid.append(make("div", { class: "panel" }, make("p", { class: "axis-name" }, panel.label), svg));
    panels.push(linePanel(svg, plot, panel, hidden, direct));
  }
  figure.append(numbers(plot));
  watch(figure, (width) => {
    const fit = Math.max(1, Math.min(plot.panels.length, Math.floor(width / (plot.panels.length > 3 ? 170 : 235))));
    grid.style.setProperty("--across", fit);
    redraw();
  });
}

function linePanel(svg, plot, panel, hidden, direct) {
  let at = null, pixels = [], draw = () => {};
  const xs = plot.x.values;
  const shown = () => panel.lines.filter((line) => !hidden.has(line.series));
  const read = (i) => { // the values at x number i, beside the crosshair
    at = i;
    draw();
    const box = svg.getBoundingClientRect();
    const rows = shown().map((line) => [line.values[i], line]).filter(([v]) => v !== null).sort(([a], [b]) => b - a);
    tell(`${plot.x.label}: ${number(xs[i])}`, rows.map(([v, line]) => [key(line.series), plot.series[line.series], number(v)]), box.left + pixels[i], box.top + box.height / 2);
  };
  const leave = () => { at = null; hush(); draw(); };
  draw = () => {
    const width = svg.parentNode.clientWidth, height = Math.max(170, Math.min(300, width * 0.68));
    const labelled = direct && width > 430 && plot.series.length > 1;
    const room = labelled ? 12 + 6.6 * Math.max(...plot.series.map((s) => s.length)) : 12;
    const box = { left: 46, right: width - room, top: 8, bottom: height - 46 };
    svg.setAttribute("height", height);
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.replaceChildren();
    const values = shown().flatMap((line) => line.values);
    const [low, high] = ends(values.length ? values : panel.lines.flatMap((line) => line.values), panel);
    const [left, right] = [Math.min(...xs), Math.max(...xs)];
    const x = scale(left, right, box.left, box.right, plot.x.log), y = scale(low, high, box.bottom, box.top, panel.log);
    const few = xs.length <= 7;
    const inside = frame(svg, box, x, y, few ? xs : ticks(left, right, plot.x.log, 6), ticks(low, high, panel.log, 4), plot.x.label);
    for (const line of shown()) {
      const points = xs.map((v, i) => [v, line.values[i]]).filter(([, v]) => v !== null && (!panel.log || v > 0)).map(([a, b]) => [x(a), y(b)]);
      const colour = `var(--s${line.series % 7})`;
      inside.append(make("path", { class: "curve", "data-series": line.series, d: points.map(([a, b], i) => `${i ? "L" : "M"}${a.toFixed(1)} ${b.toFixed(1)}`).join(""), stroke: colour, "stroke-dasharray": DASHES[line.series % 7] }));
      if (xs.length <= 20) for (const [a, b] of points) inside.append(make("circle", { cx: a, cy: b, r: 2.8, fill: colour }));
    }
    if (labelled) lineNames(svg, box, shown().filter((line) => line.values.at(-1) >= low && line.values.at(-1) <= high), plot, y);
    if (at !== null) {
      inside.append(make("line", { class: "hover", x1: x(xs[at]), x2: x(xs[at]), y1: box.top, y2: box.bottom }));
      for (const line of shown())
        if (line.values[at] !== null) inside.append(make("circle", { cx: x(xs[at]), cy: y(line.values[at]), r: 4, fill: `var(--s${line.series % 7})` }));
    }
    pixels = xs.map(x);
  };
  svg.onpointermove = (event) => {
    const px = event.clientX - svg.getBoundingClientRect().left;
    read(pixels.reduce((best, p, i) => (Math.abs(p - px) < Math.abs(pixels[best] - px) ? i : best), 0));
  };
  svg.onpointerdown = svg.onpointermove; // a finger does not hover
  svg.onpointerleave = (event) => (event.pointerType === "touch" ? undefined : leave());
  svg.onblur = leave;
  svg.onkeydown = (event) => {
    const step = Math.max(1, Math.round(xs.length / 60));
    const to = { ArrowRight: at === null ? 0 : at + step, ArrowLeft: at === null ? xs.length - 1 : at - step, Home: 0, End: xs.length - 1 }[event.key];
    if (event.key === "Escape") return leave();
    if (to === undefined) return undefined;
    event.preventDefault();
    return read(Math.max(0, Math.min(xs.length - 1, to)));
  };
  return () => draw();
}

// Names at the lines' right ends, pushed apart where they would overlap.
function lineNames(svg, box, lines, plot, y) {
  const names = lines.map((line) => ({ line, y: y(line.values.at(-1)) })).sort((a, b) => a.y - b.y);
  for (let i = 1; i < names.length; i++) names[i].y = Math.max(names[i].y, names[i - 1].y + 15);
  const over = names.length ? Math.max(0, names.at(-1).y - box.bottom) : 0;
  for (const name of names)
    svg.append(make("text", { x: box.right + 8, y: name.y - over + 4, style: `fill: var(--s${name.line.series % 7})` }, plot.series[name.line.series]));
}

// The same as a table, for those who read numbers or cannot see the plot; built when it is opened.
function numbers(plot) {
  const details = make("details", {}, make("summary", {}, "Numbers"));
  details.addEventListener("toggle", () => {
    if (details.childElementCount > 1) return;
    const every = Math.ceil(plot.x.values.length / 31);
    const columns = plot.panels.flatMap((panel) => panel.lines.map((line) => [`${plot.series[line.series]}, ${panel.label}`, line.values]));
    const head = make("tr", {}, ...[plot.x.label, ...columns.map(([name]) => name)].map((t) => make("th", { scope: "col", style: "white-space: normal" }, t)));
    const rows = plot.x.values.map((v, i) => [v, i]).filter(([, i]) => i % every === 0)
      .map(([v, i]) => make("tr", {}, make("th", { scope: "row" }, number(v)), ...columns.map(([, values]) => make("td", {}, number(values[i])))));
    details.append(make("div", { class: "scroll", tabindex: 0 }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows))));
  });
  return details;
}

// ---- the estimators

const VIEW = { side: 0, scaled: 0 };

// (bias, variance); with the length absorbed: of g/scale, so that the bias is that of the direction
function place(row) {
  const f = row.sides[VIEW.side];
  if (!VIEW.scaled) return [f.bias, f.variance];
  return [Math.sqrt(Math.max(0, 1 / f.cosine ** 2 - 1)), f.variance / f.scale ** 2];
}

function scatter(figure) {
  const hidden = new Set(), rows = DATA.algorithms;
  const used = [...new Set(rows.map((row) => row.family))].sort();
  const svg = make("svg", { tabindex: 0, role: "img", "aria-label": "Bias and variance of each algorithm. Arrow keys go from one to the next." });
  let at = null, spots = [];
  const draw = () => {
    const width = svg.parentNode.clientWidth, height = Math.max(320, Math.min(470, width * 0.5));
    const box = { left: 46, right: width - 14, top: 10, bottom: height - 46 };
    svg.setAttribute("height", height);
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.replaceChildren();
    const shown = rows.filter((row) => !hidden.has(used.indexOf(row.family)));
    const all = rows.map(place).filter((p) => p.every(Number.isFinite));
    const [left, right] = ends(all.map(([b]) => b)), [low, high] = ends(all.map(([, v]) => v), { log: true });
    const x = scale(Math.min(left, -0.03), right, box.left, box.right, false), y = scale(low, high, box.bottom, box.top, true);
    const xs = ticks(0, right, false, 7);
    const inside = frame(svg, box, x, y, xs, ticks(low, high, true, 5), VIEW.scaled ? "bias of the direction / ‖∇J‖" : "bias / ‖∇J‖");
    spots = merged(shown.filter((row) => place(row).every(Number.isFinite)), x, y);
    for (const spot of spots)
      inside.append(make("path", { class: "point", "data-name": spot.rows.map((r) => r.name).join(" "), d: shape(spot.rows[0].family, spot.x, spot.y, spot === spots[at] ? 8 : 6), fill: `var(--s${spot.rows[0].family})` }));
    spotNames(svg, box, spots);
  };
  const read = (i) => {
    at = i;
    draw();
    const box = svg.getBoundingClientRect(), spot = spots[i];
    const lines = spot.rows.flatMap((row) => {
      const f = row.sides[VIEW.side], e = row.errors[VIEW.side];
      const [bias, variance] = place(row);
      const plus = (name) => (e && !VIEW.scaled ? ` ± ${number(e[name])}` : "");
      return [[key(0, row.family), row.name, ""], [null, "bias", number(bias) + plus("bias")], [null, "variance", number(variance) + plus("variance")], [null, "cosine", number(f.cosine)]].slice(0, spot.rows.length > 2 && row !== spot.rows.at(-1) ? 1 : 4);
    });
    tell(spot.rows.length > 1 ? "Equal, or nearly" : DATA.families[spot.rows[0].family], lines, box.left + spot.x, box.top + spot.y);
  };
  const leave = () => { if (at !== null) { at = null; draw(); } hush(); };
  svg.onpointermove = (event) => {
    const box = svg.getBoundingClientRect(), [px, py] = [event.clientX - box.left, event.clientY - box.top];
    const far = spots.map((spot) => Math.hypot(spot.x - px, spot.y - py)), near = far.indexOf(Math.min(...far));
    if (far[near] < 30) read(near);
    else leave();
  };
  svg.onpointerdown = svg.onpointermove; // a finger does not hover
  svg.onpointerleave = (event) => (event.pointerType === "touch" ? undefined : leave());
  svg.onblur = leave;
  svg.onkeydown = (event) => {
    if (event.key === "Escape") return leave();
    const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!by || !spots.length) return undefined;
    event.preventDefault();
    return read(at === null ? 0 : (at + by + spots.length) % spots.length);
  };
  figure.append(
    legend(used.map((f) => DATA.families[f]), hidden, (i) => key(i, used[i]), draw),
    make("div", { class: "panel" }, make("p", { class: "axis-name" }, "variance / ‖∇J‖², one group; logarithmic"), svg),
  );
  watch(figure, draw);
  return draw;
}

// Points that fall on one another are one.
function merged(rows, x, y) {
  const spots = [];
  for (const row of rows) {
    const [bias, variance] = place(row), here = { x: x(bias), y: y(variance), rows: [row] };
    const same = spots.find((s) => s.rows[0].family === row.family && Math.hypot(s.x - here.x, s.y - here.y) < 5);
    if (same) same.rows.push(row);
    else spots.push(here);
  }
  return spots.sort((a, b) => a.x - b.x || a.y - b.y);
}

// A name beside each point, at the first place where it covers neither a point nor another name.
function spotNames(svg, box, spots) {
  const taken = spots.map((s) => ({ left: s.x - 7, right: s.x + 7, top: s.y - 7, bottom: s.y + 7 }));
  const free = (r) => r.left >= box.left && r.right <= box.right + 12 && r.top >= 0 && r.bottom <= box.bottom && taken.every((t) => r.right < t.left || r.left > t.right || r.bottom < t.top || r.top > t.bottom);
  for (const spot of spots) {
    const names = spot.rows.map((row) => row.name);
    const short = names.length > 1 ? `${names[0]} +${names.length - 1}` : names[0];
    for (const [text, far] of [[names.join(", "), false], [short, false], [short, true]]) {
      const w = text.length * 6.5;
      const places = far
        ? [[-w / 2, -36], [-w / 2, 22], [-4, 20], [4 - w, 20]]
        : [[10, -7], [-10 - w, -7], [-w / 2, -23], [-w / 2, 9], [8, -20], [8, 6], [-8 - w, -20], [-8 - w, 6]];
      const found = places.map(([dx, dy]) => ({ left: spot.x + dx, right: spot.x + dx + w, top: spot.y + dy, bottom: spot.y + dy + 14 })).find(free);
      if (!found) continue;
      taken.push(found);
      svg.append(make("text", { class: "name", x: found.left, y: found.top + 11 }, text));
      break;
    }
  }
}

function scatterSentence() {
  const rows = DATA.algorithms.filter((row) => place(row).every(Number.isFinite));
  if (!rows.length) return;
  const least = (i) => rows.reduce((best, row) => (place(row)[i] < place(best)[i] ? row : best));
  const exact = rows.filter((row) => !row.errors[VIEW.side] && place(row)[0] < 1e-9).map((row) => row.name);
  const bias = least(0), variance = least(1);
  const unbiased = exact.length ? `${exact.join(", ").replace(/, ([^,]*)$/, " and $1")} ${exact.length > 1 ? "are" : "is"} unbiased` : `the least bias is ${bias.name}'s, ${number(place(bias)[0])}${VIEW.scaled || !bias.errors[VIEW.side] ? "" : ` ± ${number(bias.errors[VIEW.side].bias)}`}`;
  const text = `${VIEW.side ? "Off-policy" : "On-policy"}${VIEW.scaled ? ", length absorbed," : ""} ${unbiased}; the least variance is ${variance.name}'s, ${number(place(variance)[1])} of ‖∇J‖², at a bias of ${number(place(variance)[0])}.`;
  document.getElementById("scatter-finding").textContent = text;
}

const SORT = { key: null, up: true };

function table() {
  const keys = [...document.querySelectorAll("#figures thead button")].map((b) => b.dataset.key);
  const value = (row, k) => (k === "name" ? row.name : row.sides[VIEW.side][k] ?? Infinity);
  const rows = [...DATA.algorithms];
  if (SORT.key) rows.sort((a, b) => (value(a, SORT.key) < value(b, SORT.key) ? -1 : 1) * (SORT.up ? 1 : -1));
  const cell = (row, k) => {
    const exact = !row.errors[VIEW.side], v = row.sides[VIEW.side][k];
    const text = v === null ? "∞" : exact && Math.abs(v) < 1e-9 ? "0" : v.toFixed(3).replace("-", "−");
    return make("td", {}, text);
  };
  document.querySelector("#figures tbody").replaceChildren(
    ...rows.map((row) => make("tr", {}, make("th", { scope: "row" }, row.name), ...keys.slice(1).map((k) => cell(row, k)))),
  );
  for (const th of document.querySelectorAll("#figures thead th")) {
    const mine = th.firstElementChild.dataset.key === SORT.key;
    th.setAttribute("aria-sort", mine ? (SORT.up ? "ascending" : "descending") : "none");
  }
}

function start() {
  const draw = scatter(document.getElementById("scatter"));
  const renew = () => { draw(); table(); scatterSentence(); };
  for (const group of document.querySelectorAll("[data-switch]"))
    group.addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (!button) return;
      for (const b of group.children) b.setAttribute("aria-pressed", String(b === button));
      VIEW[group.dataset.switch] = Number(button.dataset.value);
      renew();
    });
  for (const button of document.querySelectorAll("#figures thead button"))
    button.addEventListener("click", () => {
      SORT.up = SORT.key === button.dataset.key ? !SORT.up : true;
      SORT.key = button.dataset.key;
      table();
    });
  renew();
  for (const figure of document.querySelectorAll("[data-plot]")) linePlot(figure, DATA.plots[figure.dataset.plot]);
  addEventListener("keydown", (event) => { if (event.key === "Escape") hush(); });
}

start();
