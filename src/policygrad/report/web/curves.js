// The report's curves: what people look at first in small, any metric in large, and the time of the steps; after bands.js.

const HIDDEN = new Set(); // series that are not shown, in all plots at once

function ofMetric(name, tall) {
  const plot = DATA.metrics[name];
  return {
    names: DATA.series,
    hidden: HIDDEN,
    x: () => ({ label: "step", values: DATA.metrics[name].x }),
    lines: () => DATA.metrics[name].lines,
    from: Math.min(plot.x[0], 1),
    tall,
  };
}

// A metric in plain words; its key is what the pointer shows.
function titleOf(name) { return DATA.metrics[name].title ?? name; }

// The name of a metric with its unit; pressed, it is shown in large.
function heading(name, pick) {
  const metric = DATA.metrics[name], unit = metric.unit && !titleOf(name).includes(metric.unit) ? `, ${metric.unit}` : "";
  const button = make("button", { type: "button", title: metric.text ? `${name}: ${metric.text}` : name }, make("b", {}, titleOf(name)), unit);
  button.addEventListener("click", () => { pick(name); document.getElementById("metric").scrollIntoView(); });
  return make("p", { class: "axis-name" }, button);
}

function panel(name, tall, ...above) {
  const svg = make("svg", { tabindex: 0, role: "img", "aria-label": `${titleOf(name)} over the steps. Arrow keys read the values.` });
  const draw = bandPanel(svg, ofMetric(name, tall));
  const figure = make("figure", { "data-metric": name }, ...above, make("div", { class: "panel" }, svg));
  downloads(figure, `${name}${tall[0] > 200 ? "-large" : ""}`, () => tableOf({ label: "step", values: DATA.metrics[name].x }, DATA.series, DATA.metrics[name].lines));
  watch(figure, draw);
  return [figure, draw];
}

// Everything above "Completions", for the data at hand; `chosen` is the metric in the picker.
function showCurves(chosen, pick) {
  const draws = [], place = (id) => document.getElementById(id);
  const redraw = () => draws.forEach((draw) => draw());
  if (DATA.series.length > 1) {
    const buttons = legend(DATA.series, new Set(), swatch, () => {});
    for (const [i, button] of [...buttons.children].entries()) {
      button.setAttribute("aria-pressed", String(!HIDDEN.has(i)));
      button.addEventListener("click", () => {
        if (!HIDDEN.delete(i)) HIDDEN.add(i);
        button.setAttribute("aria-pressed", String(!HIDDEN.has(i)));
        redraw();
      });
    }
    place("legend").replaceChildren(buttons, all(buttons));
  }
  place("first").replaceChildren(...DATA.first.map((name) => {
    const [figure, draw] = panel(name, [150, 210], heading(name, pick));
    draws.push(draw);
    return figure;
  }));
  if (!DATA.first.length) place("first").replaceChildren(make("p", { class: "note" }, "No step is done yet."));
  draws.push(showMetric(chosen));
  place("thinned").textContent = bandWords();
  return redraw;
}

function bandWords() {
  const per = Math.max(1, ...Object.values(DATA.metrics).map((m) => m.per)), seeds = DATA.runs.length > DATA.series.length;
  const error = Object.values(DATA.metrics).some((m) => m.error) ? "The band of a held-out curve is its 95 % interval over problems." : "";
  if (!seeds && per === 1) return error;
  const of = [seeds ? "the runs of one configuration" : "", per > 1 ? `the ${per} steps that a point stands for` : ""].filter(Boolean).join(" and ");
  return `Lines are means over ${of}; bands go from the lowest to the highest.${error ? ` ${error}` : ""}`;
}

// ---- one metric

function fillPicker(select) {
  select.replaceChildren(...Object.entries(DATA.chapters).map(([title, names]) => make("optgroup", { label: title }, ...names.map((name) => make("option", { value: name }, titleOf(name) === name ? name : `${titleOf(name)} (${name})`)))));
}

