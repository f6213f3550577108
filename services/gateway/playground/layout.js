// Places the nodes of a draft tree: one column per depth, one row per leaf, likely children first.

export const ROW = 27;
export const PILL_HEIGHT = 21;
const GAP = 20;
const MARGIN = 12;
const LABEL_CHARS = 12;
const NARROWEST = 34;
const CHAR = 7;
// The first of the characters that are about twice as wide as a letter, such as those of Chinese.
const WIDE = 0x2e80;

// Shows blanks and line breaks, which are most of many tokens.
export function visible(text) {
  if (text === null || text === undefined || text === '') return '∅';
  return text.replace(/\r?\n/g, '⏎').replace(/\t/g, '⇥').replace(/^ /, '␣').replace(/ $/, '␣');
}

export function label(text) {
  const shown = [...visible(text)];
  return shown.length > LABEL_CHARS ? `${shown.slice(0, LABEL_CHARS - 1).join('')}…` : shown.join('');
}

function pillWidth(text) {
  const units = [...label(text)].reduce((sum, char) => sum + (char.codePointAt(0) < WIDE ? 1 : 2), 0);
  return Math.max(NARROWEST, units * CHAR + 14);
}

export function probability(logprob) {
  return logprob === null ? 0 : Math.min(1, Math.exp(logprob));
}

// Number of accepted tokens after the end of the answer, or -1 if the round does not end the answer. An answer
// ends at a stop token or at the length limit. Then the round emits fewer tokens than it accepted, and no bonus.
export function acceptedAfterEnd(round) {
  const drafted = round.nodes.length > 1;
  const left = round.accepted.length - round.emitted_text.length;
  return drafted ? Math.max(-1, left) : -1;
}

// Returns {nodes: [{x, y, width, index, accepted, bonus, after, parent, …}], width, height}. The bonus token is the
// last node. A chain that is wider than `most` continues on the next line.
export function layoutRound(round, most = Infinity) {
  const nodes = nodesOf(round);
  const deepest = Math.max(...nodes.map((node) => node.depth));
  const widths = Array(deepest + 1).fill(0);
  for (const node of nodes) widths[node.depth] = Math.max(widths[node.depth], pillWidth(node.text));
  const lefts = [MARGIN];
  for (const width of widths) lefts.push(lefts.at(-1) + width + GAP);
  // The accepted child comes first, so that the accepted path is a straight line at the top.
  let rows = 0;
  const place = (node) => {
    node.x = lefts[node.depth];
    node.width = widths[node.depth];
    node.children.sort((a, b) => (b.accepted - a.accepted) || (a.bonus - b.bonus) || (b.probability - a.probability));
    if (!node.children.length) {
      node.y = MARGIN + rows * ROW;
      rows += 1;
      return;
    }
    node.children.forEach(place);
    node.y = node.children[0].y;
  };
  place(nodes[0]);
  const chain = rows === 1;
  const lines = chain ? wrap(nodes, most) : rows;
  const right = Math.max(...nodes.map((node) => node.x + node.width));
  return { nodes, width: right + MARGIN, height: 2 * MARGIN + (lines - 1) * (chain ? LINE : ROW) + PILL_HEIGHT };
}

const LINE = ROW + 9;

// Breaks a chain into lines, and returns their number.
function wrap(nodes, most) {
  let shift = 0;
  let line = 0;
  for (const node of nodes) {
    if (node.x - shift + node.width + MARGIN > most && node.x - shift > MARGIN) {
      shift = node.x - MARGIN;
      line += 1;
    }
    node.x -= shift;
    node.y += line * LINE;
  }
  return line + 1;
}

function nodesOf(round) {
  const nodes = round.nodes.map((node, index) => ({
    ...node, index, children: [], accepted: index === 0, bonus: false, after: false, path: 1,
    probability: probability(node.logprob),
  }));
  for (const index of round.accepted) nodes[index].accepted = true;
  const end = acceptedAfterEnd(round) >= 0 ? round.accepted[round.emitted_text.length - 1] ?? 0 : -1;
  for (const node of nodes.slice(1)) {
    const parent = nodes[node.parent];
    parent.children.push(node);
    node.path = parent.path * node.probability;
    node.after = parent.after || node.parent === end;
  }
  const last = nodes[round.accepted.at(-1) ?? 0];
  const bonusText = round.emitted_text[round.accepted.length];
  if (bonusText !== undefined) {
    const bonus = {
      index: nodes.length, parent: last.index, depth: last.depth + 1, text: bonusText, token: round.emitted.at(-1),
      children: [], accepted: true, bonus: true, plain: nodes.length < 2, after: false, path: 1, probability: 1,
    };
    last.children.push(bonus);
    nodes.push(bonus);
  }
  return nodes;
}

// The curve from a node to its child, as the data of an SVG path. It leads to the next line if a chain is wrapped.
export function edgePath(from, to) {
  const [x1, y1] = [from.x + from.width, from.y + PILL_HEIGHT / 2];
  const [x2, y2] = [to.x, to.y + PILL_HEIGHT / 2];
  if (x2 < x1) {
    const between = (y1 + y2) / 2;
    return `M${x1} ${y1}h3q4 0 4 4V${between - 4}q0 4 -4 4H${x2 - 3}q-4 0 -4 4V${y2 - 4}q0 4 4 4h3`;
  }
  const bend = (x2 - x1) * 0.55;
  return `M${x1} ${y1}C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}`;
}
