// A figure to take away, as SVG, PNG and CSV; nothing is fetched. After plots.js.

const INLINED = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray", "stroke-linejoin", "opacity", "font-size", "font-family", "font-weight", "paint-order"];
const SHARPNESS = 2; // pixels of a PNG for one on the page

function save(name, blob) {
  const link = make("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

// A copy whose colours and letters are its own, for programs without the page's style.
function inlined(svg) {
  const copy = svg.cloneNode(true), there = [svg, ...svg.querySelectorAll("*")], here = [copy, ...copy.querySelectorAll("*")];
  there.forEach((node, i) => {
    const style = getComputedStyle(node);
    here[i].removeAttribute("style");
    here[i].removeAttribute("tabindex");
    for (const key of INLINED) if (style.getPropertyValue(key)) here[i].setAttribute(key, style.getPropertyValue(key));
  });
  return copy;
}

// The figure's panels as they lie on the page, their names above them, the series that are shown above all.
function whole(figure) {
  const panels = [...figure.querySelectorAll(".panel svg[role=img]")], places = panels.map((svg) => svg.getBoundingClientRect());
  const left = Math.min(...places.map((p) => p.left)), top = Math.min(...places.map((p) => p.top));
  const width = Math.ceil(Math.max(...places.map((p) => p.right)) - left) + 24, ink = getComputedStyle(document.body);
  const letters = { "font-family": ink.fontFamily, "font-size": 12, fill: ink.color };
  const keys = [...(figure.querySelector(".legend") ?? document.querySelector("#legend .legend"))?.querySelectorAll('button[aria-pressed="true"]') ?? []];
  const above = [];
  let x = 12, y = 20;
  for (const button of keys) {
    const wide = 42 + 7 * button.textContent.length, mark = inlined(button.querySelector("svg"));
    if (x > 12 && x + wide > width) [x, y] = [12, y + 20];
    for (const [key, value] of Object.entries({ x, y: y - 10 })) mark.setAttribute(key, value);
    above.push(mark, make("text", { ...letters, x: x + 28, y }, button.textContent));
    x += wide;
  }
  const head = (keys.length ? y + 14 : 4) + 20;
  const drawn = panels.flatMap((svg, i) => {
    const copy = inlined(svg), p = places[i], name = svg.parentNode.querySelector(".axis-name") ?? figure.querySelector(".axis-name");
    for (const [key, value] of Object.entries({ x: p.left - left + 12, y: p.top - top + head, width: p.width, height: p.height })) copy.setAttribute(key, value);
    return [copy, ...(name ? [make("text", { ...letters, x: p.left - left + 12, y: p.top - top + head - 7 }, name.textContent.trim())] : [])];
  });
  const height = Math.ceil(Math.max(...places.map((p) => p.bottom)) - top + head) + 8;
  const paper = make("rect", { width, height, fill: ink.backgroundColor });
  return make("svg", { xmlns: "http://www.w3.org/2000/svg", width, height, viewBox: `0 0 ${width} ${height}` }, paper, ...above, ...drawn);
}

function asText(svg) { return new XMLSerializer().serializeToString(svg); }

function savePicture(name, svg) {
  const picture = new Image(), canvas = make("canvas", { width: svg.getAttribute("width") * SHARPNESS, height: svg.getAttribute("height") * SHARPNESS });
  picture.addEventListener("load", () => {
    canvas.getContext("2d").drawImage(picture, 0, 0, canvas.width, canvas.height);
    canvas.toBlob((blob) => save(name, blob), "image/png");
  });
  picture.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(asText(svg))}`;
}

function cell(value) {
  if (value === null || value === undefined) return "";
  const text = String(value);
  return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

// Small buttons in the figure. `rows()`: the figure's numbers, the names of the columns first.
function downloads(figure, name, rows) {
  const file = name.replace(/[^\w.-]+/g, "-").replace(/^-|-$/g, "");
  const ways = {
    SVG: () => save(`${file}.svg`, new Blob([asText(whole(figure))], { type: "image/svg+xml" })),
    PNG: () => savePicture(`${file}.png`, whole(figure)),
    CSV: () => save(`${file}.csv`, new Blob([rows().map((row) => row.map(cell).join(",")).join("\n"), "\n"], { type: "text/csv" })),
  };
  const row = make("p", { class: "take", role: "group", "aria-label": `Download ${name}` });
  for (const [kind, act] of Object.entries(ways)) {
    const button = make("button", { type: "button", title: `Download as ${kind}` }, kind);
    button.addEventListener("click", act);
    row.append(button);
  }
  (figure.querySelector(".panels") ?? [...figure.querySelectorAll(".panel")].at(-1)).after(row); // beside the name of the x axis
}

// The numbers of lines over x, with their bands.
function tableOf(x, names, lines) {
  const shown = lines.map((line, i) => [line, i]).filter(([line]) => line);
  const columns = shown.flatMap(([line, i]) => [[names[i], line.value], ...(line.low ? [[`${names[i]}, low`, line.low], [`${names[i]}, high`, line.high]] : [])]);
  return [[x.label, ...columns.map(([name]) => name)], ...x.values.map((v, n) => [v, ...columns.map(([, values]) => values[n])])];
}
