// Draws the text of an answer as coloured tokens, and names the origin of the token under the pointer or selected.

// The deepest level of a tree with a colour of its own. No request can ask for a deeper tree.
const DEEPEST = 16;
// A block ends at the first line break after this number of tokens.
const BLOCK_TOKENS = 128;
// A paragraph of so many tokens is continued in a new block without a line break.
const PARAGRAPH_TOKENS = 768;
// Pixels by which the tops of tokens in the same line may differ.
const LINE_TOLERANCE = 4;

// For each block that could not be broken: the number of tokens at which to try again.
const nextBreak = new WeakMap();

// The class of the colour of a depth.
export const depthClass = (depth) => `d${Math.min(depth, DEEPEST)}`;

export function originClass({ origin, depth }) {
  if (origin === 'draft') return `token draft ${depthClass(depth)}`;
  return `token ${origin === 'bonus' ? 'bonus' : 'plain'}`;
}

function originText({ origin, depth, round }) {
  const where = round >= 0 ? ` (round ${round + 1})` : '';
  if (origin === 'draft') return `drafted at depth ${depth}${where}`;
  if (origin === 'bonus') return `chosen by the target after the drafted tokens${where}`;
  return `decoded without a draft${where}`;
}

// Appends the pieces of one or several parts at once. Reasoning is shown above the answer.
//
// The text consists of blocks. New tokens change only the last block, and the browser keeps the style and the
// layout of the others. The work of an update therefore does not depend on the length of the answer.
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
  if (!pieces.length) return;
  let block = element.lastElementChild;
  if (!block?.classList.contains('block')) block = startBlock(element);
  let spans = document.createDocumentFragment();
  let room = BLOCK_TOKENS - block.childElementCount;
  let newLine = block.lastElementChild?.textContent.endsWith('\n');
  for (const piece of pieces) {
    if (room <= 0 && newLine) {
      block.append(spans);
      spans = document.createDocumentFragment();
      block = startBlock(element);
      room = BLOCK_TOKENS;
    }
    spans.append(tokenSpan(piece));
    room -= 1;
    newLine = piece.text.endsWith('\n');
  }
  block.append(spans);
  if (block.childElementCount >= (nextBreak.get(block) ?? PARAGRAPH_TOKENS)) breakAtLine(element, block);
}

function startBlock(element) {
  const block = document.createElement('div');
  block.className = 'block';
  element.append(block);
  return block;
}

function tokenSpan(piece) {
  const span = document.createElement('span');
  span.className = originClass(piece);
  span.textContent = piece.text;
  span.dataset.origin = originText(piece);
  if (piece.round >= 0) span.dataset.round = piece.round;
  return span;
}

// Moves the last line of a very long paragraph to a new block, where the next tokens continue it. If the page
// becomes wider or narrower later, the line before the new block stays shorter than the others.
function breakAtLine(element, block) {
  nextBreak.set(block, block.childElementCount + BLOCK_TOKENS);
  const bottom = block.lastElementChild.getClientRects();
  if (!bottom.length) return;
  const line = bottom[bottom.length - 1].top - LINE_TOLERANCE;
  let span = block.lastElementChild;
  while (span && span.getClientRects()[0]?.top >= line) span = span.previousElementSibling;
  // The whole block is one line, or a token without a place of its own is in the way.
  if (!span?.getClientRects().length) return;
  const moved = [];
  for (let next = span.nextElementSibling; next; next = next.nextElementSibling) moved.push(next);
  const rest = splitAtLine(span, line);
  if (rest) moved.unshift(rest);
  if (moved.length) startBlock(element).append(...moved);
}

// Splits a token that begins above `line` and ends below it, usually after its leading blank. Returns the part
// below, or null if there is none.
function splitAtLine(span, line) {
  const text = span.firstChild;
  const range = document.createRange();
  for (let at = 1; at < text.length; at += 1) {
    range.setStart(text, at);
    range.setEnd(text, at + 1);
    if (range.getBoundingClientRect().top < line) continue;
    const rest = span.cloneNode(false);
    rest.append(text.splitText(at));
    return rest;
  }
  return null;
}

// Copies exactly the selected text of an answer. Browsers would add a line break between two blocks.
export function copyExactly() {
  document.addEventListener('copy', (event) => {
    const selection = getSelection();
    if (selection.isCollapsed || selection.rangeCount !== 1) return;
    const range = selection.getRangeAt(0);
    const around = range.commonAncestorContainer;
    if (!(around.nodeType === Node.ELEMENT_NODE ? around : around.parentElement).closest('.text')) return;
    const copied = range.cloneContents();
    copied.querySelector('.reasoning')?.append('\n\n');
    event.clipboardData.setData('text/plain', copied.textContent);
    event.preventDefault();
  });
}

// The token whose origin is shown, or null.
let explained = null;

// Empties `output` if the token that it explains is no longer on the page.
export function forgetOrigin(output) {
  if (!explained || explained.isConnected) return;
  explained = null;
  output.textContent = '';
}

// Shows the origin of the token under the pointer in `output`. A click, a tap and the arrow keys select a token, whose
// origin stays shown. Calls `onPick` with a selected token and its round.
export function explainTokens(root, output, onPick) {
  let selected = null;
  const show = (span) => {
    explained = span;
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
    const answer = kept()?.closest('.text') ?? [...root.querySelectorAll('.assistant .text')].at(-1) ?? root;
    const tokens = [...answer.querySelectorAll('.token')];
    const next = kept() ? tokens[tokens.indexOf(selected) + step] : tokens.at(step > 0 ? 0 : -1);
    event.preventDefault();
    if (!next) return;
    select(next);
    next.scrollIntoView({ block: 'nearest' });
  });
}
