"use strict";
// Turns figure specifications (tseeds/report/figures.py) into Plotly charts. Text goes in through textContent alone.
const report = JSON.parse(document.getElementById("data").textContent);
const PALETTE = {
  // Okabe and Ito's order, darkened or lightened until each reads on its background
  light: ["#0072b2", "#d55e00", "#009e73", "#b0487f", "#7a5c00", "#3d8fc4", "#333333", "#6a4fb3"],
  dark: ["#5ab8f0", "#ff9248", "#37cf9f", "#eda0cb", "#e8c547", "#a8d8f8", "#e0e0e0", "#b9a2ff"],
};
const DASHES = ["solid", "dash", "dot", "dashdot"];
const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "cross", "x", "star", "pentagon"];
// Plotly turns a few tags in names into markup; names are data here
const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;");
const colour = (index) => PALETTE[Theme.current()][index % 8];
const faded = (hex, alpha) => {
  const n = parseInt(hex.slice(1), 16);
  return `rgba(${n >> 16}, ${(n >> 8) & 255}, ${n & 255}, ${alpha})`;
};
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
let windowSize = 1;

function smoothed(values, size) {
  if (size <= 1) return values;
  return values.map((_, i) => {
    const part = values.slice(Math.max(0, i - size + 1), i + 1).filter((v) => v !== null);
    return part.length ? part.reduce((a, b) => a + b, 0) / part.length : null;
  });
}

function traces(figure) {
  if (figure.kind === "heat") return heat(figure);
  const out = [];
  const only = figure.series.length === 1;
  figure.series.forEach((series, index) => {
    const tint = colour(series.group);
    if (figure.kind === "bars") {
      const pattern = ["", "/", ".", "x"][series.variant];
      out.push({
        type: "bar", name: plain(series.name), x: series.x.map(plain), y: series.y, showlegend: !only,
        marker: { color: pattern ? faded(tint, 0.45) : tint, line: { color: tint, width: 1 },
          pattern: { shape: pattern, fgcolor: tint, size: 6, solidity: 0.35 } },
        hovertemplate: `%{x}<br>${plain(series.name)}: %{y:.4g}<extra></extra>`,
      });
      return;
    }
    const size = figure.smooth ? windowSize : 1;
    const y = smoothed(series.y, size);
    const points = figure.kind === "points" || series.x.length === 1;
    if (series.lo.length) {
      const edge = { type: "scatter", mode: "lines", x: series.x, line: { width: 0, color: tint }, hoverinfo: "skip",
        showlegend: false, legendgroup: String(index) };
      out.push({ ...edge, y: smoothed(series.lo, size) });
      out.push({ ...edge, y: smoothed(series.hi, size), fill: "tonexty",
        fillcolor: faded(tint, series.variant ? 0.1 : 0.18) });
    }
    const band = series.lo.length
      ? series.lo.map((lo, i) => (lo === null ? "" : ` (${lo.toPrecision(3)} to ${series.hi[i].toPrecision(3)})`))
      : series.x.map(() => "");
    const rows = series.sizes.length ? series.sizes.map((n) => `, ${n} rows`) : series.x.map(() => "");
    out.push({
      type: "scatter", mode: points ? "lines+markers" : "lines", name: plain(series.name), x: series.x, y,
      legendgroup: String(index), showlegend: !only, connectgaps: true,
      line: { color: tint, width: 2, dash: DASHES[series.variant % 4] },
      marker: { color: tint, size: 7, symbol: SYMBOLS[series.group % 8] },
      customdata: band.map((b, i) => b + rows[i]),
      hovertemplate: `%{y:.4g}%{customdata}<extra>${plain(series.name)}</extra>`,
    });
  });
  return out;
}

function heat(figure) {
  const flat = figure.cells.flat().filter((v) => v !== null);
  const low = Math.min(...flat), high = Math.max(...flat);
  const dark = Theme.current() === "dark";
  return [{
    type: "heatmap", x: figure.series[0].x.map(plain), y: figure.rows.map(plain), z: figure.cells,
    // cividis: even to the eye, and the same to colour-blind ones
    colorscale: "Cividis", zmin: low, zmax: high, xgap: 2, ygap: 2,
    colorbar: { thickness: 12, outlinewidth: 0, tickfont: { color: dark ? "#9aa5b1" : "#5c6672" } },
    text: figure.cells.map((row) => row.map((v) => (v === null ? "" : v.toFixed(3)))), texttemplate: "%{text}",
    textfont: { size: 12 },
    hovertemplate: `%{y}, %{x}: %{z:.4f}<extra></extra>`,
  }];
}

