// The drawings of drawing.html: numbers in, canvases out. Runs from a file, loads nothing.
"use strict";
const page = JSON.parse(document.getElementById("numbers").textContent);
const ranks = page.ranks;
const at = id => document.getElementById(id);
const timeline = at("timeline"), forest = at("forest"), tip = at("tip");
const FONT = '12px system-ui, -apple-system, "Segoe UI", "Helvetica Neue", Arial, "DejaVu Sans", sans-serif';

// Text
const count = x => x.toLocaleString("en-US");
const several = (x, what) => `${count(x)} ${what}${x === 1 ? "" : /(sh|x)$/.test(what) ? "es" : "s"}`;
const percent = x => x === 0 ? "0%" : `${(100 * x).toFixed(x < 0.1 ? 2 : 1)}%`;
const sum = list => list.reduce((a, b) => a + b, 0);
const unitOf = seconds => seconds >= 1 || seconds === 0 ? [1, "s"] : seconds >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"];
function time(seconds) {
  const [scale, unit] = unitOf(seconds);
  const value = seconds * scale;
  return `${value === 0 || value >= 1000 ? count(Math.round(value)) : value.toPrecision(4)} ${unit}`;
}

// Totals of each rank
for (const [number, rank] of ranks.entries()) {
  const isPush = rank.chunk.map(chunk => chunk < 0);
  rank.number = number;
  rank.start = [0];
  for (const seconds of rank.seconds) rank.start.push(rank.start.at(-1) + seconds);
  rank.total = rank.start.at(-1);
  rank.numPushes = isPush.filter(Boolean).length;
  rank.numChunks = rank.chunk.length - rank.numPushes;
  rank.numTokens = sum(rank.tokens.filter((_, k) => !isPush[k]));
  rank.numPushed = sum(rank.tokens.filter((_, k) => isPush[k]));
  rank.numRows = sum(rank.rows.filter((_, k) => !isPush[k]));
  let pushes = 0;
  rank.push = isPush.map(flag => flag ? pushes++ : -1);
}
const longest = ranks.reduce((a, b) => b.total > a.total ? b : a);
const mean = sum(ranks.map(rank => rank.total)) / ranks.length;
let chosen = longest.number, order = ranks.map(rank => rank.number), call = -1;

// Colours: neighbours differ by the golden angle in hue and by a step in lightness
let theme = {};
function readTheme() {
  const style = getComputedStyle(document.documentElement);
  theme = {};
  for (const name of ["page", "ink", "muted", "line", "grid", "plot", "padding", "push", "hatch", "peak", "mean"])
    theme[name] = style.getPropertyValue(`--${name}`).trim();
  for (const name of ["lightness", "step", "chroma", "pale"]) theme[name] = +style.getPropertyValue(`--${name}`);
  theme.colours = [];
  theme.pales = [];
}
const hue = chunk => ((250 + chunk * 137.508) % 360).toFixed(1);
function colour(chunk) {
  const lightness = theme.lightness + theme.step * [0, 1, -1][chunk % 3];
  return theme.colours[chunk] ??= `oklch(${lightness} ${theme.chroma} ${hue(chunk)})`;
}
function pale(chunk) {
  return theme.pales[chunk] ??= `oklch(${theme.pale} ${theme.chroma / 2} ${hue(chunk)})`;
}
function hatch(context) {
  const tile = document.createElement("canvas"), scale = window.devicePixelRatio || 1, size = Math.round(8 * scale);
  tile.width = tile.height = size;
  const pen = tile.getContext("2d");
  pen.strokeStyle = theme.hatch;
  pen.lineWidth = 1.4 * scale;
  for (const shift of [-size, 0, size]) {
    pen.beginPath();
    pen.moveTo(shift - 1, size + 1);
    pen.lineTo(shift + size + 1, -1);
    pen.stroke();
  }
  const pattern = context.createPattern(tile, "repeat");
  pattern.setTransform(new DOMMatrix().scale(1 / scale));
  return pattern;
}
function legend(id, entries) {
  at(id).replaceChildren(...entries.map(([style, text]) => {
    const entry = document.createElement("span"), sample = document.createElement("i");
    if (style.startsWith("rule")) sample.className = style; else sample.style.background = style;
    entry.append(sample, text);
    return entry;
  }));
}
function drawLegends() {
  const lines = `repeating-linear-gradient(135deg, ${theme.hatch} 0 1.4px, transparent 1.4px 5.6px)`;
  const stripe = (ink, k) => `${ink(k)} ${33 * k}% ${33 * k + 34}%`;
  const three = ink => `linear-gradient(90deg, ${[0, 1, 2].map(k => stripe(ink, k)).join(", ")})`;
  legend("timeline-legend", [
    [three(colour), "chunk: forward and backward, a colour each"],
    [`${lines}, ${theme.push}`, "push: forward only"],
    [theme.padding, "padding's share of a call's rows (at the call's end)"],
    ...(ranks.length > 1 ? [["rule", "mean of the ranks"]] : []), ["rule peak", "longest rank"],
  ]);
  legend("forest-legend", [
    [three(colour), "computed in this chunk (colours as in the timeline)"],
    [`${lines}, ${colour(0)}`, "also pushed: has descendants in other chunks"],
    [three(pale), "boxes too small to draw apart"],
  ]);
}

