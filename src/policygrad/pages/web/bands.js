// Curves with bands over an x that may change, for pages that compare runs; after plots.js.

const MOST = 12; // rows that a tip names
const FEW = 20; // points of a curve that are marked each
const COLOURS = [0, 1, 2, 3, 4, 6]; // s5 is too near to s0 to do without a dash of its own

function colour(i) { return `var(--s${COLOURS[i % COLOURS.length]})`; }

function dash(i) { return DASHES[Math.floor(i / COLOURS.length) % DASHES.length]; }

function swatch(i) {
  const line = make("line", { x1: 0, x2: 22, y1: 6, y2: 6, stroke: colour(i), "stroke-width": 2.5, "stroke-dasharray": dash(i) });
  return make("svg", { class: "key", width: 22, height: 12, "aria-hidden": "true" }, line);
}

// Draws `plot` into the svg and reads it out by pointer and arrow keys; returns what draws it anew.
//   names, hidden: of the series, and a set of those that are not shown
//   x(): {label, values}        lines(): by series {value, low, high}, or null; low and high may be missing
//   level, upright(): where dashed lines are, or null        tall: [least, most] of its height
function bandPanel(svg, plot) {
  const [least, most] = plot.tall ?? [260, 430], upright = plot.upright ?? (() => null);
  let at = null, pixels = [];
  const every = () => plot.lines().map((curve, i) => [curve, i]).filter(([curve]) => curve);
  const shown = () => every().filter(([, i]) => !plot.hidden.has(i));
  const draw = () => {
    const width = svg.parentNode.clientWidth, height = Math.max(least, Math.min(most, width * 0.52));
    const box = { left: 46, right: width - 14, top: 10, bottom: height - 46 };
    svg.setAttribute("height", height);
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.replaceChildren();
    const xs = plot.x().values, lines = shown(), all = lines.length ? lines : every();
    const [low, high] = ends(all.flatMap(([c]) => (c.low ? [...c.low, ...c.high] : c.value)));
    const last = Math.max(...all.map(([c]) => c.value.findLastIndex((v) => v !== null)), 0);
    const left = plot.from ?? 0, right = Math.max(xs[last] ?? 1, left + 1e-9), x = scale(left, right, box.left, box.right, false), y = scale(low, high, box.bottom, box.top, false);
    const inside = frame(svg, box, x, y, ticks(left, right, false, 6), ticks(low, high, false, 5), plot.x().label);
    const rule = (place) => inside.append(make("line", { class: "mark-line", ...place }));
    if (plot.level != null) rule({ x1: box.left, x2: box.right, y1: y(plot.level), y2: y(plot.level) });
    if (upright() !== null && upright() < right) rule({ x1: x(upright()), x2: x(upright()), y1: box.top, y2: box.bottom });
    const corner = (values) => (i) => `${x(xs[i]).toFixed(1)} ${y(values[i]).toFixed(1)}`;
    for (const [c, i] of lines) {
      const there = c.value.map((v, n) => n).filter((n) => c.value[n] !== null);
      if (c.low && there.length) inside.append(make("path", { class: "band", d: `M${there.map(corner(c.high)).join("L")}L${[...there].reverse().map(corner(c.low)).join("L")}Z`, fill: colour(i) }));
    }
    for (const [c, i] of lines) {
      const there = c.value.map((v, n) => n).filter((n) => c.value[n] !== null);
      if (there.length <= FEW) for (const n of there) inside.append(make("circle", { class: "value", cx: x(xs[n]), cy: y(c.value[n]), r: there.length === 1 ? 3.5 : 2.8, fill: colour(i) }));
      inside.append(make("path", { class: "curve", "data-series": i, d: there.length ? `M${there.map(corner(c.value)).join("L")}` : "", stroke: colour(i), "stroke-dasharray": dash(i) }));
    }
    if (at !== null) {
      inside.append(make("line", { class: "hover", x1: x(xs[at]), x2: x(xs[at]), y1: box.top, y2: box.bottom }));
      for (const [c, i] of lines) if (c.value[at] !== null) inside.append(make("circle", { cx: x(xs[at]), cy: y(c.value[at]), r: 4, fill: colour(i) }));
    }
    pixels = xs.slice(0, last + 1).map(x);
  };
  const read = (i) => {
    at = i;
    draw();
    const box = svg.getBoundingClientRect(), ranged = (c) => (c.low && c.low[i] !== c.high[i] ? ` [${number(c.low[i])}, ${number(c.high[i])}]` : "");
    const rows = shown().filter(([c]) => c.value[i] !== null).sort(([a], [b]) => b.value[i] - a.value[i]);
    const told = rows.slice(0, MOST).map(([c, n]) => [swatch(n), plot.names[n], number(c.value[i]) + ranged(c)]);
    if (rows.length > MOST) told.push([null, `and ${rows.length - MOST} below`, ""]);
    tell(`${plot.x().label}: ${number(plot.x().values[i])}`, told, box.left + pixels[i], box.top + box.height / 2);
  };
  const leave = () => { at = null; hush(); draw(); };
  svg.onpointermove = (event) => {
    const px = event.clientX - svg.getBoundingClientRect().left;
    if (pixels.length) read(pixels.reduce((best, p, i) => (Math.abs(p - px) < Math.abs(pixels[best] - px) ? i : best), 0));
  };
  svg.onpointerdown = svg.onpointermove; // a finger does not hover
  svg.onpointerleave = (event) => (event.pointerType === "touch" ? undefined : leave());
  svg.onblur = leave;
  svg.onkeydown = (event) => {
    const end = pixels.length - 1, step = Math.max(1, Math.round(end / 60));
    const to = { ArrowRight: at === null ? 0 : at + step, ArrowLeft: at === null ? end : at - step, Home: 0, End: end }[event.key];
    if (event.key === "Escape") return leave();
    if (to === undefined || end < 0) return undefined;
    event.preventDefault();
    return read(Math.max(0, Math.min(end, to)));
  };
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
