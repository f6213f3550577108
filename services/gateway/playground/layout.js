// Places the nodes of a draft tree: one column per depth, one row per leaf, likely children first.

export const COLUMN = 110;
export const ROW = 27;
export const PILL = { width: 90, height: 21 };
const MARGIN = 8;
const LABEL_CHARS = 12;

// Shows blanks and line breaks, which are most of many tokens.
export function visible(text) {
  if (text === null || text === undefined || text === '') return '∅';
  return text.replace(/\r?\n/g, '⏎').replace(/\t/g, '⇥').replace(/^ /, '␣').replace(/ $/, '␣');
}

export function label(text) {
  const shown = [...visible(text)];
  return shown.length > LABEL_CHARS ? `${shown.slice(0, LABEL_CHARS - 1).join('')}…` : shown.join('');
}

export function probability(logprob) {
  return logprob === null ? 0 : Math.min(1, Math.exp(logprob));
}

// Returns {nodes: [{x, y, index, accepted, bonus, parent, …}], width, height}. The bonus token is the last node.
export function layoutRound(round) {
  const nodes = round.nodes.map((node, index) => ({
    ...node, index, children: [], accepted: index === 0, bonus: false, path: 1, probability: probability(node.logprob),
  }));
  for (const node of nodes.slice(1)) {
    nodes[node.parent].children.push(node);
    node.path = nodes[node.parent].path * node.probability;
  }
  for (const index of round.accepted) nodes[index].accepted = true;
  const last = nodes[round.accepted.at(-1) ?? 0];
  const drafted = nodes.length > 1;
  const bonusText = round.emitted_text[round.accepted.length];
  if (bonusText !== undefined) {
    const bonus = {
      index: nodes.length, parent: last.index, depth: last.depth + 1, text: bonusText, token: round.emitted.at(-1),
      children: [], accepted: true, bonus: true, plain: !drafted, path: 1, probability: 1,
    };
    last.children.push(bonus);
    nodes.push(bonus);
  }
  // The accepted child comes first, so that the accepted path is a straight line at the top.
  let rows = 0;
  const place = (node) => {
    node.x = MARGIN + node.depth * COLUMN;
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
  const deepest = Math.max(...nodes.map((node) => node.depth));
  return {
    nodes,
    width: 2 * MARGIN + deepest * COLUMN + PILL.width,
    height: 2 * MARGIN + Math.max(0, rows - 1) * ROW + PILL.height,
  };
}

// The curve from a node to its child, as the data of an SVG path.
export function edgePath(from, to) {
  const [x1, y1] = [from.x + PILL.width, from.y + PILL.height / 2];
  const [x2, y2] = [to.x, to.y + PILL.height / 2];
  const bend = (x2 - x1) * 0.55;
  return `M${x1} ${y1}C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}`;
}
