"""A step as a page to look around in: zoom, pan, what each block is, and where each message went.

One file without anything from elsewhere. The blocks are drawn on a canvas, those narrower than a pixel by how much of it they
take, so that 64 ranks and 512 microbatches stay readable and quick.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from phalanx.schedule.draw.picture import COLOURS, NAMES, Block, Flow, Picture, Row
from phalanx.schedule.draw.svg import shade

KINDS = {kind: number for number, kind in enumerate(NAMES)}


def html(drawn: Sequence[Picture], lanes: bool = False, notes: str = "") -> str:
    """Pictures under each other on one time scale. `lanes` shows communication from the start; `notes` is text beside the picture."""
    data = {
        "kinds": [[kind, NAMES[kind], COLOURS[kind], shade(kind, 1)] for kind in KINDS],
        "lanes": lanes,
        "panels": [_panel(each) for each in drawn],
    }
    title = escape(", ".join(each.title for each in drawn) or "schedule")
    # A "</script>" inside a string would end the script.
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("</", "<\\/")
    page = PAGE.replace("@TITLE@", title).replace("@NOTES@", escape(notes)).replace("@SCRIPT@", SCRIPT)
    return page.replace("@DATA@", text)


def _panel(each: Picture) -> dict[str, Any]:
    return {
        "title": each.title,
        "unit": each.unit,
        "span": each.span,
        "memory": each.memory_unit,
        "rows": [_row(row) for row in each.rows],
        "flows": [_flow(flow) for flow in each.flows],
    }


def _flow(flow: Flow) -> list[Any]:
    ends = (_short(flow.start), _short(flow.end))
    return [flow.source, flow.target, flow.direction, flow.segment, _none(flow.microbatch), *ends, flow.bytes]


def _row(row: Row) -> dict[str, Any]:
    lanes = [[name, [_block(block) for block in blocks]] for name, blocks in row.lanes.items()]
    line = [number for time, held in row.memory for number in (_short(time), _short(held))]
    return {
        "label": row.label,
        "peak": _short(row.peak),
        "compute": [_block(b) for b in row.compute],
        "lanes": lanes,
        "memory": line,
    }


def _block(block: Block) -> list[float]:
    place = (_none(block.first), _none(block.last), _none(block.microbatch), block.chunk)
    return [KINDS[block.kind], *place, _short(block.start), _short(block.end), block.bytes]


def _none(number: int | None) -> int:
    return -1 if number is None else number


def _short(number: float) -> float:
    """Nine digits: nanoseconds of a second-long step."""
    short = float(f"{number:.9g}")
    return int(short) if short == int(short) else short


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>@TITLE@</title>
<style>
body { margin: 0; font: 13px system-ui, sans-serif; color: #222; background: #fff; overflow: hidden }
header { padding: 8px 12px; display: flex; flex-wrap: wrap; gap: 4px 16px; align-items: center; border-bottom: 1px solid #ddd }
header span.key { white-space: nowrap } header i { display: inline-block; width: 11px; height: 11px; margin-right: 4px }
header .hint { color: #666 } canvas { display: block; cursor: grab } pre { margin: 0; white-space: pre-wrap; color: #444 }
#over { position: absolute; pointer-events: none }
#tip { position: fixed; pointer-events: none; background: #fffffff2; border: 1px solid #999; padding: 4px 7px; display: none;
  white-space: pre; box-shadow: 0 1px 4px #0003 }
</style></head><body>
<header id="head"><span id="keys"></span>
<label><input type="checkbox" id="lanes"> communication</label><label><input type="checkbox" id="memory" checked> activations</label>
<button id="fit">whole step</button>
<span class="hint">wheel: zoom · drag: move · shift + wheel: up and down · small letters and paler: a rank's second stage · numbers:
microbatch · hover: what, when, and its messages</span><pre>@NOTES@</pre></header>
<canvas id="canvas"></canvas><canvas id="over"></canvas><div id="tip"></div>
<script>const data = @DATA@;
@SCRIPT@</script></body></html>
"""