function layout(figure) {
  const text = css("--text"), dim = css("--dim"), line = css("--line");
  const axis = (title) => ({
    title: { text: plain(title), font: { size: 13, color: dim }, standoff: 10 }, gridcolor: line, zerolinecolor: line,
    linecolor: line, tickfont: { size: 12, color: dim }, automargin: true,
  });
  const spec = {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: { l: 52, r: 12, t: 8, b: 44 },
    font: { color: text, family: "system-ui, -apple-system, Segoe UI, Roboto, sans-serif", size: 13 },
    xaxis: axis(figure.x), yaxis: axis(figure.y), hovermode: "x unified", hoverdistance: -1,
    hoverlabel: { bgcolor: css("--panel"), bordercolor: line, font: { color: text, size: 12 } },
    legend: { orientation: "h", x: 0, y: -0.22, yanchor: "top", font: { size: 12, color: text } },
    barmode: figure.id === "time" ? "stack" : "group", bargap: 0.35,
  };
  if (figure.x_log2) {
    const ticks = [...new Set(figure.series.flatMap((s) => s.x))].filter((k) => Math.log2(k) % 1 === 0);
    Object.assign(spec.xaxis, { type: "log", tickvals: ticks, ticktext: ticks.map(String) });
  }
  if (figure.kind === "bars" || figure.kind === "heat") { spec.xaxis.type = "category"; spec.hovermode = "closest"; }
  if (figure.series.every((s) => s.y.every((v) => v === null || v >= 0))) spec.yaxis.rangemode = "nonnegative";
  if (figure.kind === "heat") { spec.yaxis.type = "category"; spec.yaxis.autorange = "reversed"; }
  return spec;
}

const drawn = new Set();
function draw(figure) {
  const place = document.getElementById(`plot-${figure.id}`);
  const options = { responsive: true, displayModeBar: false };
  drawn.add(figure.id);
  return Plotly.react(place, traces(figure), layout(figure), options);
}
let watcher;
// What is in sight is drawn again at once, the rest when it comes into sight.
function redraw() {
  report.figures.filter((f) => drawn.has(f.id)).forEach((f) => {
    const card = document.getElementById(`figure-${f.id}`);
    watcher.unobserve(card);
    watcher.observe(card);
  });
}
const drawAll = () => Promise.all(report.figures.map(draw));
window.drawAll = drawAll;

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function overview() {
  const table = element("table");
  const head = table.createTHead().insertRow();
  report.overview.header.forEach((h) => head.append(element("th", "", h)));
  const body = table.createTBody();
  report.overview.rows.forEach((row, g) => {
    const line = body.insertRow();
    row.forEach((cell, i) => {
      const td = element("td", "", i ? cell : undefined);
      if (!i) {
        const swatch = element("span", "swatch");
        swatch.dataset.group = g;
        td.append(swatch, cell);
      }
      line.append(td);
    });
  });
  const wrap = element("div", "tablewrap");
  wrap.append(table);
  return wrap;
}
const paintSwatches = () =>
  document.querySelectorAll(".swatch").forEach((s) => { s.style.background = colour(Number(s.dataset.group)); });

function build() {
  const main = document.querySelector("main"), nav = document.querySelector("nav");
  const sections = new Map();
  const section = (name) => {
    if (!sections.has(name)) {
      const made = element("section");
      made.id = name.toLowerCase().replace(/[^a-z0-9]+/g, "-");
      made.append(element("h2", "", name));
      const link = element("a", "", name);
      link.href = `#${made.id}`;
      nav.append(link);
      main.append(made);
      sections.set(name, made);
    }
    return sections.get(name);
  };
  section("Overview").append(overview(), element("p", "dim", report.overview_note));
  report.figures.forEach((figure) => {
    const place = section(figure.section);
    let grid = place.querySelector(".grid");
    if (!grid) { grid = element("div", "grid"); place.append(grid); }
    const card = element("figure"), plot = element("div", "plot");
    card.id = `figure-${figure.id}`;
    plot.id = `plot-${figure.id}`;
    plot.setAttribute("role", "img");
    plot.setAttribute("aria-label", `${figure.title}: ${figure.y} over ${figure.x}`);
    const head = element("div", "head");
    head.append(element("h3", "", figure.title));
    for (const format of ["svg", "png"]) {
      const save = element("button", "save", format);
      save.type = "button";
      save.title = `save this figure as ${format}`;
      save.addEventListener("click", async () => {
        await draw(figure);
        Plotly.downloadImage(plot, { format, filename: figure.id, width: 720, height: 440, scale: format === "png" ? 2 : 1 });
      });
      head.append(save);
    }
    card.append(head, plot);
    if (figure.note) card.append(element("figcaption", "", figure.note));
    grid.append(card);
  });
  watcher = new IntersectionObserver((entries) => entries.forEach((e) => {
    if (!e.isIntersecting) return;
    watcher.unobserve(e.target);
    draw(report.figures.find((f) => `figure-${f.id}` === e.target.id));
  }), { rootMargin: "600px" });
  document.querySelectorAll("figure").forEach((card) => watcher.observe(card));
  paintSwatches();
  window.addEventListener("beforeprint", drawAll);
  Theme.onChange(() => { paintSwatches(); redraw(); });
  document.getElementById("theme").addEventListener("click", Theme.toggle);
  document.getElementById("smooth").addEventListener("change", (event) => {
    windowSize = Number(event.target.value);
    redraw();
  });
}
build();
