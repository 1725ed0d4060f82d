// The comparison's page: curves with bands over an axis that can be chosen, a matrix of pairs, tables that sort; after plots.js and bands.js.

const CHOSEN = { axis: "tokens", measure: "tokens" };

// ---- curves

function curves(figure, kind) {
  const hidden = new Set(), names = kind.rows.map((row) => row.label);
  const svg = make("svg", { tabindex: 0, role: "img", "aria-label": "Held-out score. Arrow keys read the values." });
  const buttons = legend(names, hidden, swatch, () => draw());
  const draw = bandPanel(svg, {
    names,
    hidden,
    x: () => DATA.axes[CHOSEN.axis],
    lines: () => kind.rows.map((row) => row.curves[CHOSEN.axis]),
    level: kind.threshold,
    upright: () => kind.equal[CHOSEN.axis],
  });
  figure.append(buttons, all(buttons), make("div", { class: "panel" }, make("p", { class: "axis-name" }, "held-out score, interquartile mean"), svg));
  kind.rows.forEach((row, i) => { if (row.hidden) buttons.querySelector(`[data-series="${i}"]`).click(); });
  downloads(figure, "learning-curves", () => tableOf(DATA.axes[CHOSEN.axis], names, kind.rows.map((row) => row.curves[CHOSEN.axis])));
  watch(figure, () => draw());
  return draw;
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
  for (const figure of document.querySelectorAll("[data-rates]")) linePlot(figure, { ...DATA.rates[figure.dataset.rates], file: `tuning${figure.dataset.rates}` });
  document.querySelectorAll("table.sortable").forEach(sortable);
  renew.measure();
}

start();
