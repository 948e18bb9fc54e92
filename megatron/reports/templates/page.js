// Interactive features of a page: color scheme, sortable tables, interactive charts, downloads.
"use strict";
{
const root = document.documentElement;
const choices = new Map();  // reader settings by chart id, restored after a redraw

function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

function save(name, blob) {
  const link = make("a", {href: URL.createObjectURL(blob), download: name});
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

// Color scheme: the system's, until a reader selects one.
function setUpTheme(button) {
  const isDark = () => root.dataset.theme ? root.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  const show = () => { button.textContent = isDark() ? "Light colors" : "Dark colors"; };
  try { root.dataset.theme = localStorage.getItem("theme") || ""; } catch { /* a page without storage */ }
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try { localStorage.setItem("theme", root.dataset.theme); } catch { /* as above */ }
    show();
  });
  show();
  button.hidden = false;
}

// Downloads are compressed; browsers without DecompressionStream save the compressed file.
function setUpDownload(link) {
  if (!window.DecompressionStream) return;
  link.addEventListener("click", async (event) => {
    event.preventDefault();
    const bytes = Uint8Array.from(atob(link.href.split(",")[1]), (sign) => sign.charCodeAt(0));
    const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    save(link.dataset.name, await new Response(unpacked).blob());
  });
}

// Tables: clicks on a header sort, reverse, and restore the rows. Rows without a number stay last.
function setUpTable(table) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0], rows = [...body.rows];
  if (rows.length < 2) return;
  const read = (row, column) => {
    const copy = row.cells[column].cloneNode(true);
    copy.querySelectorAll("small").forEach((small) => small.remove());
    return copy.textContent.trim();
  };
  const toNumber = (text) => {
    const found = /^[(\[]?([-+−]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?)/.exec(text);
    return found ? Number(found[1].replaceAll(",", "").replace("−", "-")) : NaN;
  };
  heads.forEach((head, column) => {
    const button = make("button", {type: "button"}, ...head.childNodes);
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const next = {ascending: "descending", descending: null}[head.getAttribute("aria-sort")];
      const order = next === undefined ? "ascending" : next;
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      if (order === null) return body.append(...rows);
      head.setAttribute("aria-sort", order);
      const sign = order === "ascending" ? 1 : -1;
      const keyed = rows.map((row) => ({row, text: read(row, column), number: toNumber(read(row, column))}));
      const isNumeric = column > 0 && keyed.some(({number}) => !isNaN(number));
      keyed.sort((a, b) => !isNumeric ? sign * a.text.localeCompare(b.text)
        : (isNaN(a.number) - isNaN(b.number)) || sign * (a.number - b.number) || 0);
      body.append(...keyed.map(({row}) => row));
    });
  });
}