// Drawing
function fit(canvas, height) {
  const scale = window.devicePixelRatio || 1, width = canvas.parentElement.clientWidth, pen = canvas.getContext("2d");
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.style.height = `${height}px`;
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.font = FONT;
  pen.textBaseline = "middle";
  return [pen, width, v => Math.round(v * scale) / scale];
}
function ticks(low, high, most) {
  const raw = (high - low) / Math.max(most, 1), power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find(k => k * power >= raw * 0.999) * power, found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++)
    found.push(+(k * step).toPrecision(12));
  return found;
}
function label(pen, text, x, y, align, ink) {
  pen.fillStyle = ink;
  pen.textAlign = align;
  pen.fillText(text, x, y);
}
function place(canvas, box) {
  const mark = canvas.nextElementSibling;
  mark.style.display = box ? "block" : "none";
  if (!box) return;
  const [x, y, w, h] = box;
  Object.assign(mark.style, {left: `${x - 1}px`, top: `${y - 1}px`, width: `${Math.max(w, 2) + 2}px`,
    height: `${Math.max(h, 2) + 2}px`});
}
function tell(text, x, y) {
  tip.style.display = text ? "block" : "none";
  if (!text) return;
  tip.textContent = text;
  const {offsetWidth: w, offsetHeight: h} = tip;
  tip.style.left = `${Math.max(4, x + 14 + w > innerWidth ? x - w - 14 : x + 14)}px`;
  tip.style.top = `${Math.max(4, y + 14 + h > innerHeight ? y - h - 14 : y + 14)}px`;
}
function tellAt(canvas, box, text) {
  const frame = canvas.getBoundingClientRect();
  place(canvas, box);
  tell(text, frame.left + box[0] + box[2] / 2, frame.top + box[1] + Math.min(box[3] / 2, 40));
}

