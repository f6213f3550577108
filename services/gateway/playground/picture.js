// Draws a record as one animated SVG file: the tree of each round, and the text as it grows. A long answer is cut
// after some rounds, and the picture says so at its end.

import { PILL_HEIGHT, acceptedAfterEnd, edgePath, label, layoutRound } from './layout.js';

const MOST_ROUNDS = 40;
const SECONDS_PER_ROUND = 1.1;
const SECONDS_AT_END = 3;
const CHAR = 8.1;
const LINE = 24;
const WIDTH = 860;
const PAD = 20;
const MOST = WIDTH - 2 * PAD + 16;

const STYLE = `
svg{--ink:#1d2329;--muted:#5c6670;--back:#fff;--line:#d5d9d6;--draft:#0f766e;--bonus:#b45309}
@media(prefers-color-scheme:dark){svg{--ink:#e6eaec;--muted:#9fabb3;--back:#14181b;--line:#39434a;--draft:#2dd4bf;--bonus:#fbbf24}}
text{font:13.5px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;fill:var(--ink);white-space:pre}
.pill text{font-size:11.5px;text-anchor:middle}
.caption{fill:var(--muted);font-size:12px}
.pill rect{fill:var(--back);stroke:var(--line)}
.edge{fill:none;stroke:var(--line)}
.on rect{fill:var(--draft);fill-opacity:.22;stroke:var(--draft)}
.on .edge{stroke:var(--draft)}
.after{opacity:.45}
.bonus rect{fill:var(--bonus);fill-opacity:.2;stroke:var(--bonus);stroke-dasharray:4 3}
.bonus .edge{stroke:var(--bonus);stroke-dasharray:4 3}
.mark{fill:var(--draft);fill-opacity:.2}
.mark.last{fill:var(--bonus)}`;

const escape = (text) => text.replace(/[&<>"]/g, (sign) => `&#${sign.charCodeAt(0)};`)
  .replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\ufffe\uffff]/g, '�');

// Shows its group from second `from` to second `to` of each loop of `total` seconds.
function shown(from, to, total) {
  const times = [0, from / total, Math.min(1, to / total)];
  const values = from > 0 ? ['hidden', 'visible', 'hidden'] : ['visible', 'visible', 'hidden'];
  if (to >= total) {
    times.pop();
    values.pop();
  }
  return `<animate attributeName="visibility" calcMode="discrete" dur="${total.toFixed(2)}s" repeatCount="indefinite" `
    + `keyTimes="${times.map((time) => time.toFixed(4)).join(';')}" values="${values.join(';')}"/>`;
}

function pill(node, nodes, kind) {
  const edge = node.parent >= 0
    ? `<path class="edge" d="${edgePath(nodes[node.parent], node)}" stroke-width="${(0.8 + 2.2 * Math.sqrt(node.path)).toFixed(2)}"/>` : '';
  return `<g class="pill ${kind}">${edge}<rect x="${node.x}" y="${node.y}" width="${node.width}" height="${PILL_HEIGHT}" rx="6"/>`
    + `<text x="${node.x + node.width / 2}" y="${node.y + 15}">${escape(label(node.text))}</text></g>`;
}

function drawRound(round, number, from, total) {
  const { nodes, width } = layoutRound(round, MOST);
  const end = from + SECONDS_PER_ROUND;
  const scale = Math.min(1, MOST / width);
  const plain = nodes.filter((node) => !node.bonus).map((node) => pill(node, nodes, '')).join('');
  const accepted = nodes.filter((node) => node.accepted && !node.bonus && node.index)
    .map((node) => pill(node, nodes, node.after ? 'on after' : 'on')).join('');
  const bonus = nodes.filter((node) => node.bonus).map((node) => pill(node, nodes, 'bonus')).join('');
  const late = acceptedAfterEnd(round);
  const caption = `round ${number}: ${round.nodes.length - 1} drafted, ${round.accepted.length} accepted`
    + (late > 0 ? `, ${late} of them after the end` : '');
  return `<g visibility="hidden">${shown(from, end, total)}<text class="caption" x="${PAD}" y="22">${caption}</text>`
    + `<g transform="translate(${PAD - 8} 32) scale(${scale.toFixed(3)})">${plain}<g visibility="hidden">`
    + `${shown(from + SECONDS_PER_ROUND * 0.45, end, total)}${accepted}${bonus}</g></g></g>`;
}