function showMetric(name) {
  const figure = document.getElementById("picked"), said = document.getElementById("meaning"), metric = DATA.metrics[name];
  if (!metric) return () => {};
  const [plot, draw] = panel(name, [240, 380], make("p", { class: "axis-name" }, make("b", {}, titleOf(name)), metric.unit ? `, ${metric.unit}` : "", ...(titleOf(name) === name ? [] : [" ", make("code", {}, name)])));
  figure.replaceChildren(plot, metricTable(name));
  const meant = (label, text) => (text ? [make("p", { class: "meant" }, make("b", {}, label), " ", text)] : []);
  said.replaceChildren(...meant("What it is:", metric.text), ...meant("When it moves:", metric.interpretation));
  if (!metric.text) said.replaceChildren(make("p", { class: "note" }, "Nobody has described this metric: it is the run's own."));
  return draw;
}

function metricTable(name) {
  const metric = DATA.metrics[name];
  const lines = metric.lines.flatMap((line, i) => (line ? [{ series: i, values: line.value }] : []));
  return numbers({ x: { label: "step", values: metric.x }, series: DATA.series, panels: [{ label: name, lines }] });
}

// ---- the time of the steps

const TIMES = [["time/rollout", "waiting for samples and rewards"], ["time/update", "learning"], ["time/step", "the step"]];

// Bars of a step's parts on one another, of the first series that is shown.
function timeline(figure) {
  const there = TIMES.filter(([name]) => DATA.metrics[name]);
  if (!there.length) return () => {};
  const colours = there.map(([name]) => (name === "time/update" ? 1 : 0));
  const svg = make("svg", { tabindex: 0, role: "img", "aria-label": "Seconds of every step, by part." });
  const title = make("p", { class: "axis-name" });
  let bars = [];
  const draw = () => {
    const series = DATA.series.findIndex((_, i) => !HIDDEN.has(i) && DATA.metrics[there[0][0]].lines[i]);
    svg.replaceChildren();
    if (series < 0) return;
    title.textContent = `seconds of a step${DATA.series.length > 1 ? `, ${DATA.series[series]}` : ""}`;
    const width = svg.parentNode.clientWidth, height = Math.max(150, Math.min(230, width * 0.3));
    const box = { left: 46, right: width - 14, top: 10, bottom: height - 46 };
    svg.setAttribute("height", height);
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const xs = DATA.metrics[there[0][0]].x, per = DATA.metrics[there[0][0]].per;
    const parts = xs.map((_, n) => there.map(([name]) => DATA.metrics[name].lines[series]?.value[n] ?? 0));
    const high = Math.max(1e-9, ...parts.map((p) => p.reduce((a, b) => a + b, 0)));
    const first = xs[0] - per / 2, last = xs.at(-1) + per / 2;
    const x = scale(first, last, box.left, box.right, false), y = scale(0, high, box.bottom, box.top, false);
    const inside = frame(svg, box, x, y, ticks(first, last, false, 6).filter(Number.isInteger), ticks(0, high, false, 4), "step");
    const wide = Math.max(1, (x(xs[0] + per) - x(xs[0])) * 0.82);
    bars = xs.map((step, n) => {
      let under = 0;
      parts[n].forEach((took, k) => {
        inside.append(make("rect", { x: x(step) - wide / 2, width: wide, y: y(under + took), height: Math.max(0, y(under) - y(under + took)), fill: colour(colours[k]) }));
        under += took;
      });
      return [x(step), step, parts[n]];
    });
  };
  svg.onpointermove = svg.onpointerdown = (event) => {
    const box = svg.getBoundingClientRect(), px = event.clientX - box.left;
    if (!bars.length) return;
    const [at, step, took] = bars.reduce((best, bar) => (Math.abs(bar[0] - px) < Math.abs(best[0] - px) ? bar : best));
    const square = (k) => make("span", { class: `dot t${colours[k]}` });
    tell(`step: ${number(step)}`, took.map((s, k) => [square(k), there[k][1], `${number(s)} s`]), box.left + at, box.top + box.height / 2);
  };
  svg.onpointerleave = svg.onblur = hush;
  figure.replaceChildren(title, make("div", { class: "panel" }, svg));
  downloads(figure, "seconds-of-a-step", () => [["step", ...there.map(([, what]) => what)], ...bars.map(([, step, took]) => [step, ...took])]);
  watch(figure, draw);
  return draw;
}
