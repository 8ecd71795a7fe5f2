"""How the report looks, and the few lines of script that read values off charts."""

from __future__ import annotations

STYLE = """
:root { --ink: #1d2330; --soft: #5d6678; --faint: #dfe3ea; --paper: #f6f7f9; --card: #fff; --accent: #2457c5;
  --c0: #2457c5; --c1: #c2570c; --c2: #16794c; --c3: #8a3ab9; --c4: #a8862a; --c5: #64748b;
  --good: #16794c; --bad: #b42318; --code: #eef1f6; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9f0; --soft: #9aa4b8; --faint: #2d3444; --paper: #12161f;
  --card: #1a202c; --accent: #86aaff; --c0: #7aa2ff; --c1: #ff9f5a; --c2: #5bd19a; --c3: #cf9bff; --c4: #e5c76b;
  --c5: #94a3b8; --good: #5bd19a; --bad: #ff8a80; --code: #232a38; } }
* { box-sizing: border-box; }
html { scroll-behavior: smooth; }
body { margin: 0; background: var(--paper); color: var(--ink); line-height: 1.5;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
header, main { max-width: 1240px; margin: 0 auto; padding: 0 20px; }
header { padding-top: 28px; }
main { padding-bottom: 60px; }
h1 { font-size: 28px; margin: 0; letter-spacing: -0.01em; overflow-wrap: anywhere; }
h2 { font-size: 19px; margin: 40px 0 12px; }
h3 { font-size: 14px; margin: 0 0 8px; }
h4 { font-size: 12px; margin: 12px 0 4px; color: var(--soft); font-weight: 600; }
p { margin: 6px 0; }
code, pre { font: 12.5px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, "Noto Sans Mono", monospace; }
code { overflow-wrap: anywhere; }
a { color: var(--accent); text-decoration: none; }
a:hover { text-decoration: underline; }
.facts, .note { color: var(--soft); }
.note { font-size: 12.5px; }
.error { color: var(--bad); white-space: pre-wrap; }
.badge { display: inline-block; vertical-align: middle; font-size: 12px; font-weight: 600; letter-spacing: 0;
  padding: 2px 10px; border-radius: 99px; border: 1px solid currentColor; color: var(--soft); }
.badge.completed { color: var(--good); } .badge.failed, .badge.crashed { color: var(--bad); }
.badge.running { color: var(--accent); }
nav { display: flex; flex-wrap: wrap; gap: 4px 18px; margin-top: 14px; padding-bottom: 12px;
  border-bottom: 1px solid var(--faint); font-size: 13.5px; }
.verdict { font-size: 17px; max-width: 70ch; margin-bottom: 16px; }
.cards { display: grid; gap: 12px; grid-template-columns: repeat(auto-fit, minmax(210px, 1fr)); }
.card, .chart, article { background: var(--card); border: 1px solid var(--faint); border-radius: 10px; }
.card { padding: 14px 16px; }
.card-value { font-size: 24px; font-variant-numeric: tabular-nums; white-space: nowrap; }
.was { color: var(--soft); }
.card-name { color: var(--soft); }
.delta { font-size: 13px; font-weight: 600; } .delta.up { color: var(--good); } .delta.down { color: var(--bad); }
.delta.same { color: var(--soft); }
.charts { display: grid; gap: 14px; grid-template-columns: repeat(auto-fill, minmax(min(350px, 100%), 1fr)); }
.chart { margin: 0; padding: 12px 14px 10px; display: flex; flex-direction: column; }
figcaption { display: flex; flex-wrap: wrap; justify-content: space-between; gap: 0 10px; align-items: baseline; }
figcaption code { color: var(--soft); font-size: 11px; flex-basis: 100%; margin-bottom: 4px; white-space: nowrap;
  overflow: hidden; text-overflow: ellipsis; }
.newest { font-variant-numeric: tabular-nums; white-space: nowrap; font-weight: 600; }
.chart .note { margin: auto 0 0; padding-top: 4px; }
svg { width: 100%; height: auto; display: block; touch-action: pan-y; outline-offset: 2px; }
.tick { font-size: 11px; fill: var(--soft); font-variant-numeric: tabular-nums; }
.end { text-anchor: end; } .mid { text-anchor: middle; }
.grid { stroke: var(--faint); stroke-width: 1; } .axis { stroke: var(--soft); stroke-width: 1; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.l1 { stroke-dasharray: 6 3; } .l2 { stroke-dasharray: 2 4; }
.band { opacity: .16; }
.cross { stroke: var(--ink); stroke-width: 1; stroke-dasharray: 2 2; opacity: .7; }
.l0 { stroke: var(--c0); } .l1 { stroke: var(--c1); } .l2 { stroke: var(--c2); } .l3 { stroke: var(--c3); }
.f0 { fill: var(--c0); } .f1 { fill: var(--c1); } .f2 { fill: var(--c2); } .f3 { fill: var(--c3); }
.f4 { fill: var(--c4); } .f5 { fill: var(--c5); }
.b0 { background: var(--c0); } .b1 { background: var(--c1); } .b2 { background: var(--c2); }
.b3 { background: var(--c3); } .b4 { background: var(--c4); } .b5 { background: var(--c5); }
.legend { display: flex; flex-wrap: wrap; gap: 2px 14px; font-size: 12px; color: var(--soft); padding: 2px 0 0 4px; }
.swatch { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 5px; }
.tip { position: fixed; pointer-events: none; z-index: 9; background: var(--ink); color: var(--paper); padding: 5px 9px;
  border-radius: 6px; font-size: 12px; white-space: pre; font-variant-numeric: tabular-nums; }
.columns { display: grid; gap: 20px 32px; grid-template-columns: repeat(auto-fit, minmax(min(300px, 100%), 1fr)); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; }
th { text-align: left; color: var(--soft); font-weight: 600; font-size: 12px; white-space: nowrap; }
th, td { padding: 5px 12px 5px 0; border-bottom: 1px solid var(--faint); vertical-align: top; overflow-wrap: anywhere; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
.samples { display: grid; gap: 14px; grid-template-columns: repeat(auto-fill, minmax(min(350px, 100%), 1fr)); }
article { padding: 14px 16px; min-width: 0; }
article h3 code { color: var(--soft); font-weight: 400; font-size: 11.5px; }
.chips { display: flex; flex-wrap: wrap; gap: 5px; }
.chip { background: var(--code); border-radius: 6px; padding: 1px 8px; font-size: 12px; overflow-wrap: anywhere; }
pre { background: var(--code); border-radius: 8px; padding: 9px 12px; margin: 0; white-space: pre-wrap;
  overflow-wrap: anywhere;
  max-height: 320px; overflow-y: auto; }
pre.completion { border-left: 3px solid var(--accent); }
details { margin-top: 12px; } summary { cursor: pointer; color: var(--accent); margin-bottom: 8px; }
details pre { max-height: none; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 20px; margin: 0 0 16px; font-size: 13.5px; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
.tree, .tree ul { list-style: none; margin: 0; padding-left: 18px; border-left: 1px solid var(--faint);
  font-size: 13.5px; }
.tree { padding-left: 0; border: 0; } .tree li { padding: 2px 0; }
@media (max-width: 560px) { header, main { padding-left: 14px; padding-right: 14px; }
  dl { grid-template-columns: 1fr; gap: 0; }
  dd { margin-bottom: 8px; } h1 { font-size: 23px; } }
@media print { :root { --ink: #000; --soft: #444; --faint: #ccc; --paper: #fff; --card: #fff; --code: #f3f3f3;
  --c0: #2457c5; --c1: #c2570c; --c2: #16794c; --c3: #8a3ab9; --c4: #a8862a; --c5: #64748b;
  --good: #16794c; --bad: #b42318; }
  nav, .tip { display: none; } .card, .chart, article, tr { break-inside: avoid; } pre { max-height: none; }
  h2 { break-after: avoid; } body { font-size: 12px; } .charts { grid-template-columns: 1fr 1fr; } }
"""

