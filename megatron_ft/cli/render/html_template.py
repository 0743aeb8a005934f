"""Template of the page. ``html_page.page`` replaces each name between two ``@@``.

The Content-Security-Policy keeps the page from making requests, whenever and wherever it is opened.
"""

from __future__ import annotations

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline'; \
style-src 'unsafe-inline'; img-src data: blob:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>@@title@@</title>
<style>
:root { --page: #fff; --text: #222; --soft: #5f5f5f; --line: #ddd; --shade: #f6f6f6; --fault: #c1121f;
--failed: #fdf0f0; --waits: #f0a994; --silent: #bfbfbf; --outside: #ececec; --bins: #4e79a7; --suggested: #2f6f6f; }
@media (prefers-color-scheme: dark) {
:root { --page: #16181b; --text: #e2e2e2; --soft: #a5a5a5; --line: #3d4145; --shade: #212428; --fault: #ff5d62;
--failed: #3a2023; --waits: #8c5a52; --silent: #6b6f74; --outside: #33373c; --bins: #6f9fd0; --suggested: #66b9b9; }
}
body { font: 15px/1.45 system-ui, sans-serif; margin: 1.5em auto; max-width: 1500px; padding: 0 1.5em;
background: var(--page); color: var(--text); overflow-wrap: anywhere; }
h1 { font-size: 1.35em; margin: 0 0 .3em; } h2 { font-size: 1.1em; margin: 1.6em 0 .4em; }
h3 { font-size: 1em; margin: 1.2em 0 .4em; }
.wide { overflow-x: auto; overflow-wrap: normal; }
table { border-collapse: collapse; }
th, td { padding: .3em .8em; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { vertical-align: bottom; white-space: pre-line; }
#cycles td:nth-child(2), #cycles th:nth-child(2), #timeouts td:first-child, #timeouts th:first-child
{ text-align: left; }
#cycles td:nth-child(2) { min-width: 16em; white-space: normal; }
tr.failed td { background: var(--failed); }
button { font: inherit; padding: .15em .7em; margin: 0 .4em .3em 0; cursor: pointer; }
#where { min-height: 1.5em; font-variant-numeric: tabular-nums; color: var(--soft); }
#timeline { display: block; width: 100%; cursor: crosshair; touch-action: pan-y; }
#legend span { display: inline-block; margin-right: 1.2em; font-size: .93em; }
#legend i { display: inline-block; width: .85em; height: .85em; margin-right: .4em; vertical-align: -.1em;
border: 1px solid var(--soft); }
.hint { color: var(--soft); font-size: .93em; }
pre { background: var(--shade); border: 1px solid var(--line); padding: .8em; overflow: auto; max-height: 34em;
font-size: 13px; overflow-wrap: normal; }
.note { color: var(--fault); }
#distributions { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 460px), 1fr)); gap: 1em 2em; }
figure { margin: 0; } figcaption { font-size: .93em; }
svg { width: 100%; font-size: 12px; } svg text { fill: var(--soft); }
path.tick { stroke: var(--line); } path.bins { fill: var(--bins); fill-opacity: .45; stroke: var(--bins); }
path.timeout, path.suggested { stroke: var(--fault); stroke-width: 2; stroke-dasharray: 7 4; }
path.suggested { stroke: var(--suggested); stroke-dasharray: 2 3; }
@media (max-width: 600px) { body { margin: .8em auto; padding: 0 .8em; } svg { font-size: 15px; } }
</style>
</head>
<body>
<h1>@@title@@</h1>
<p>@@goodput@@</p>
<p class="hint">@@definition@@</p>
<h2>Ranks over time</h2>
<div id="buttons"></div>
<p class="hint">Drag to zoom, scroll to zoom at the pointer, double-click to see all again. Click a rank or a mark for
its evidence, below.</p>
<div id="where"></div>
<canvas id="timeline" role="img" aria-label="ranks over time, coloured by what they did"></canvas>
<div id="legend"></div>
<h2>Evidence</h2>
<div id="evidence"></div>
<h2>Cycles</h2>
@@cycles@@
@@slow@@
<p class="hint">Times count from the fault; redone are iterations that had been finished before it.</p>
<h2>Timeouts beside the observed intervals</h2>
@@timeouts@@
@@notes@@
<p class="hint">The margin is how many times the longest observed interval fits into the timeout. A section that never
ended (its rank hung, was ended, or died) is no observed interval.</p>
<h2>How long sections took</h2>
<p class="hint">Both axes are logarithmic; the dashed line is the timeout, the dotted one
what <code>megatron-ft report --suggest-timeouts</code> makes of the longest interval.</p>
<div id="distributions">@@distributions@@</div>
<script type="application/json" id="data">@@data@@</script>
<script>
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const canvas = document.getElementById("timeline"), paper = canvas.getContext("2d");
const evidence = document.getElementById("evidence");

// Texts come from logs: they are only ever set as text, never as HTML.
function add(parent, tag, text, className) {
  const element = document.createElement(tag);
  element.textContent = text;
  if (className) element.className = className;
  parent.appendChild(element);
  return element;
}
function button(parent, text, action) {
  add(parent, "button", text).addEventListener("click", action);
}
function cycleAt(seconds) {
  return data.cycles.filter(cycle => cycle.begin <= seconds).pop() || data.cycles[0];
}
function show(rank, cycle) {
  evidence.replaceChildren();
  const failure = data.failures.find(each => each.cycle === cycle);
  if (failure) add(evidence, "p", "cycle " + cycle + ": " + failure.text);
  const ofCycle = data.evidence.filter(each => each.cycle === cycle);
  const own = ofCycle.filter(each => rank === null || each.rank === rank);
  if (!own.length) {
    add(evidence, "p", "No evidence of " + (rank === null ? "" : "rank " + rank + " in ") + "cycle " + cycle + ".");
    for (const each of new Set(ofCycle.map(each => each.rank)))
      button(evidence, "show that of rank " + each, () => show(each, cycle));
  }
  const marks = data.marks.filter(each => each.cycle === cycle && (rank === null || each.rank === rank));
  for (const each of marks.slice(0, 50)) add(evidence, "div", each.at.toFixed(3) + " s: " + each.text);
  for (const each of own) {
    const of = "rank " + each.rank, summary = each.summary.replace(of + ": ", "");
    add(evidence, "h3", of + ", cycle " + each.cycle + ": " + summary);
    if (each.text) add(evidence, "pre", each.text);
    if (each.note) add(evidence, "p", each.note, "note");
    else add(evidence, "p", each.file, "hint");
  }
}

const rowCount = data.ranks.length, left = 54, top_ = 24, right = 20, bottom = 44;
const all = {from: 0, to: data.length || 1, first: 0, end: rowCount || 1};
const tall = Math.min(760, Math.max(240, 110 + 30 * rowCount));
let view = all, dragged = null;
function css(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }
const ofTheme = {1: "--fault", 2: "--waits", 3: "--silent", 4: "--outside"};
function colorOf(state) { return state in ofTheme ? css(ofTheme[state]) : data.colors[state]; }
function area() {
  return {width: Math.max(1, canvas.clientWidth - left - right), height: tall - top_ - bottom};
}
function xOf(seconds) { return left + (seconds - view.from) / (view.to - view.from) * area().width; }
function yOf(row) { return top_ + (row - view.first) / (view.end - view.first) * area().height; }
function secondsAt(x) { return view.from + (x - left) / area().width * (view.to - view.from); }
function rowAt(y) { return view.first + (y - top_) / area().height * (view.end - view.first); }

// The coarsest grid that a screen shows completely: what is dropped while drawing would be arbitrary columns.
function gridAt(seconds, pixel) {
  const there = data.grids.filter(grid => grid.cells && grid.begin <= seconds && seconds <= grid.end);
  const width = grid => (grid.end - grid.begin) / grid.columns;
  return there.sort((a, b) => width(b) - width(a)).find(grid => width(grid) <= 1.5 * pixel) || there[there.length - 1];
}
function cell(grid, seconds, row) {
  const at = Math.floor((seconds - grid.begin) / (grid.end - grid.begin) * grid.columns);
  return grid.cells[row * grid.columns + Math.min(grid.columns - 1, Math.max(0, at))];
}
function drawCells(width, height) {
  const lines = Math.max(1, Math.min(height, Math.ceil(view.end - view.first))), columns = Math.round(width);
  const image = paper.createImageData(columns, lines), pixel = (view.to - view.from) / width;
  const colors = data.colors.map((_, state) => parseInt(colorOf(state).slice(1), 16));
  for (let x = 0; x < columns; x++) {
    const seconds = view.from + (x + 0.5) * pixel, grid = gridAt(seconds, pixel);
    for (let y = 0; grid && y < lines; y++) {
      const state = cell(grid, seconds, Math.floor(view.first + (y + 0.5) * (view.end - view.first) / lines));
      if (!state) continue;
      const color = colors[state];
      image.data.set([color >> 16, color >> 8 & 255, color & 255, 255], 4 * (y * columns + x));
    }
  }
  const drawn = document.createElement("canvas");
  [drawn.width, drawn.height] = [columns, lines];
  drawn.getContext("2d").putImageData(image, 0, 0);
  paper.imageSmoothingEnabled = false;
  paper.drawImage(drawn, left, top_, width, height);
}
function line(x1, y1, x2, y2, color, width, dash) {
  paper.beginPath(); paper.setLineDash(dash || []); paper.strokeStyle = color; paper.lineWidth = width;
  paper.moveTo(x1, y1); paper.lineTo(x2, y2); paper.stroke(); paper.setLineDash([]);
}
function marksInView() {
  return data.failures.filter(each => view.from <= each.at && each.at <= view.to).map(each => {
    const row = Math.max(0, data.ranks.indexOf(each.rank));
    return {each: each, row: row, x: xOf(each.at), y: yOf(row + 0.5)};
  }).filter(mark => view.first <= mark.row + 0.5 && mark.row + 0.5 <= view.end);
}
function draw() {
  const ratio = window.devicePixelRatio || 1;
  canvas.style.height = tall + "px";
  [canvas.width, canvas.height] = [Math.round(canvas.clientWidth * ratio), Math.round(tall * ratio)];
  paper.setTransform(ratio, 0, 0, ratio, 0, 0);
  paper.font = "12px system-ui, sans-serif";
  const {width, height} = area(), text = css("--text"), soft = css("--soft"), page = css("--page");
  const under = top_ + height, row = height / (view.end - view.first);
  drawCells(width, height);
  if (row >= 6)
    for (let at = Math.ceil(view.first); at <= view.end; at++) line(left, yOf(at), left + width, yOf(at), page, 2);
  paper.fillStyle = soft;
  paper.textAlign = "right"; paper.textBaseline = "middle";
  const step = Math.max(1, Math.ceil(16 / row));
  for (let at = Math.ceil(view.first / step) * step; at < Math.min(view.end, rowCount); at += step)
    if (at + 0.5 >= view.first && yOf(at + 0.5) <= under) paper.fillText(data.ranks[at], left - 8, yOf(at + 0.5));
  paper.textAlign = "center";
  const rough = (view.to - view.from) / Math.max(2, width / 90), power = 10 ** Math.floor(Math.log10(rough));
  const tick = [1, 2, 5, 10].map(each => each * power).find(each => each >= rough);
  for (let at = Math.ceil(view.from / tick); at * tick <= view.to; at++) {
    line(xOf(at * tick), under, xOf(at * tick), under + 4, soft, 1);
    paper.fillText(Number((at * tick).toPrecision(10)).toLocaleString("en"), xOf(at * tick), under + 13);
  }
  paper.fillText("seconds since the start of the run", left + width / 2, under + 32);
  paper.save(); paper.translate(10, top_ + height / 2); paper.rotate(-Math.PI / 2); paper.fillText("rank", 0, 0);
  paper.restore();
  let free = -Infinity;
  for (const cycle of data.cycles.filter(each => view.from <= each.begin && each.begin <= view.to)) {
    const x = xOf(cycle.begin), label = "cycle " + cycle.number;
    line(x, top_ - 4, x, under, text, 1.5, [5, 4]);
    if (x < free) continue;
    paper.fillStyle = text; paper.textAlign = "left"; paper.fillText(label, Math.min(x, left + width - 48), 10);
    free = x + paper.measureText(label).width + 8;
  }
  paper.save(); paper.beginPath(); paper.rect(left, top_, width, height); paper.clip();
  for (const [rank, from, to] of data.hung) {
    const y = yOf(data.ranks.indexOf(rank) + 0.5);
    line(xOf(from), y, xOf(to), y, css("--fault"), 3);
  }
  paper.restore();
  for (const mark of marksInView()) {
    paper.beginPath(); paper.arc(mark.x, mark.y, 10, 0, 2 * Math.PI);
    paper.fillStyle = page; paper.fill();
    paper.strokeStyle = css("--fault"); paper.lineWidth = 2.5; paper.stroke();
    paper.fillStyle = css("--fault"); paper.textAlign = "center";
    paper.fillText(mark.each.number, mark.x, mark.y + 0.5);
  }
  if (dragged) {
    paper.strokeStyle = text; paper.lineWidth = 1;
    const [y, high] = dragged.box ? [dragged.y, dragged.y2 - dragged.y] : [top_, height];
    paper.strokeRect(dragged.x, y, dragged.x2 - dragged.x, high);
  }
  canvas.dataset.view = [view.from, view.to, view.first, view.end].map(each => each.toFixed(3)).join(" ");
}
function zoom(from, to, first, end) {
  const least = Math.max(1e-3, all.to / 1e6);
  if (to - from < least) return;
  view = {from: Math.max(0, from), to: Math.min(all.to, to), first: first || 0, end: end || all.end};
  if (view.to - view.from < least) view = all;
  draw();
}
function under(event) {
  const mark = marksInView().find(each => Math.hypot(each.x - event.offsetX, each.y - event.offsetY) <= 12);
  const row = Math.floor(rowAt(event.offsetY)), seconds = secondsAt(event.offsetX);
  const inside = 0 <= row && row < rowCount && view.from <= seconds && seconds <= view.to;
  return {mark: mark, row: row, seconds: seconds, inside: inside};
}
function tell(event) {
  const {mark, row, seconds, inside} = under(event), where = document.getElementById("where");
  if (mark) { where.textContent = "cycle " + mark.each.cycle + ": " + mark.each.text; return; }
  if (!inside) { where.textContent = ""; return; }
  const grid = gridAt(seconds, (view.to - view.from) / area().width);
  const when = new Date(data.begin_ms + 1000 * seconds), cycle = cycleAt(seconds);
  where.textContent = "rank " + data.ranks[row] + (cycle ? ", cycle " + cycle.number : "") + ", " + seconds.toFixed(3) +
    " s (" + when.toLocaleString() + ")" + (grid ? ": " + data.states[cell(grid, seconds, row)] : "");
}
canvas.addEventListener("pointerdown", event => {
  dragged = {x: event.offsetX, y: event.offsetY, x2: event.offsetX, y2: event.offsetY, box: false};
  canvas.setPointerCapture(event.pointerId);
});
canvas.addEventListener("pointermove", event => {
  if (!dragged) { tell(event); return; }
  [dragged.x2, dragged.y2] = [event.offsetX, event.offsetY];
  dragged.box = Math.abs(dragged.y2 - dragged.y) > 40 && rowCount > 8;
  draw();
});
canvas.addEventListener("pointercancel", () => { dragged = null; draw(); });
canvas.addEventListener("pointerup", event => {
  const from = dragged;
  dragged = null;
  if (!from) return;
  const rows = from.box ? [from.y, from.y2].sort((a, b) => a - b).map(rowAt) : [view.first, view.end];
  if (Math.abs(from.x2 - from.x) > 5) {
    const [begin, end] = [from.x, from.x2].sort((a, b) => a - b).map(secondsAt);
    zoom(begin, end, Math.max(0, Math.floor(rows[0])), Math.min(rowCount, Math.ceil(rows[1])));
    return;
  }
  draw();
  const {mark, row, seconds, inside} = under(event), cycle = cycleAt(seconds);
  tell(event);
  if (mark) show(mark.each.rank, mark.each.cycle);
  else if (inside && cycle) show(data.ranks[row], cycle.number);
  else return;
  evidence.scrollIntoView({behavior: "smooth", block: "nearest"});
});
canvas.addEventListener("wheel", event => {
  const at = secondsAt(event.offsetX), factor = Math.exp(event.deltaY / 400);
  event.preventDefault();
  zoom(at - (at - view.from) * factor, at + (view.to - at) * factor, view.first, view.end);
}, {passive: false});
canvas.addEventListener("dblclick", () => { view = all; draw(); });
window.addEventListener("resize", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { legend(); draw(); });
function legend() {
  const keys = document.getElementById("legend");
  keys.replaceChildren();
  for (const state of data.seen) {
    const key = add(keys, "span", data.states[state]), swatch = document.createElement("i");
    swatch.style.background = colorOf(state);
    key.prepend(swatch);
  }
}
async function unpack(grid) {
  const packed = Uint8Array.from(atob(grid.states), each => each.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  grid.cells = new Uint8Array(await new Response(stream).arrayBuffer());
}
const buttons = document.getElementById("buttons");
button(buttons, "whole run", () => { view = all; draw(); });
const rows = document.querySelectorAll("#cycles tbody tr");
for (const failure of data.failures) {
  const around = data.windows[failure.cycle];
  const look = () => { zoom(around[0], around[1]); show(failure.rank, failure.cycle); };
  if (failure.number <= 20) button(buttons, "failure " + failure.number + " (cycle " + failure.cycle + ")", look);
  const row = rows[data.cycles.findIndex(cycle => cycle.number === failure.cycle)];
  if (row) { row.className = "failed"; button(row.lastChild, "show", () => { look(); canvas.scrollIntoView(); }); }
}
const last = data.failures[data.failures.length - 1];
if (last) show(last.rank, last.cycle);
else evidence.textContent = "No cycle failed.";
legend();
draw();
Promise.all(data.grids.map(unpack)).catch(() => {
  document.getElementById("where").textContent = "This browser is too old to draw the timeline: it needs one of 2023.";
}).then(() => { draw(); document.body.dataset.ready = "yes"; });
</script>
</body>
</html>
"""