// Timeline
const area = {left: 72, right: 104, top: 24};
function rowHeight() {
  const fits = Math.floor(900 / ranks.length);
  return Math.max(2, Math.min(26, fits));
}
function drawTimeline() {
  const high = rowHeight(), tall = ranks.length * high, isLong = tall > 600;
  area.top = isLong ? 40 : 24;
  const [pen, width, snap] = fit(timeline, area.top + tall + 44);
  const bottom = area.top + tall, plot = Math.max(width - area.left - area.right, 50);
  const [unit, unitName] = unitOf(longest.total), lines = hatch(pen), gap = high >= 6 ? 2 : high >= 4 ? 1 : 0;
  area.scale = plot / (longest.total || 1);
  const x = seconds => area.left + seconds * area.scale;
  pen.fillStyle = theme.plot;
  pen.fillRect(area.left, area.top, plot, tall);
  for (const tick of ticks(0, (longest.total || 1) * unit, plot / 90)) {
    pen.fillStyle = theme.grid;
    pen.fillRect(snap(x(tick / unit)), area.top, 1, tall + 5);
    label(pen, count(tick), x(tick / unit), bottom + 14, "center", theme.muted);
    if (isLong) label(pen, count(tick), x(tick / unit), area.top - 26, "center", theme.muted);
  }
  label(pen, `predicted time (${unitName})`, area.left + plot / 2, bottom + 33, "center", theme.muted);
  const every = Math.ceil(15 / high);
  order.forEach((number, row) => {
    const rank = ranks[number], top = area.top + row * high, isChosen = number === chosen;
    for (let k = 0; k < rank.seconds.length; k++) drawCall(pen, snap, x, rank, k, top + gap / 2, high - gap, lines);
    if (isChosen || (row % every === 0 && Math.abs(row - order.indexOf(chosen)) >= every)) {
      const text = (ranks.length <= 64 || isChosen) && number < 1000 ? `rank ${number}` : `${number}`;
      label(pen, text, area.left - 12, top + high / 2, "right", isChosen ? theme.ink : theme.muted);
    }
    if (isChosen) {
      pen.fillStyle = theme.ink;
      pen.beginPath();
      pen.moveTo(area.left - 8, top + high / 2 - 4);
      pen.lineTo(area.left - 2, top + high / 2);
      pen.lineTo(area.left - 8, top + high / 2 + 4);
      pen.fill();
    }
  });
  rule(pen, snap(x(longest.total)), bottom, theme.peak, []);
  label(pen, `max ${time(longest.total)}`, x(longest.total) + 2, area.top - 11, "left", theme.peak);
  if (ranks.length > 1) {
    const text = `mean ${time(mean)}`, fits = x(mean) - pen.measureText(text).width > area.left;
    rule(pen, snap(x(mean)), bottom, theme.mean, [5, 4]);
    label(pen, text, x(mean) + (fits ? -2 : 2), area.top - 11, fits ? "right" : "left", theme.mean);
  }
}
function rule(pen, x, bottom, ink, dashes) {
  pen.strokeStyle = ink;
  pen.lineWidth = 2;
  pen.setLineDash(dashes);
  pen.beginPath();
  pen.moveTo(x, area.top - 5);
  pen.lineTo(x, bottom + 3);
  pen.stroke();
  pen.setLineDash([]);
}
function drawCall(pen, snap, x, rank, k, top, high, lines) {
  const from = snap(x(rank.start[k])), to = snap(x(rank.start[k + 1])), isPush = rank.chunk[k] < 0;
  const edge = to - from > 5 && high >= 4 ? 1 : 0, wide = to - from - edge;
  const real = wide * rank.tokens[k] / Math.max(rank.rows[k], 1);
  pen.fillStyle = theme.padding;
  pen.fillRect(from, top, wide, high);
  pen.fillStyle = isPush ? theme.push : colour(rank.chunk[k]);
  pen.fillRect(from, top, real, high);
  if (isPush) {
    pen.fillStyle = lines;
    pen.fillRect(from, top, wide, high);
  }
  if (high < 13) return;
  const names = isPush ? [] : rank.tokens[k] === 0 ? ["no tokens"] : [`chunk ${rank.chunk[k]}`, `${rank.chunk[k]}`];
  const end = from + (rank.tokens[k] ? real : wide) - 3, middle = x(mean);
  for (const name of names) {  // beside the line of the mean, not under it
    const size = pen.measureText(name).width, isHit = from + 1 < middle && from + size + 9 > middle;
    const start = isHit && ranks.length > 1 ? middle + 5 : from + 5;
    if (start + size > end) continue;
    label(pen, name, start, top + high / 2 + 0.5, "left", theme.ink);
    return;
  }
}
function callText(rank, k) {
  const isPush = rank.chunk[k] < 0, padding = rank.rows[k] - rank.tokens[k];
  const name = isPush ? `push ${rank.push[k]} (forward only)` : `chunk ${rank.chunk[k]} (forward and backward)`;
  const share = percent(padding / Math.max(rank.rows[k], 1));
  return [
    `rank ${rank.number}: ${name}`,
    `${several(rank.rows[k], "row")}: ${several(rank.tokens[k], "token")}, ${count(padding)} padding (${share})`,
    `${several(rank.context[k], "context token")}, ${several(rank.sources[k], "source row")}`,
    `${time(rank.seconds[k])} from ${time(rank.start[k])}`,
  ].join("\n");
}
function boxAt(rank, start, seconds) {
  const high = rowHeight(), top = area.top + order.indexOf(rank.number) * high;
  return [area.left + start * area.scale, top, seconds * area.scale, high];
}
const callBox = (rank, k) => boxAt(rank, rank.start[k], rank.seconds[k]);
function callAt(event) {
  const row = Math.floor((event.offsetY - area.top) / rowHeight());
  if (row < 0 || row >= ranks.length) return [null, -1];
  const rank = ranks[order[row]], seconds = (event.offsetX - area.left) / area.scale;
  return [rank, rank.seconds.findIndex((_, k) => rank.start[k] <= seconds && seconds < rank.start[k + 1])];
}
timeline.addEventListener("mousemove", event => {
  const [rank, k] = callAt(event);
  timeline.style.cursor = rank ? "pointer" : "";
  place(timeline, rank && k >= 0 ? callBox(rank, k) : null);
  tell(!rank ? "" : k >= 0 ? callText(rank, k) : rankText(rank), event.clientX, event.clientY);
});
timeline.addEventListener("click", event => {
  const [rank] = callAt(event);
  if (rank) choose(rank.number);
});
timeline.addEventListener("keydown", event => {
  const rank = ranks[chosen], row = order.indexOf(chosen);
  if (event.key === "ArrowDown" && row + 1 < order.length) choose(order[row + 1]);
  else if (event.key === "ArrowUp" && row > 0) choose(order[row - 1]);
  else if (event.key === "ArrowRight" && call + 1 < rank.seconds.length) call++;
  else if (event.key === "ArrowLeft" && call > 0) call--;
  else return;
  event.preventDefault();
  const now = ranks[chosen];
  if (call >= 0) tellAt(timeline, callBox(now, call), callText(now, call));
  else tellAt(timeline, boxAt(now, 0, now.total), rankText(now));
});
function rankText(rank) {
  const parts = [several(rank.numChunks, "chunk"), several(rank.numPushes, "push"), several(rank.numTokens, "token")];
  return `rank ${rank.number}: ${time(rank.total)}\n${parts.join(", ")}`;
}