// Breaks pieces into lines of monospaced text. Returns [{x, y, text, origin, appears}] and the number of lines.
function flow(pieces) {
  const most = Math.floor((WIDTH - 2 * PAD) / CHAR);
  const words = [];
  let column = 0;
  let line = 0;
  for (const piece of pieces) {
    const lines = piece.text.split('\n');
    lines.forEach((text, index) => {
      if (index) [column, line] = [0, line + 1];
      const size = [...text].length;
      if (column && column + size > most) [column, line] = [0, line + 1];
      if (size) words.push({ x: column * CHAR, y: line * LINE, size, text, origin: piece.origin, appears: piece.appears });
      column += size;
    });
  }
  return { words, lines: line + 1 };
}

// Which rounds the picture of a record contains, such as “first 40 of 96 rounds”. Empty if it contains all of them.
export function leftOut({ numRounds }) {
  return numRounds > MOST_ROUNDS ? `first ${MOST_ROUNDS} of ${numRounds} rounds` : '';
}

export function animatedSvg(record) {
  const parts = [];
  let rounds = 0;
  for (const part of record.parts) {
    if (part.round) rounds += 1;
    if (rounds > MOST_ROUNDS) break;
    parts.push(part);
  }
  const drawn = Math.min(rounds, MOST_ROUNDS);
  const cut = leftOut(record);
  const total = drawn * SECONDS_PER_ROUND + SECONDS_AT_END;
  const heights = parts.filter((part) => part.round).map((part) => {
    const { width, height } = layoutRound(part.round, MOST);
    return height * Math.min(1, MOST / width);
  });
  const treeHeight = Math.ceil(Math.max(60, ...heights)) + 44;
  const body = [];
  let from = 0;
  let number = 0;
  const pieces = [];
  for (const part of parts) {
    const appears = part.round ? from + SECONDS_PER_ROUND * 0.45 : from;
    if (part.round) {
      number += 1;
      body.push(drawRound(part.round, number, from, total));
      from += SECONDS_PER_ROUND;
    }
    for (const piece of part.pieces) pieces.push({ ...piece, appears });
  }
  if (cut) {
    pieces.push({ text: ' …', origin: 'plain', appears: from });
    body.push(`<g visibility="hidden">${shown(from, total, total)}<text class="caption" x="${PAD}" y="22">${cut}</text></g>`);
  }
  const { words, lines } = flow(pieces);
  for (const word of words) {
    const mark = word.origin === 'plain' ? '' : `<rect class="mark${word.origin === 'bonus' ? ' last' : ''}" x="${word.x.toFixed(1)}" `
      + `y="${word.y - 15}" width="${(word.size * CHAR).toFixed(1)}" height="20" rx="3"/>`;
    const text = `<text x="${word.x.toFixed(1)}" y="${word.y}" textLength="${(word.size * CHAR).toFixed(1)}">${escape(word.text)}</text>`;
    body.push(`<g transform="translate(${PAD} ${treeHeight + 20})" visibility="hidden">${shown(word.appears, total, total)}${mark}${text}</g>`);
  }
  const height = treeHeight + lines * LINE + 24;
  return `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${WIDTH} ${height}" width="${WIDTH}" height="${height}" role="img" `
    + 'aria-label="Speculative decoding: the draft tree of each round and the growing text'
    + `${cut && `: ${cut}`}">`
    + `<style>${STYLE}</style><rect width="${WIDTH}" height="${height}" rx="10" fill="var(--back)"/>${body.join('')}</svg>\n`;
}