// Charts: same drawing as in charts.py, with reader settings.
function setUpChart(figure) {
  const data = JSON.parse(figure.querySelector("script").textContent);
  const canvas = figure.querySelector(".canvas"), plot = figure.querySelector(".plot");
  const tools = figure.querySelector(".tools"), isPoints = data.kind === "points";
  const groups = data.series.map((_, index) => canvas.querySelector(`[data-series="${index}"]`));
  const items = data.series.map((_, index) => figure.querySelector(`.legend [data-series="${index}"]`));
  const drawn = data.series.map((series) => series.drawn);
  const hasFaint = drawn.includes(false);
  let scale = data.scales[0], place = null, read = null;
  const chosen = choices.get(figure.id);
  if (chosen) {
    scale = data.scales.find((other) => other.name === chosen.scale) ?? scale;
    data.series.forEach((series, index) => { drawn[index] = chosen.drawn.get(series.name) ?? drawn[index]; });
  }
  const keep = () => choices.set(figure.id, {scale: scale.name, isFaintless: canvas.classList.contains("faintless"),
    drawn: new Map(data.series.map((series, index) => [series.name, drawn[index]]))});

  const percent = (share) => `${+(100 * share).toFixed(2)}%`;
  const locate = (value, reach = 0) => {
    const share = scale.name === "log"
      ? (Math.log(scale.high) - Math.log(Math.max(value, 0))) / Math.log(scale.high / scale.low)
      : (scale.high - value) / (scale.high - scale.low);
    return Math.min(Math.max(share, -reach), 1 + reach);
  };
  const draw = (parent, tag, attributes, text = "") => {
    const element = document.createElementNS(canvas.namespaceURI, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.textContent = text;
    parent.append(element);
    return element;
  };
  const stretch = (parent, tag, points) => draw(
    draw(parent, "svg", {viewBox: "0 0 1000 1000", preserveAspectRatio: "none"}), tag,
    {points: points.map(([x, y]) => `${Math.round(1000 * x)},${(1000 * y).toFixed(1)}`).join(" "),
      "vector-effect": "non-scaling-stroke"});

  function drawSeries(index, rank, count, hasBars) {
    const group = groups[index], {points, style} = data.series[index], isDense = data.kind === "dense";
    const offset = hasBars && drawn[index] ? 0.007 * (rank - (count - 1) / 2) : 0, reach = 100;
    const spots = points.map(([at, value]) => [data.places[at][0] + offset, value]);
    const spans = points.filter((point) => point.length > 3).map(([at, , , ...ends]) =>
      [data.places[at][0] + offset, ...ends.map((end) => locate(end, isDense ? reach : 0))]);
    group.replaceChildren();
    group.classList.toggle("drawn", drawn[index]);
    if (isDense && drawn[index]) {
      stretch(group, "polygon", [...spans.map(([x, , y]) => [x, y]), ...spans.map(([x, y]) => [x, y]).reverse()]);
    }
    stretch(group, "polyline", spots.map(([x, value]) => [x, locate(value, reach)]));
    if (isDense && points.length > 1) return;
    if (drawn[index] && hasBars) spans.forEach(([x, low, high]) => draw(group, "line",
      {x1: percent(x), x2: percent(x), y1: percent(low), y2: percent(high)}));
    spots.forEach(([x, value]) => {
      const isBeyond = value > scale.high || value < scale.low;
      if (drawn[index] || isBeyond) draw(group, "use", {x: percent(x), y: percent(locate(value)),
        href: !isBeyond ? `#m${style[1]}` : value > scale.high ? "#over" : "#under"});
    });
  }

  function drawAll() {
    const chosen = drawn.flatMap((is, index) => is ? [index] : []);
    const hasBars = data.kind === "curves" && chosen.length <= 8
      && chosen.some((index) => data.series[index].points.some((point) => point.length > 3));
    if (!isPoints) groups.forEach((_, index) => drawSeries(index, chosen.indexOf(index), chosen.length, hasBars));
    items.forEach((item, index) => item?.firstChild.setAttribute("aria-pressed", drawn[index]));
    const grid = canvas.querySelector(".grid");
    grid.replaceChildren();
    for (const [value, text] of scale.ticks) {
      const y = percent(locate(value));
      draw(grid, "line", {x2: "100%", y1: y, y2: y});
      draw(grid, "text", {y, dx: -8, dy: 4}, text);
    }
    show();
  }

  const readout = make("div", {className: "readout", hidden: true});
  readout.setAttribute("role", "status");
  const guide = draw(canvas, "line", {class: "guide", y2: "100%", visibility: "hidden"});

  function listRows() {
    if (place === null) return [];
    return data.series.flatMap((series, index) => {
      const point = (drawn[index] || index === read) && series.points.find(([at]) => at === place);
      return point ? [{index, name: series.name, value: point[1], text: point[2]}] : [];
    }).sort((a, b) => locate(a.value) - locate(b.value) || b.value - a.value);
  }

  function swatch(index) {
    const [color, marker, dash] = data.series[index].style, box = document.createElementNS(canvas.namespaceURI, "svg");
    box.setAttribute("class", `swatch c${color} d${dash}`);
    draw(box, "line", {x2: "100%", y1: "50%", y2: "50%"});
    draw(box, "use", {href: `#m${marker}`, x: "50%", y: "50%"});
    return box;
  }

  function show() {
    canvas.classList.toggle("reading", read !== null);
    groups.forEach((group, index) => group.classList.toggle("read", index === read));
    const rows = listRows(), list = make("ul");
    readout.hidden = place === null || !rows.length;
    guide.setAttribute("visibility", place === null ? "hidden" : "visible");
    if (place === null) return;
    const [share, text] = data.places[place];
    guide.setAttribute("x1", percent(share));
    guide.setAttribute("x2", percent(share));
    const first = Math.max(0, Math.min(rows.findIndex(({index}) => index === read) - 6, rows.length - 13));
    for (const {index, name, text: value} of rows.slice(first, first + 13)) {
      const item = make("li", {className: index === read ? "read" : ""}, isPoints ? "" : swatch(index),
        make("span", {textContent: name}), make("b", {textContent: value}));
      list.append(item);
    }
    const more = rows.length > 13 ? [make("p", {textContent: `and ${rows.length - 13} more`})] : [];
    readout.replaceChildren(make("p", {textContent: text}), list, ...more);
    const box = canvas.getBoundingClientRect(), left = box.left - plot.getBoundingClientRect().left;
    readout.style.left = share < 0.5 ? `${left + share * box.width + 14}px` : "auto";
    readout.style.right = share < 0.5 ? "auto" : `${plot.clientWidth - left - share * box.width + 14}px`;
  }

  function choosePlace(event) {
    const box = canvas.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width, y = (event.clientY - box.top) / box.height;
    const far = (at, value) => Math.hypot((data.places[at][0] - x) * box.width,
      (locate(value) - y) * box.height);
    if (isPoints) {
      const nearest = data.series.map(({points: [[at, value]]}, index) => [far(at, value), index, at]);
      [, read, place] = nearest.reduce((best, next) => next[0] < best[0] ? next : best);
    } else {
      place = data.places.reduce((best, [share], index) =>
        Math.abs(share - x) < Math.abs(data.places[best][0] - x) ? index : best, 0);
      const near = listRows().map(({index, value}) => [Math.abs(locate(value) - y) * box.height, index]);
      const [distance, index] = near.reduce((best, next) => next[0] < best[0] ? next : best, [Infinity, null]);
      read = distance < 30 ? index : null;
    }
    show();
  }

  function step(event) {
    const sideways = {ArrowRight: 1, ArrowLeft: -1}[event.key], upwards = {ArrowDown: 1, ArrowUp: -1}[event.key];
    if (event.key === "Escape") place = read = null;
    else if (event.key === "Home" || event.key === "End") place = event.key === "Home" ? 0 : data.places.length - 1;
    else if (sideways) place = place === null ? 0 : Math.min(Math.max(place + sideways, 0), data.places.length - 1);
    else if (upwards && place !== null && !isPoints) {
      const order = listRows().map(({index}) => index), at = order.indexOf(read);
      read = order[Math.min(Math.max(at + upwards, 0), order.length - 1)] ?? null;
    } else return;
    event.preventDefault();
    if (isPoints) read = place === null ? null : data.series.findIndex(({points: [[at]]}) => at === place);
    show();
  }

  const clear = () => { place = read = null; show(); };
  canvas.addEventListener("pointermove", choosePlace);
  canvas.addEventListener("pointerdown", choosePlace);
  plot.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") clear(); });
  plot.addEventListener("blur", clear);
  plot.addEventListener("keydown", step);
  plot.tabIndex = 0;
  plot.setAttribute("role", "group");
  plot.setAttribute("aria-label", isPoints ? "Points: the left and right arrow keys select a point"
    : "Values: the left and right arrow keys move along the axis, up and down select a line");
  plot.append(readout);

  items.forEach((item, index) => {
    if (!item) return;
    const button = make("button", {type: "button"}, ...item.childNodes);
    item.replaceChildren(button);
    const highlight = (is) => () => { read = is ? index : null; show(); };
    button.addEventListener("click", () => { drawn[index] = !drawn[index]; drawAll(); keep(); });
    for (const name of ["pointerenter", "focus"]) button.addEventListener(name, highlight(true));
    for (const name of ["pointerleave", "blur"]) button.addEventListener(name, highlight(false));
  });

  const addTool = (text, act, pressed) => {
    const button = make("button", {type: "button", textContent: text});
    if (pressed !== undefined) button.setAttribute("aria-pressed", pressed);
    button.addEventListener("click", () => { act(button); keep(); });
    tools.append(button);
  };
  if (data.scales.length > 1) {
    addTool("Logarithmic", (button) => {
      scale = data.scales.find((other) => other !== scale);
      button.setAttribute("aria-pressed", scale.name === "log");
      drawAll();
    }, scale.name === "log");
  }
  if (data.series.length > 4 && !isPoints) {
    const initial = data.series.map((series) => series.drawn);
    addTool(`All ${data.word}`, () => { drawn.fill(true); drawAll(); });
    addTool("None", () => { drawn.fill(false); drawAll(); });
    addTool("Reset", () => { initial.forEach((is, index) => { drawn[index] = is; }); drawAll(); });
    addTool("Show others", (button) => {
      button.setAttribute("aria-pressed", !canvas.classList.toggle("faintless"));
    }, !(chosen?.isFaintless ?? !hasFaint));
  }
  canvas.classList.toggle("faintless", chosen?.isFaintless ?? !hasFaint);
  addTool("Save SVG", () => saveChart(figure, canvas));
  if (!isPoints) drawAll();
}

// Standalone chart: light scheme, explicit colors and sizes, title, and legend.
function saveChart(figure, canvas) {
  const width = 760, height = 300, left = 70, top = 60, names = ["fill", "stroke", "stroke-width", "stroke-dasharray",
    "opacity", "font-size", "text-anchor", "visibility", "display"];
  const theme = root.dataset.theme;
  root.dataset.theme = "light";
  const copy = (element) => {
    const made = element.cloneNode(false), style = getComputedStyle(element);
    for (const name of names) {
      const value = style.getPropertyValue(name);
      if (element.tagName !== "svg" && value) made.setAttribute(name, value.replaceAll("px", ""));
    }
    made.append(...[...element.childNodes].map((child) => child.nodeType === 1 ? copy(child) : child.cloneNode()));
    return made;
  };
  const inner = copy(canvas), lines = [...figure.querySelectorAll(".legend [data-series]")]
    .filter((item) => item.firstChild.getAttribute("aria-pressed") === "true")
    .map((item) => [copy(item.querySelector("svg")), item.textContent.trim()]);
  root.dataset.theme = theme;
  const titles = [figure.querySelector("figcaption"), figure.querySelector(".y-title"), figure.querySelector(".x-title")]
    .map((element) => element.textContent.trim());
  const total = top + height + 70 + 18 * lines.length;
  const whole = document.createElementNS(canvas.namespaceURI, "svg");
  const add = (tag, attributes, ...children) => {
    const element = document.createElementNS(canvas.namespaceURI, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    whole.append(element);
  };
  for (const [name, value] of Object.entries({viewBox: `0 0 ${width + left + 40} ${total}`, width: width + left + 40,
    height: total, "font-family": "sans-serif", "font-size": 12})) whole.setAttribute(name, value);
  whole.append(document.getElementById("markers").cloneNode(true));
  add("rect", {width: "100%", height: "100%", fill: "#fff"});
  add("text", {x: 8, y: 18, "font-weight": "bold"}, titles[0]);
  add("text", {x: 8, y: 36, fill: "#555"}, titles[1]);
  add("text", {x: left, y: top + height + 52, fill: "#555"}, titles[2]);
  const place = {x: left, y: top, width, height, overflow: "visible"};
  inner.removeAttribute("class");
  for (const [name, value] of Object.entries(place)) inner.setAttribute(name, value);
  inner.querySelectorAll("svg").forEach((element) => element.setAttribute("overflow", "hidden"));
  whole.append(inner);
  lines.forEach(([mark, name], index) => {
    const y = top + height + 72 + 18 * index;
    for (const [key, value] of Object.entries({x: left, y: y - 11, width: 28, height: 14, overflow: "visible"})) {
      mark.setAttribute(key, value);
    }
    whole.append(mark);
    add("text", {x: left + 38, y}, name);
  });
  save(`${figure.id}.svg`, new Blob([new XMLSerializer().serializeToString(whole)], {type: "image/svg+xml"}));
}

function setUpPart(part) {
  part.querySelectorAll("a[data-name]").forEach(setUpDownload);
  part.querySelectorAll("table").forEach(setUpTable);
  part.querySelectorAll("figure.chart").forEach(setUpChart);
}

// Replace part of the page, and keep expanded details open.
function replacePart(part, next) {
  const unfolded = new Set([...part.querySelectorAll("details[open] > summary")].map((each) => each.textContent));
  part.replaceWith(next);
  next.querySelectorAll("summary").forEach((each) => { each.parentNode.open = unfolded.has(each.textContent); });
  setUpPart(next);
}

// A served page polls the server and updates changed parts, unless an element in them has the focus.
function setUpRefresh(status) {
  const parts = ["h1", "#downloads", "nav", "main", "footer"];
  let shown = null;
  const look = async () => {
    try {
      const answer = await fetch(location.href, {cache: "no-store"});
      const text = await answer.text();
      if (!answer.ok) throw new Error(text);
      const next = new DOMParser().parseFromString(text, "text/html"), word = next.getElementById("refresh").textContent;
      status.textContent = `${word}, updated ${new Date().toLocaleTimeString()}, every ${status.dataset.seconds} s`;
      if (text === shown || document.querySelector("main :focus, .readout:not([hidden])")) return;
      document.title = next.title;
      for (const part of parts) replacePart(document.querySelector(part), next.querySelector(part));
      shown = text;
    } catch (error) {
      const reason = error instanceof TypeError ? "The server does not respond" : error.message;
      status.textContent = `${reason}; showing the last update`;
    }
  };
  setInterval(look, 1000 * status.dataset.seconds);
  look();
}

setUpTheme(document.getElementById("theme"));
setUpPart(document);
const refreshed = document.getElementById("refresh");
if (refreshed) setUpRefresh(refreshed);
}
