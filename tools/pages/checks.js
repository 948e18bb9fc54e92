// Checks that check_pages.py runs inside a page; the value is a list of problems.
(async () => {
  const problems = [];
  const fail = (text) => { if (problems.length < 12) problems.push(text); };
  const pause = () => new Promise((done) => setTimeout(done, 160));
  const isSeen = (element) => element.checkVisibility({visibilityProperty: true, opacityProperty: true})
    && element.getBoundingClientRect().width > 0;
  const name = (element) => `${element.tagName.toLowerCase()} “${element.textContent.trim().slice(0, 40)}”`;
  const width = document.documentElement.clientWidth;

  // Nothing is wider than the window.
  const checkWidth = (when) => {
    if (document.documentElement.scrollWidth > width) fail(`${when}: the page is ${document.documentElement.scrollWidth} wide`);
  };
  checkWidth("at first");

  // Unique ids, no skipped heading level, one main, one h1, a caption for each table, a header for each cell.
  const ids = [...document.querySelectorAll("[id]")].map((element) => element.id);
  ids.filter((id, index) => ids.indexOf(id) !== index).forEach((id) => fail(`the id ${id} is there twice`));
  let level = 0;
  for (const heading of document.querySelectorAll("h1, h2, h3, h4")) {
    if (+heading.tagName[1] > level + 1) fail(`${name(heading)} leaves out a level`);
    level = +heading.tagName[1];
  }
  for (const table of document.querySelectorAll("table")) if (!table.caption) fail("a table without a caption");

  // Chart labels do not overlap each other, bars or marks, and are inside the window.
  const isApart = (box, place) => box.right <= place.left + 0.5 || place.right <= box.left + 0.5
    || box.bottom <= place.top + 3 || place.bottom <= box.top + 3;
  const checkTexts = (when) => {
    for (const plot of document.querySelectorAll("figure.chart .plot")) {
      const boxes = [...plot.querySelectorAll(".canvas text, .y-title, .x-title")].filter(isSeen)
        .map((element) => [element, element.getBoundingClientRect()]);
      boxes.forEach(([element, box], index) => {
        if (box.left < -0.5 || box.right > width + 0.5) fail(`${when}: ${name(element)} of a chart leaves the window`);
        for (const [other, place] of boxes.slice(index + 1)) {
          if (!isApart(box, place)) fail(`${when}: ${name(element)} lies on ${name(other)}`);
        }
      });
      // A bar has no width. Labels of points are next to them, closer than the minimum distance between labels.
      const texts = boxes.filter(([element]) => !element.matches(".label"));
      for (const shape of plot.querySelectorAll(".series > line, .series > use")) {
        if (!shape.checkVisibility()) continue;
        const place = shape.getBoundingClientRect();
        for (const [element, box] of texts) {
          const kind = shape.tagName === "line" ? "bar" : "mark";
          if (!isApart(box, place)) fail(`${when}: a ${kind} lies on ${name(element)}`);
        }
      }
    }
  };
  checkTexts("at first");

  // Minimum contrast: 4.5 for text (3 for large text), 3 for curves.
  const probe = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const toRgb = (color) => {
    probe.clearRect(0, 0, 1, 1);
    probe.fillStyle = color;
    probe.fillRect(0, 0, 1, 1);
    return [...probe.getImageData(0, 0, 1, 1).data];
  };
  const luminance = (color) => toRgb(color).slice(0, 3).map((part) => part / 255)
    .map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
    .reduce((sum, part, index) => sum + part * [0.2126, 0.7152, 0.0722][index], 0);
  const contrast = (one, other) => {
    const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const findGround = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = getComputedStyle(at).backgroundColor;
      if (toRgb(color)[3] > 200) return color;
    }
    return "white";
  };
  const checkContrast = (when, part = document.body) => {
    const known = new Set();
    for (const element of part.querySelectorAll("*")) {
      if (![...element.childNodes].some((child) => child.nodeType === 3 && child.data.trim())) continue;
      if (["SCRIPT", "STYLE"].includes(element.tagName) || !element.checkVisibility()) continue;
      const style = getComputedStyle(element), color = element.tagName === "text" ? style.fill : style.color;
      const ground = findGround(element), key = color + ground + style.fontSize;
      if (known.has(key)) continue;
      known.add(key);
      const size = parseFloat(style.fontSize), least = size >= 24 || (size >= 18.66 && style.fontWeight >= 700) ? 3 : 4.5;
      if (contrast(color, ground) < least) fail(`${when}: ${name(element)} has a contrast of ${contrast(color, ground).toFixed(2)}`);
    }
    for (const group of part.querySelectorAll(".swatch line")) {
      const {stroke} = getComputedStyle(group);
      if (group.checkVisibility() && contrast(stroke, findGround(group.closest("li"))) < 3) fail(`${when}: a curve's ${stroke} has a contrast of ${contrast(stroke, findGround(group)).toFixed(2)}`);
    }
  };
  checkContrast("at first");

  // Charts are usable by keyboard and announce their data correctly.
  for (const figure of document.querySelectorAll("figure.chart")) {
    const data = JSON.parse(figure.querySelector("script").textContent), plot = figure.querySelector(".plot");
    const press = (key) => plot.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true, cancelable: true}));
    plot.focus();
    press("End");
    const readout = figure.querySelector(".readout"), last = data.places.length - 1;
    if (readout.hidden || !readout.textContent.includes(data.places[last][1])) fail(`${figure.id}: End reads nothing`);
    const held = data.series.filter(({drawn}) => drawn).flatMap(({points}) => points).filter(([at]) => at === last)
      .map(([, , text]) => text);
    for (const item of readout.querySelectorAll("b")) if (!held.includes(item.textContent)) fail(`${figure.id}: reads ${item.textContent}`);
    checkWidth(`${figure.id} read`);
    checkContrast(`${figure.id} read`, figure);
    const box = readout.getBoundingClientRect();
    if (box.left < 0 || box.right > width) fail(`${figure.id}: what it reads leaves the window`);
    press("ArrowLeft");
    press("ArrowDown");
    if (data.kind !== "points" && !figure.querySelector(".series.read")) fail(`${figure.id}: ArrowDown chooses no method`);
    press("Escape");
    if (!readout.hidden) fail(`${figure.id}: Escape leaves it open`);
    const canvas = figure.querySelector(".canvas"), area = canvas.getBoundingClientRect();
    canvas.dispatchEvent(new PointerEvent("pointermove", {clientX: area.left + 2, clientY: area.top + 40, bubbles: true}));
    if (readout.hidden) fail(`${figure.id}: the pointer reads nothing`);
    plot.dispatchEvent(new PointerEvent("pointerleave", {pointerType: "mouse"}));

    const buttons = [...figure.querySelectorAll(".legend button")];
    for (const button of [buttons[0], buttons.at(-1)].filter(Boolean)) {
      const before = button.getAttribute("aria-pressed"), at = button.closest("li").dataset.series;
      button.click();
      const group = figure.querySelector(`.canvas [data-series="${at}"]`);
      if (button.getAttribute("aria-pressed") === before) fail(`${figure.id}: a method cannot be switched`);
      if (group.classList.contains("drawn") === (before === "true")) fail(`${figure.id}: a switched method stays`);
    }
    const tools = Object.fromEntries([...figure.querySelectorAll(".tools button")].map((button) => [button.textContent, button]));
    if (tools.Logarithmic) {
      const shape = () => [...figure.querySelectorAll(".canvas polyline")].map((line) => line.getAttribute("points")).join();
      const before = shape();
      tools.Logarithmic.click();
      if (shape() === before) fail(`${figure.id}: the scale does not change`);
      checkTexts(`${figure.id} on its other scale`);
    }
    if (tools["All methods"]) tools["All methods"].click();
    checkTexts(`${figure.id} with all methods`);
    const saved = [], make = URL.createObjectURL;
    URL.createObjectURL = (blob) => { saved.push(blob); return "#"; };
    const {click} = HTMLAnchorElement.prototype;
    HTMLAnchorElement.prototype.click = () => {};
    tools["Save SVG"].click();
    Object.assign(URL, {createObjectURL: make});
    HTMLAnchorElement.prototype.click = click;
    const text = saved.length ? await saved[0].text() : "";
    const parsed = new DOMParser().parseFromString(text, "image/svg+xml");
    if (parsed.querySelector("parsererror") || parsed.documentElement.tagName !== "svg") fail(`${figure.id}: no SVG is saved`);
    if (/var\(|light-dark/.test(text)) fail(`${figure.id}: the saved SVG needs the page's style`);
    window.lastSavedChart = text;
    if (tools["Reset"]) tools["Reset"].click();
  }

  // Tables sort by every column in both directions, and reset.
  for (const table of [...document.querySelectorAll("table")].slice(0, 4)) {
    const read = () => [...table.tBodies[0].rows].map((row) => row.textContent).join("\n"), before = read();
    for (const head of table.tHead.rows[0].cells) {
      const button = head.querySelector("button");
      if (!button) continue;
      for (const order of ["ascending", "descending", null]) {
        button.click();
        if (head.getAttribute("aria-sort") !== order) fail(`${name(head)} does not sort`);
      }
    }
    if (read() !== before) fail(`${name(table.caption)}: its rows do not come back`);
  }

  // The button inverts the color scheme.
  const theme = document.getElementById("theme"), ground = getComputedStyle(document.body).backgroundColor;
  theme.click();
  if (getComputedStyle(document.body).backgroundColor === ground) fail("the colors do not turn round");
  await pause();
  checkContrast("turned round");
  theme.click();
  localStorage.removeItem("theme");

  // Embedded files can be unpacked.
  for (const link of document.querySelectorAll("a[data-name]")) {
    const bytes = Uint8Array.from(atob(link.href.split(",")[1]), (sign) => sign.charCodeAt(0));
    const text = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
    if (!/^(method|%)/.test(text)) fail(`${link.dataset.name} does not unpack`);
  }
  document.querySelectorAll("details").forEach((details) => { details.open = true; });
  checkWidth("all unfolded");
  checkContrast("all unfolded");
  return problems;
})()
