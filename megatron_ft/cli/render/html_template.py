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
<title>@@title@@</title>
<style>
body { font: 15px/1.45 system-ui, sans-serif; margin: 1.5em auto; max-width: 1500px; padding: 0 1.5em; color: #222; }
h1 { font-size: 1.35em; margin: 0 0 .3em; } h2 { font-size: 1.1em; margin: 1.6em 0 .4em; }
table { border-collapse: collapse; } th, td { padding: .3em .8em; border-bottom: 1px solid #ddd; text-align: right; }
th { vertical-align: bottom; white-space: pre-line; }
#cycles td:nth-child(2), #cycles th:nth-child(2), #timeouts td:first-child, #timeouts th:first-child
{ text-align: left; }
tr.failed td { background: #fdf0f0; }
button { font: inherit; padding: .15em .7em; margin-right: .4em; cursor: pointer; }
#where { min-height: 1.5em; font-variant-numeric: tabular-nums; color: #444; }
.hint { color: #666; font-size: .93em; }
pre { background: #f6f6f6; border: 1px solid #ddd; padding: .8em; overflow: auto; max-height: 34em; font-size: 13px; }
.note { color: #c1121f; }
</style>
</head>
<body>
<h1>@@title@@</h1>
<p title="@@definition@@">@@goodput@@</p>
<h2>Ranks over time</h2>
<div id="buttons"></div>
<p class="hint">Drag to zoom, scroll to zoom at the pointer, double-click to see all again. Click a rank or a mark for
its evidence, below.</p>
<div id="where"></div>
@@timeline@@
<h2>Evidence</h2>
<div id="evidence"></div>
<h2>Cycles</h2>
@@cycles@@
<p class="hint">Times count from the fault; redone are iterations that had been finished before it.</p>
<h2>Timeouts beside the observed intervals</h2>
@@timeouts@@
@@notes@@
<p class="hint">The margin is how many times the longest observed interval fits into the timeout. A section that never
ended (its rank hung, was ended, or died) is no observed interval.</p>
<h2>How long sections took</h2>
<p class="hint">Both axes are logarithmic; the dashed line is the timeout, the dotted one what the rule of
nvidia-resiliency-ext would have learned by the end of the run.</p>
@@distributions@@
<p class="hint">@@definition@@</p>
<script type="application/json" id="data">@@data@@</script>
<script>
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const plot = document.getElementById("timeline");
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
function zoom(from, to) {
  Plotly.relayout(plot, {"xaxis.range": [from, to], "yaxis.range": [data.ranks.length - 0.5, -0.5]});
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
    add(evidence, "h3", "rank " + each.rank + ", cycle " + each.cycle + ": " + each.summary);
    if (each.text) add(evidence, "pre", each.text);
    if (each.note) add(evidence, "p", each.note, "note");
    else add(evidence, "p", each.file, "hint");
  }
}
plot.on("plotly_hover", event => {
  const point = event.points[0];
  if (point.z === undefined) return;
  const cycle = cycleAt(point.x), when = new Date(data.begin_ms + 1000 * point.x);
  document.getElementById("where").textContent = "rank " + data.ranks[Math.round(point.y)] + ", cycle " + cycle.number +
    ", " + point.x.toFixed(3) + " s (" + when.toLocaleString() + "): " + data.states[point.z];
});
plot.on("plotly_click", event => {
  const point = event.points[0];
  const failure = data.failures.find(each => each.number === point.customdata);
  if (failure) show(failure.rank, failure.cycle);
  else show(data.ranks[Math.round(point.y)], cycleAt(point.x).number);
  evidence.scrollIntoView({behavior: "smooth", block: "nearest"});
});
const coarse = plot.data.findIndex(trace => trace.meta === "coarse");
plot.on("plotly_relayout", () => {
  const [from, to] = plot.layout.xaxis.range;
  const visible = to - from > data.length / 2;
  if ((plot.data[coarse].visible !== false) !== visible) Plotly.restyle(plot, {visible: visible}, [coarse]);
});
const buttons = document.getElementById("buttons");
button(buttons, "whole run", () => zoom(0, data.length));
const rows = document.querySelectorAll("#cycles tbody tr");
for (const failure of data.failures) {
  const around = data.windows[failure.cycle];
  const look = () => { zoom(around[0], around[1]); show(failure.rank, failure.cycle); };
  if (failure.number <= 20) button(buttons, "failure " + failure.number + " (cycle " + failure.cycle + ")", look);
  const row = rows[data.cycles.findIndex(cycle => cycle.number === failure.cycle)];
  if (row) { row.className = "failed"; button(row.lastChild, "show", () => { look(); plot.scrollIntoView(); }); }
}
const last = data.failures[data.failures.length - 1];
if (last) show(last.rank, last.cycle);
else evidence.textContent = "No cycle failed.";
document.body.dataset.ready = "yes";
</script>
</body>
</html>
"""