// Forest: first tokens, ends and parents follow from counts and depths in preorder
let tree = null, zoom = [], current = -1, view = null;
function decode(raw) {
  const size = raw.count.length, ints = () => new Int32Array(size), open = [];
  const t = {size, count: Int32Array.from(raw.count), first: ints(), end: ints(), depth: ints(), parent: ints(),
    bottom: ints(), head: ints(), whole: ints(), code: raw.code, numTokens: 0, deepest: 0};
  for (let i = 0; i < size; i++) {
    t.first[i] = t.numTokens;
    t.depth[i] = (i ? t.depth[i - 1] + t.count[i - 1] : 0) - raw.back[i];
    while (open.length && t.depth[open.at(-1)] >= t.depth[i]) t.end[open.pop()] = t.numTokens;
    t.parent[i] = open.length ? open.at(-1) : -1;
    open.push(i);
    t.numTokens += t.count[i];
  }
  for (const i of open) t.end[i] = t.numTokens;
  for (let i = size - 1; i >= 0; i--) {
    t.bottom[i] = Math.max(t.bottom[i], t.depth[i] + t.count[i]);
    t.deepest = Math.max(t.deepest, t.bottom[i]);
    if (t.parent[i] >= 0) t.bottom[t.parent[i]] = Math.max(t.bottom[t.parent[i]], t.bottom[i]);
  }
  for (let i = 0; i < size; i++) {  // an only child goes on with its parent's segment
    t.head[i] = i && t.parent[i] === i - 1 && t.end[i] === t.end[i - 1] ? t.head[i - 1] : i;
    t.whole[t.head[i]] += t.count[i];
  }
  return t;
}
function drawForest() {
  const left = 72, right = 24, top = 12, high = tree && tree.numTokens ? 480 : 60;
  const [pen, width, snap] = fit(forest, top + high + 44);
  const plot = Math.max(width - left - right, 50);
  pen.fillStyle = theme.plot;
  pen.fillRect(left, top, plot, high);
  at("small").textContent = at("view").textContent = "";
  view = null;
  if (!tree || tree.numTokens === 0) {
    const why = "this forest is not in the page: only those of the ranks that take longest are";
    label(pen, tree ? "no tokens on this rank" : why, left + plot / 2, top + high / 2, "center", theme.muted);
    return;
  }
  const root = zoom.length ? zoom.at(-1) : -1;
  const [x0, x1] = root < 0 ? [0, tree.numTokens] : [tree.first[root], tree.end[root]];
  const [y0, y1] = root < 0 ? [0, tree.deepest] : [tree.depth[root], tree.bottom[root]];
  view = {left, top, plot, high, x0, x1, y0, y1, sx: plot / (x1 - x0), sy: high / (y1 - y0), root};
  for (const tick of ticks(x0, x1, plot / 100).filter(Number.isInteger)) {
    const x = left + (tick - x0) * view.sx;
    pen.fillStyle = theme.grid;
    pen.fillRect(snap(x), top, 1, high + 5);
    label(pen, count(tick), Math.min(x, left + plot - 4), top + high + 14, "center", theme.muted);
  }
  for (const tick of ticks(y0, y1, high / 50).filter(Number.isInteger)) {
    const y = top + (tick - y0) * view.sy;
    pen.fillStyle = theme.grid;
    pen.fillRect(left - 5, snap(y), plot + 5, 1);
    label(pen, count(tick), left - 9, y, "right", theme.muted);
  }
  label(pen, "tree token (number in preorder)", left + plot / 2, top + high + 33, "center", theme.muted);
  pen.save();
  pen.rotate(-Math.PI / 2);
  label(pen, "depth (tokens)", -(top + high / 2), 9, "center", theme.muted);
  pen.restore();
  const small = drawBoxes(pen, snap);
  const range = (what, from, to) => `${what} ${count(from)} to ${count(to - 1)}`;
  const part = `${range("tokens", x0, x1)}, ${range("depths", y0, y1)}`;
  at("view").textContent = `Shown: ${root < 0 ? "the whole forest" : part}.`;
  at("small").textContent = small === 0 ? "Every box here is at least half a pixel wide and high." :
    `${several(small, "box")} here narrower or lower than half a pixel: drawn pale, one pixel wide or high, `
    + "over each other. Zoom in to tell them apart.";
}
function drawBoxes(pen, snap) {
  const {left, top, x0, x1, y0, sx, sy, root} = view, lines = hatch(pen), one = 1 / (window.devicePixelRatio || 1);
  let small = 0;
  for (let i = Math.max(root, 0); i < tree.size && tree.first[i] < x1; i++) {
    const wide = (tree.end[i] - tree.first[i]) * sx, tall = tree.count[i] * sy;
    const from = snap(left + (tree.first[i] - x0) * sx), y = snap(top + (tree.depth[i] - y0) * sy);
    let w = snap(left + (tree.end[i] - x0) * sx) - from, h = snap(top + (tree.depth[i] + tree.count[i] - y0) * sy) - y;
    const isSmall = wide < 0.5 || tall < 0.5;
    if (isSmall) small++;
    if (w > 4) w -= 1; else w = Math.max(w, one);  // a line of the background between neighbours
    if (h > 4) h -= 1; else h = Math.max(h, one);
    const chunk = tree.code[i] >> 1;
    pen.fillStyle = isSmall ? pale(chunk) : colour(chunk);
    pen.fillRect(from, y, w, h);
    if (tree.code[i] & 1) {
      pen.fillStyle = lines;
      pen.fillRect(from, y, w, h);
    }
    if (w < 24 || h < 15) continue;
    const texts = [`chunk ${chunk}`, ...(h >= 31 ? [several(tree.count[i], "token")] : [])];
    if (pen.measureText(texts[0]).width > w - 10) texts.splice(0, 2, `${chunk}`);
    texts.filter(text => pen.measureText(text).width <= w - 8).forEach((text, line) => {
      if (tree.code[i] & 1) {
        pen.fillStyle = colour(chunk);
        pen.fillRect(from + 2, y + 1 + 15 * line, pen.measureText(text).width + 6, 15);
      }
      label(pen, text, from + 5, y + 9 + 15 * line, "left", theme.ink);
    });
  }
  return small;
}
function boxOf(i) {
  const {left, top, plot, high, x0, y0, sx, sy} = view;
  const x = left + (tree.first[i] - x0) * sx, y = top + (tree.depth[i] - y0) * sy;
  return [x, y, Math.min((tree.end[i] - tree.first[i]) * sx, plot), Math.min(tree.count[i] * sy, high)];
}
function pieceText(i) {
  const tokens = tree.count[i], whole = tree.whole[tree.head[i]], depth = tree.depth[i];
  const below = tree.end[i] - tree.first[i] - tokens;
  return [
    (whole === tokens ? "segment of " : `${count(tokens)} of a segment's `) + several(whole, "token"),
    `depths ${count(depth)} to ${count(depth + tokens - 1)}; tokens from ${count(tree.first[i])}`,
    below ? `${several(below, "token")} below` : "nothing below: a leaf",
    `chunk ${tree.code[i] >> 1}${tree.code[i] & 1 ? "; pushed for other chunks" : ""}`,
  ].join("\n");
}
function pieceOfToken(token) {
  let low = 0, high = tree.size - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (tree.first[middle] <= token) low = middle; else high = middle - 1;
  }
  return low;
}
function pieceAt(event) {
  if (!view) return -1;
  const token = view.x0 + (event.offsetX - view.left) / view.sx, depth = view.y0 + (event.offsetY - view.top) / view.sy;
  if (token < view.x0 || token >= view.x1 || depth < view.y0) return -1;
  let i = pieceOfToken(token);
  while (i > Math.max(view.root, 0) && tree.depth[i] > depth) i = tree.parent[i];
  return depth >= tree.depth[i] && depth < tree.depth[i] + tree.count[i] ? i : -1;
}
function zoomTo(stack) {
  zoom = stack;
  at("out").disabled = at("reset").disabled = !zoom.length;
  place(forest, null);
  drawForest();
}
function zoomOnto(i) {
  if (i >= 0 && zoom.at(-1) !== i && tree.size > 1) zoomTo([...zoom, i]);
}
forest.addEventListener("mousemove", event => {
  const i = pieceAt(event);
  forest.style.cursor = i >= 0 ? "zoom-in" : "";
  place(forest, i >= 0 ? boxOf(i) : null);
  tell(i >= 0 ? pieceText(i) : "", event.clientX, event.clientY);
});
forest.addEventListener("click", event => {
  tell("");
  current = pieceAt(event);
  zoomOnto(current);
});
forest.addEventListener("keydown", event => {
  if (!view) return;
  const isInside = i => i >= Math.max(view.root, 0) && tree.first[i] < view.x1;
  const start = Math.max(view.root, 0), i = isInside(current) ? current : -1;
  const moves = {
    ArrowDown: () => i + 1 < tree.size && tree.parent[i + 1] === i ? i + 1 : i,
    ArrowUp: () => tree.parent[i],
    ArrowRight: () => tree.end[i] < tree.numTokens ? pieceOfToken(tree.end[i]) : i,
    ArrowLeft: () => {
      let k = i - 1;
      while (k >= 0 && tree.parent[k] !== tree.parent[i] && k !== tree.parent[i]) k = tree.parent[k];
      return k;
    },
  };
  if (event.key in moves) {
    const next = i < 0 ? start : moves[event.key]();
    const isSibling = !/Left|Right/.test(event.key) || i < 0 || tree.parent[next] === tree.parent[i];
    current = isInside(next) && isSibling ? next : Math.max(i, start);
  } else if (event.key === "Enter") zoomOnto(current);
  else if (event.key === "Backspace") zoomTo(zoom.slice(0, -1));
  else if (event.key === "Escape") zoomTo([]);
  else return;
  event.preventDefault();
  if (isInside(current)) tellAt(forest, boxOf(current), pieceText(current));
});
at("out").addEventListener("click", () => zoomTo(zoom.slice(0, -1)));
at("reset").addEventListener("click", () => zoomTo([]));
for (const canvas of [timeline, forest])
  for (const kind of ["mouseleave", "blur"])
    canvas.addEventListener(kind, () => { place(canvas, null); tell(""); });

