// What pages with plots share: axes, a legend, what is told on hover, and lines over x in panels. Plain SVG, nothing fetched.
"use strict";

let DATA = JSON.parse(document.getElementById("data").textContent);
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
addEventListener("keydown", (event) => { if (event.key === "Escape") hush(); });

// Groups of buttons of which one is pressed; `choose` is told the group's name and the button's value.
function switches(choose) {
  for (const group of document.querySelectorAll("[data-switch]"))
    group.addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (!button) return;
      for (const b of group.children) b.setAttribute("aria-pressed", String(b === button));
      choose(group.dataset.switch, button.dataset.value);
    });
}

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
  if (plot.file) downloads(figure, plot.file, () => columnsOf(plot));
  watch(figure, (width) => {
    const fit = Math.max(1, Math.min(plot.panels.length, Math.floor(width / (plot.panels.length > 3 ? 170 : 235))));
    grid.style.setProperty("--across", fit);
    redraw();
  });
}

function columnsOf(plot) {
  const several = plot.panels.length > 1;
  const columns = plot.panels.flatMap((panel) => panel.lines.map((line) => [several ? `${plot.series[line.series]}, ${panel.label}` : plot.series[line.series], line.values]));
  return [[plot.x.label, ...columns.map(([name]) => name)], ...plot.x.values.map((v, i) => [v, ...columns.map(([, values]) => values[i])])];
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