SCRIPT = r"""
const box = id => document.getElementById(id);
const canvas = box('canvas'), upper = box('over'), tip = box('tip'), ink = canvas.getContext('2d'), arrow = upper.getContext('2d');
const LEFT = 76, RIGHT = 90, TITLE = 22, AXIS = 24, LANE = 8;
const span = Math.max(...data.panels.map(p => p.span), 1e-12);
let from = 0, to = span, up = 0, width = 0, height = 0, rowHeight = 20, places = [], over = null;

const used = new Set();
for (const panel of data.panels) for (const row of panel.rows) {
  row.compute.forEach(b => used.add(b[0]));
  row.lanes.forEach(([, blocks]) => blocks.forEach(b => used.add(b[0])));
}
box('keys').innerHTML = [...used].sort((a, b) => a - b).map(k =>
  `<span class="key"><i style="background:${data.kinds[k][2]}"></i>${data.kinds[k][0]} ${data.kinds[k][1]}</span>`).join(' &nbsp; ');
box('lanes').checked = data.lanes;

const x = time => LEFT + (time - from) / (to - from) * (width - LEFT - RIGHT);
const time = px => from + (px - LEFT) / (width - LEFT - RIGHT) * (to - from);
const units = (unit, seconds) => unit !== 's' || seconds >= 1 ? [1, unit] : seconds >= 1e-3 ? [1e3, 'ms'] : [1e6, 'µs'];
const say = (t, unit) => { const [f, u] = units(unit, Math.abs(t)); return `${+(t * f).toPrecision(5)} ${u}`; };
const nameOf = b => data.kinds[b[0]][0] + (b[1] < 0 ? '' : b[1] === b[2] ? b[1] : `${b[1]}-${b[2]}`) + (b[3] < 0 ? '' : `.${b[3]}`);
const colour = b => data.kinds[b[0]][b[4] % 2 ? 3 : 2];
const label = b => { const l = data.kinds[b[0]][0][0]; return (b[4] % 2 ? l.toLowerCase() : l) + (b[3] < 0 ? '' : b[3]); };

function layout() {
  width = window.innerWidth;
  height = window.innerHeight - box('head').offsetHeight;
  const dots = window.devicePixelRatio || 1;
  for (const [sheet, pen] of [[canvas, ink], [upper, arrow]]) {
    sheet.width = width * dots; sheet.height = height * dots;
    sheet.style.width = width + 'px'; sheet.style.height = height + 'px';
    pen.setTransform(dots, 0, 0, dots, 0, 0);
  }
  upper.style.left = '0px'; upper.style.top = box('head').offsetHeight + 'px';
  const rows = data.panels.reduce((n, p) => n + p.rows.length, 0);
  const free = height - data.panels.length * (TITLE + AXIS);
  const each = free / rows, strips = box('memory').checked ? 0.6 : 0;
  rowHeight = Math.max(5, Math.min(26, (each - 2) / (1 + strips), each / (1.2 + strips)));
}
const strip = () => box('memory').checked ? rowHeight * 0.6 : 0;
const lanesOf = row => box('lanes').checked ? row.lanes.length * LANE : 0;
const rowSpace = row => rowHeight + lanesOf(row) + strip() + Math.max(2, rowHeight * 0.2);

function firstAfter(blocks, t) {            // the first block that ends after t; blocks are in order of start
  let low = 0, high = blocks.length;
  while (low < high) { const mid = (low + high) >> 1; if (blocks[mid][6] > t) high = mid; else low = mid + 1; }
  return low;
}

function bar(blocks, y, h, labels) {
  const wide = width - LEFT - RIGHT, cover = {};
  for (let i = firstAfter(blocks, from); i < blocks.length; i++) {
    const b = blocks[i], a = x(b[5]), z = x(b[6]);
    if (b[5] > to) break;
    if (z - a >= 1) {
      const l = Math.max(a, LEFT), r = Math.min(z, width - RIGHT);
      ink.fillStyle = colour(b); ink.fillRect(l, y, Math.max(r - l - (z - a > 3 ? 0.7 : 0), 0.5), h);
      const text = label(b);
      if (labels && h >= 9 && r - l >= 7 * text.length) {
        ink.fillStyle = b[0] === 0 && b[4] % 2 === 0 ? '#fff' : '#000';
        ink.textAlign = 'center'; ink.fillText(text, (l + r) / 2, y + h / 2 + 4);
      }
    } else if (a >= LEFT && a < width - RIGHT) {
      const c = colour(b), line = cover[c] || (cover[c] = new Float32Array(wide + 2)), column = Math.floor(a - LEFT);
      const share = Math.max(z - a, labels ? 0 : 0.15), inside = Math.min(share, column + 1 - (a - LEFT));
      line[column] += inside; line[column + 1] += share - inside;
    }
  }
  for (const c in cover) {
    ink.fillStyle = c;
    for (let i = 0; i < wide; i++) if (cover[c][i] > 0.02) {
      const part = Math.min(1, cover[c][i]);          // stacked by share: kinds side by side in one pixel
      let below = 0;
      for (const other in cover) { if (other === c) break; below += Math.min(1, cover[other][i]); }
      ink.fillRect(LEFT + i, y + h * Math.min(below, 1), 1, h * Math.min(part, Math.max(0, 1 - below)));
    }
  }
}

function held(row, panel, y, h) {
  const highest = Math.max(...panel.rows.map(r => r.peak)), line = row.memory;
  if (!highest || h <= 0) return;
  ink.strokeStyle = '#444'; ink.lineWidth = 0.8; ink.beginPath();
  let before = 0;
  const level = v => y + h - v / highest * (h - 2);
  ink.moveTo(LEFT, level(0));
  for (let i = 0; i < line.length; i += 2) {
    const px = Math.min(Math.max(x(line[i]), LEFT), width - RIGHT);
    if (line[i] > to) break;
    if (line[i] >= from) { ink.lineTo(px, level(before)); ink.lineTo(px, level(line[i + 1])); }
    else if (i + 2 >= line.length || line[i + 2] >= from) ink.moveTo(LEFT, level(line[i + 1]));
    before = line[i + 1];
  }
  ink.lineTo(Math.min(x(panel.span), width - RIGHT), level(before)); ink.stroke();
  ink.fillStyle = '#444'; ink.textAlign = 'left';
  if (rowHeight >= 6) ink.fillText(`peak ${+row.peak.toPrecision(4)} ${panel.memory}`, width - RIGHT + 4, y + h);
}

function axis(panel, y) {
  ink.strokeStyle = ink.fillStyle = '#444'; ink.textAlign = 'center';
  const [factor, unit] = units(panel.unit, to - from), rough = (to - from) * factor / 8;
  const power = 10 ** Math.floor(Math.log10(rough)), step = power * [1, 2, 5, 10].find(n => n * power >= rough);
  for (let i = Math.ceil(from * factor / step); i * step / factor <= to; i++) {
    const px = x(i * step / factor);
    ink.fillRect(px, y, 1, 4); ink.fillText(+(i * step).toPrecision(8), px, y + 15);
  }
  ink.textAlign = 'left'; ink.fillText(unit, width - RIGHT + 4, y + 15);
}

function draw() {
  ink.clearRect(0, 0, width, height); ink.font = '11px system-ui, sans-serif'; places = [];
  let y = 4 - up;
  data.panels.forEach((panel, p) => {
    ink.fillStyle = '#222'; ink.textAlign = 'left'; ink.font = 'bold 12px system-ui, sans-serif';
    ink.fillText(panel.title, LEFT, y + 13); ink.font = '11px system-ui, sans-serif';
    y += TITLE;
    panel.rows.forEach((row, r) => {
      const space = rowSpace(row);
      places.push({p, r, y, lanesAt: y + rowHeight + 1});
      if (y + space > 0 && y < height) {
        ink.fillStyle = '#f2f2f2';
        ink.fillRect(LEFT, y, Math.max(0, Math.min(x(panel.span), width - RIGHT) - LEFT), rowHeight);
        bar(row.compute, y, rowHeight, true);
        if (box('lanes').checked) row.lanes.forEach(([, blocks], i) => bar(blocks, y + rowHeight + 1 + i * LANE, LANE - 1, false));
        held(row, panel, y + rowHeight + lanesOf(row), strip());
        ink.fillStyle = '#222'; ink.textAlign = 'right';
        if (rowHeight >= 9 || r % 2 === 0) ink.fillText(row.label, LEFT - 6, y + rowHeight / 2 + 4);
      }
      y += space;
    });
    axis(panel, y); y += AXIS;
  });
  up = Math.max(0, Math.min(up, y + up - height));
  arrows();
}

function arrows() {                         // messages that the block under the pointer reads or makes
  arrow.clearRect(0, 0, width, height);
  if (!over) return;
  const [p, b] = [over.p, over.block], panel = data.panels[p], kind = data.kinds[b[0]][0];
  const forward = kind === 'F' || kind.endsWith('_F'), message = kind.includes('_');
  const wanted = message ? [b[1]] : forward ? [b[1] - 1, b[2]] : [Math.min(b[1], b[2]), Math.max(b[1], b[2]) + 1];
  if (!message && !['F', 'B', 'I'].includes(kind)) return;
  for (const f of panel.flows) {
    if (f[2] !== (forward ? 'F' : 'B') || f[4] !== b[3] || !wanted.includes(f[3])) continue;
    if (f[0] !== over.r && f[1] !== over.r) continue;
    const middle = row => places.find(q => q.p === p && q.r === row).y + rowHeight / 2;
    const [ax, ay, bx, by] = [x(f[5]), middle(f[0]), x(f[6]), middle(f[1])], turn = Math.atan2(by - ay, bx - ax);
    arrow.strokeStyle = arrow.fillStyle = '#000'; arrow.lineWidth = 1.4;
    arrow.beginPath(); arrow.moveTo(ax, ay); arrow.lineTo(bx, by); arrow.stroke();
    arrow.beginPath(); arrow.moveTo(bx, by);
    for (const side of [0.4, -0.4]) arrow.lineTo(bx - 8 * Math.cos(turn + side), by - 8 * Math.sin(turn + side));
    arrow.fill();
  }
}

function under(px, py) {
  const place = places.filter(q => q.y <= py).pop();
  if (!place || px < LEFT || px > width - RIGHT) return null;
  const row = data.panels[place.p].rows[place.r];
  let blocks = null, lane = 'compute';
  if (py <= place.y + rowHeight) blocks = row.compute;
  else if (py < place.lanesAt + lanesOf(row)) [lane, blocks] = row.lanes[Math.floor((py - place.lanesAt) / LANE)] || [null, null];
  if (!blocks) return null;
  const t = time(px), near = (to - from) / (width - LEFT - RIGHT) * 2;
  let block = blocks[firstAfter(blocks, t)];
  if (!block || block[5] > t) block = blocks.find(b => b[5] - near <= t && t <= b[6] + near);
  return block ? {...place, row, lane, block} : null;
}

canvas.addEventListener('mousemove', event => {
  const found = under(event.offsetX, event.offsetY);
  if (dragging) {
    const moved = (event.clientX - dragging.x) / (width - LEFT - RIGHT) * (to - from);
    from -= moved; to -= moved; up -= event.clientY - dragging.y; dragging = {x: event.clientX, y: event.clientY}; clamp();
  }
  over = found;
  if (dragging) soon(); else arrows();
  tip.style.display = found ? 'block' : 'none';
  if (!found) return;
  const b = found.block, unit = data.panels[found.p].unit;
  tip.textContent = `${nameOf(b)}  ${data.kinds[b[0]][1]}\n${found.row.label}, ${found.lane}\nfrom ${say(b[5], unit)}\n`
    + `for ${say(b[6] - b[5], unit)}` + (b[7] ? `\n${b[7].toLocaleString()} bytes` : '');
  tip.style.left = Math.min(event.clientX + 14, width - tip.offsetWidth - 4) + 'px';
  tip.style.top = Math.min(event.clientY + 14, window.innerHeight - tip.offsetHeight - 4) + 'px';
});
let dragging = null;
canvas.addEventListener('mousedown', event => { dragging = {x: event.clientX, y: event.clientY}; });
window.addEventListener('mouseup', () => { dragging = null; });
canvas.addEventListener('mouseleave', () => { over = null; tip.style.display = 'none'; arrows(); });
canvas.addEventListener('wheel', event => {
  event.preventDefault();
  if (event.shiftKey) up += event.deltaY || event.deltaX;
  else {
    const t = time(event.offsetX), by = Math.exp(Math.sign(event.deltaY) * 0.2);
    from = t - (t - from) * by; to = t + (to - t) * by; clamp();
  }
  soon();
}, {passive: false});
let asked = false;
function soon() {                           // many movements of the mouse, one drawing
  if (asked) return;
  asked = true;
  requestAnimationFrame(() => { asked = false; draw(); });
}
function clamp() {
  const wide = Math.min(Math.max(to - from, span * 1e-6), span);
  from = Math.max(0, Math.min(from, span - wide)); to = from + wide;
}
function again() { layout(); draw(); }
for (const id of ['lanes', 'memory']) box(id).addEventListener('change', again);
box('fit').addEventListener('click', () => { from = 0; to = span; up = 0; again(); });
window.addEventListener('resize', again);
again();
"""