# Texts are set with textContent only: what a chart says can never become markup.
SCRIPT = """
"use strict";
const tip = document.createElement("div");
tip.className = "tip";
tip.hidden = true;
document.body.append(tip);
for (const svg of document.querySelectorAll("svg[data-chart]")) {
  const points = JSON.parse(svg.dataset.chart);
  const cross = svg.querySelector(".cross");
  let at = points.length - 1;
  const show = (index, clientY) => {
    if (index < 0 || index >= points.length) return;
    at = index;
    const box = svg.getBoundingClientRect();
    const x = points[at][0];
    cross.setAttribute("x1", x);
    cross.setAttribute("x2", x);
    tip.textContent = points[at][1];
    tip.hidden = false;
    const left = box.left + x * box.width / svg.viewBox.baseVal.width;
    const beside = left + 14 + tip.offsetWidth > innerWidth ? left - 14 - tip.offsetWidth : left + 14;
    tip.style.left = Math.max(4, beside) + "px";
    tip.style.top = Math.max(4, (clientY ?? box.top + box.height / 3) - tip.offsetHeight - 8) + "px";
  };
  const hide = () => {
    tip.hidden = true;
    cross.setAttribute("x1", -9);
    cross.setAttribute("x2", -9);
  };
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const x = (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width;
    let best = 0;
    points.forEach((point, i) => { if (Math.abs(point[0] - x) < Math.abs(points[best][0] - x)) best = i; });
    show(best, event.clientY);
  });
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", (event) => {
    if (event.key === "ArrowLeft") show(at - 1);
    else if (event.key === "ArrowRight") show(at + 1);
    else if (event.key === "Escape") hide();
    else return;
    event.preventDefault();
  });
}
"""
