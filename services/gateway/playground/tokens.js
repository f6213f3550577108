// Draws the text of an answer as coloured tokens, and names the origin of the token under the pointer.

const DEEPEST = 6;

export function originClass({ origin, depth }) {
  if (origin === 'draft') return `token draft d${Math.min(depth, DEEPEST)}`;
  return `token ${origin === 'bonus' ? 'bonus' : 'plain'}`;
}

function originText({ origin, depth, round }) {
  const where = round >= 0 ? ` (round ${round + 1})` : '';
  if (origin === 'draft') return `drafted at depth ${depth}${where}`;
  if (origin === 'bonus') return `chosen by the target after the drafted tokens${where}`;
  return `decoded without a draft${where}`;
}

// Appends the pieces of one or several parts at once. Reasoning is shown above the answer.
export function appendPieces(element, pieces) {
  const thoughts = pieces.filter((piece) => piece.reasoning);
  if (thoughts.length) appendSpans(reasoningOf(element), thoughts);
  appendSpans(element, pieces.filter((piece) => !piece.reasoning));
}

function reasoningOf(element) {
  const first = element.firstElementChild;
  if (first?.classList.contains('reasoning')) return first;
  const block = document.createElement('div');
  block.className = 'reasoning';
  element.prepend(block);
  return block;
}

function appendSpans(element, pieces) {
  const fragment = document.createDocumentFragment();
  for (const piece of pieces) {
    const span = document.createElement('span');
    span.className = originClass(piece);
    span.textContent = piece.text;
    span.dataset.origin = originText(piece);
    if (piece.round >= 0) span.dataset.round = piece.round;
    fragment.append(span);
  }
  element.append(fragment);
}

// Shows the origin of the token under the pointer in `output`. Calls `onPick` with the round of a clicked token.
export function explainTokens(root, output, onPick) {
  root.addEventListener('pointerover', (event) => {
    const span = event.target.closest?.('.token');
    output.textContent = span ? `“${span.textContent.replace(/\n/g, '⏎')}” was ${span.dataset.origin}.` : '';
  });
  root.addEventListener('pointerleave', () => { output.textContent = ''; });
  root.addEventListener('click', (event) => {
    const span = event.target.closest?.('.token');
    if (span?.dataset.round !== undefined) onPick(span, Number(span.dataset.round));
  });
}
