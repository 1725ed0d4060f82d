// The lab's page: a scatter of the estimators, their table, and the findings' lines; after plots.js.

// ---- the estimators

const VIEW = { side: 0, scaled: 1 }; // a learning rate absorbs the length of a gradient, so its direction is compared first

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
  downloads(figure, "bias-and-variance", () => [["algorithm", "bias", "variance"], ...rows.map((row) => [row.name, ...place(row)])]);
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
  switches((name, value) => { VIEW[name] = Number(value); renew(); });
  for (const button of document.querySelectorAll("#figures thead button"))
    button.addEventListener("click", () => {
      SORT.up = SORT.key === button.dataset.key ? !SORT.up : true;
      SORT.key = button.dataset.key;
      table();
    });
  renew();
  for (const figure of document.querySelectorAll("[data-plot]")) linePlot(figure, { ...DATA.plots[figure.dataset.plot], file: figure.dataset.plot });
}

start();