// The chosen rank
function choose(number) {
  const rank = ranks[chosen = number];
  call = current = -1;
  at("rank").value = number;
  tree = rank.pieces && decode(rank.pieces);
  at("forest-text").textContent = `Rank ${number}: ${several(rank.trees, "tree")} of `
    + `${several(rank.sequences, "sequence")}, ${several(rank.segments, "segment")}, `
    + several(rank.numTokens, "token") + (tree ? `, longest path ${count(tree.deepest)}. ` : ". ")
    + `${several(rank.numChunks, "chunk")}; ${several(rank.numPushed, "token")} pushed in `
    + `${several(rank.numPushes, "push")} (${percent(rank.numPushed / Math.max(rank.numTokens, 1))}). `
    + `Predicted time ${time(rank.total)}.`;
  drawTimeline();
  zoomTo([]);
}
function fillTable() {
  const columns = {
    "rank": r => r.number, "predicted time": r => time(r.total), "chunks": r => count(r.numChunks),
    "pushes": r => count(r.numPushes), "tree tokens": r => count(r.numTokens),
    "rows with gradient": r => count(r.numRows),
    "padding": r => percent((r.numRows - r.numTokens) / Math.max(r.numRows, 1)),
    "pushed tokens": r => count(r.numPushed),
  };
  const rows = [Object.keys(columns), ...ranks.map(rank => Object.values(columns).map(cell => cell(rank)))];
  at("table").replaceChildren(...rows.map((cells, k) => {
    const row = document.createElement("tr");
    row.append(...cells.map(text => Object.assign(document.createElement(k ? "td" : "th"), {textContent: text})));
    return row;
  }));
}
function start() {
  const total = name => sum(ranks.map(rank => rank[name]));
  const padding = (total("numRows") - total("numTokens")) / Math.max(total("numRows"), 1);
  at("timeline-text").textContent = `${several(ranks.length, "rank")}, by the cost model of ${page.machine}: `
    + `rank ${longest.number} takes longest, ${time(longest.total)}; the mean is ${time(mean)} `
    + `(max / mean ${(mean ? longest.total / mean : 1).toFixed(3)}). `
    + `Together ${several(total("numChunks"), "chunk")} and ${several(total("numPushes"), "push")}; `
    + `${percent(padding)} of the rows with gradient are padding.`;
  at("flight").textContent = page.in_flight === 1 ? "" :
    `Up to ${page.in_flight} chunks are between forward and backward; each is drawn whole where its backward runs.`;
  at("rank").replaceChildren(...ranks.map(rank => new Option(`${rank.number} (${time(rank.total)})`, rank.number)));
  at("rank").addEventListener("change", event => choose(+event.target.value));
  at("order").addEventListener("change", event => {
    order = ranks.map(rank => rank.number);
    if (event.target.value === "seconds") order.sort((a, b) => ranks[b].total - ranks[a].total);
    drawTimeline();
  });
  fillTable();
  const redraw = () => { readTheme(); drawLegends(); drawTimeline(); drawForest(); };
  readTheme();
  drawLegends();
  choose(chosen);
  let width = timeline.parentElement.clientWidth;
  new ResizeObserver(() => {
    if (timeline.parentElement.clientWidth !== width) redraw(width = timeline.parentElement.clientWidth);
  }).observe(timeline.parentElement);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
}
start();
