// Draws the text of an answer as coloured tokens, and names the origin of the token under the pointer or selected.

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

// Shows the origin of the token under the pointer in `output`. A click, a tap and the arrow keys select a token, whose
// origin stays shown. Calls `onPick` with a selected token and its round.
export function explainTokens(root, output, onPick) {
  let selected = null;
  const show = (span) => {
    output.textContent = span ? `“${span.textContent.replace(/\n/g, '⏎')}” was ${span.dataset.origin}.` : '';
  };
  const kept = () => (selected && root.contains(selected) ? selected : null);
  const select = (span) => {
    selected?.classList.remove('selected');
    selected = span;
    span.classList.add('selected');
    show(span);
    if (span.dataset.round !== undefined) onPick(span, Number(span.dataset.round));
  };
  root.addEventListener('pointerover', (event) => show(event.target.closest?.('.token') ?? kept()));
  root.addEventListener('pointerleave', () => show(kept()));
  root.addEventListener('click', (event) => {
    const span = event.target.closest?.('.token');
    if (span) select(span);
  });
  root.addEventListener('keydown', (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step || event.target !== root) return;
    const answer = kept()?.closest('.text') ?? [...root.querySelectorAll('.assistant .text')].at(-1);
    const tokens = [...answer?.querySelectorAll('.token') ?? []];
    const next = kept() ? tokens[tokens.indexOf(selected) + step] : tokens.at(step > 0 ? 0 : -1);
    event.preventDefault();
    if (!next) return;
    select(next);
    next.scrollIntoView({ block: 'nearest' });
  });
}
