// Draws the tree of one round as SVG. A hover shows a node's text and probabilities. A click, a tap and the arrow keys
// select a node, which stays shown.

import { PILL_HEIGHT, acceptedAfterEnd, edgePath, label, layoutRound, visible } from './layout.js';
import { whyNoDraft } from './reasons.js';
import { depthClass } from './tokens.js';

const SVG = 'http://www.w3.org/2000/svg';
const SMALLEST = 0.75;
const SCROLLBAR = 12;

function svgElement(name, attributes, parent) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  parent?.append(element);
  return element;
}

function percent(share) {
  return share >= 0.9995 ? '100 %' : share < 0.001 ? '< 0.1 %' : `${(share * 100).toFixed(1)} %`;
}

export function describeNode(node) {
  const text = `“${visible(node.text)}”`;
  if (node.index === 0) return `${text}: the last token before this round.`;
  if (node.bonus) {
    return `${text}: ${node.plain ? 'decoded without a draft' : 'chosen by the target after the drafted tokens'}.`;
  }
  const fate = node.accepted ? 'Accepted' : 'Rejected';
  return `${text}: drafted at depth ${node.depth}, probability ${percent(node.probability)}, along the path `
    + `${percent(node.path)}. ${fate}${node.after ? ' after the end of the answer, and not part of it' : ''}.`;
}

export function describeRound(round) {
  const drafted = round.nodes.length - 1;
  const took = [drafted > 0 && round.draft_ms !== null ? `draft ${round.draft_ms.toFixed(1)} ms` : '',
    round.verify_ms !== null ? `verify ${round.verify_ms.toFixed(1)} ms` : ''].filter(Boolean).join(', ');
  const late = acceptedAfterEnd(round);
  const what = drafted > 0
    ? `${drafted} drafted, ${round.accepted.length} accepted${late > 0 ? ` (${late} after the end of the answer)` : ''}, `
      + `${round.emitted_text.length} emitted`
    : `no draft${round.reason ? ` (${whyNoDraft(round.reason)})` : ''}, 1 emitted`;
  return took ? `${what}; ${took}` : what;
}

export class TreeView {
  // `frame` is the scrolling element, and `detail` announces the node under the pointer or the selection.
  constructor(frame, detail) {
    this.marking = 0;
    this.wide = false;
    this.room = 0;
    new ResizeObserver(([entry]) => { this.room = entry.contentRect.width; }).observe(frame);
    this.frame = frame;
    this.detail = detail;
    this.nodes = [];
    this.selected = -1;
    this.round = null;
    // Whether a pointer gives the focus. The click that follows then selects the node.
    this.pointed = false;
    this.tallest = 0;
    frame.addEventListener('scroll', () => this._markRest());
    frame.addEventListener('pointerover', (event) => this._hover(event));
    frame.addEventListener('pointerleave', () => this._show(this.selected));
    frame.addEventListener('pointerdown', () => { this.pointed = true; });
    frame.addEventListener('pointercancel', () => { this.pointed = false; });
    frame.addEventListener('click', (event) => this._click(event));
    frame.addEventListener('keydown', (event) => this._key(event));
    frame.addEventListener('focus', () => {
      if (!this.pointed && this.selected < 0 && this.nodes.length) this._select(0);
    });
    frame.addEventListener('blur', () => { this.pointed = false; });
  }

  clear(message) {
    this.nodes = [];
    this.selected = -1;
    this.round = null;
    const text = document.createElement('p');
    text.className = 'quiet';
    text.textContent = message;
    this.frame.replaceChildren(text);
    this.frame.setAttribute('role', 'group');
    this.frame.removeAttribute('aria-activedescendant');
    this.detail.textContent = '';
    this.tallest = 0;
    this.frame.style.height = '';
    this._markRest();
  }

  // Makes the frame as high as the tallest of these rounds, so that it keeps its height between them.
  reserve(rounds) {
    for (const round of rounds) this.tallest = Math.max(this.tallest, this._fit(round).frameHeight);
    this.frame.style.height = `${this.tallest}px`;
  }

  // A chain continues on the next line. A deep tree shrinks to the frame, but stays readable; the frame scrolls.
  _fit(round) {
    const room = this.room || this.frame.clientWidth;
    const placed = layoutRound(round, room);
    const scale = Math.max(SMALLEST, Math.min(1, room / placed.width));
    this.wide = placed.width * scale > room;
    const bar = this.wide ? SCROLLBAR : 0;
    return { ...placed, scale, frameHeight: Math.ceil(placed.height * scale) + bar + 2 };
  }

  draw(round) {
    const { nodes, width, height, scale, frameHeight } = this._fit(round);
    const kept = round === this.round ? this.selected : -1;
    this.nodes = nodes;
    this.round = round;
    this.tallest = Math.max(this.tallest, frameHeight);
    this.frame.style.height = `${this.tallest}px`;
    const svg = svgElement('svg', {
      viewBox: `0 0 ${width} ${height}`, width: width * scale, height: height * scale, role: 'presentation',
    });
    const edges = svgElement('g', { class: 'edges' }, svg);
    for (const node of nodes.slice(1)) {
      const kind = `edge ${node.bonus ? 'bonus' : node.accepted ? 'accepted' : ''} ${node.after ? 'after' : ''}`;
      svgElement('path', {
        d: edgePath(nodes[node.parent], node), class: kind, 'stroke-width': (0.8 + 2.2 * Math.sqrt(node.path)).toFixed(2),
      }, edges);
    }
    for (const node of nodes) this._drawNode(svg, node);
    this.frame.replaceChildren(svg);
    // As a tree, the frame gets the arrow keys from screen readers too.
    this.frame.setAttribute('role', 'tree');
    this.svg = svg;
    this._select(kept);
    this._markRest();
  }

  // Fades the right edge while there is more of the tree to the right. Reading the sizes at once would cost a layout
  // of the page, which the next frame makes anyway.
  _markRest() {
    if (!this.wide && !this.frame.classList.contains('more')) return;
    cancelAnimationFrame(this.marking);
    this.marking = requestAnimationFrame(() => this._fade());
  }

  _fade() {
    const { scrollLeft, clientWidth, scrollWidth } = this.frame;
    this.frame.classList.toggle('more', scrollLeft + clientWidth < scrollWidth - 2);
  }

  _drawNode(svg, node) {
    const kind = node.index === 0 ? 'root' : node.bonus ? (node.plain ? 'plain' : 'bonus')
      : node.accepted ? `accepted ${depthClass(node.depth)}` : 'rejected';
    const group = svgElement('g', {
      class: `node ${kind}${node.after ? ' after' : ''}`, 'data-index': node.index, transform: `translate(${node.x} ${node.y})`,
      id: `node-${node.index}`, role: 'treeitem', 'aria-level': node.depth + 1, 'aria-selected': 'false', 'aria-label': describeNode(node),
    }, svg);
    svgElement('rect', { width: node.width, height: PILL_HEIGHT, rx: 6 }, group);
    const text = svgElement('text', { x: node.width / 2, y: PILL_HEIGHT / 2 + 4 }, group);
    text.textContent = label(node.text);
  }

  _hover(event) {
    const group = event.target.closest?.('.node');
    if (group) this._show(Number(group.dataset.index));
  }

  _click(event) {
    const group = event.target.closest?.('.node');
    this.pointed = false;
    this._select(group ? Number(group.dataset.index) : -1);
  }

  _show(index) {
    this.detail.textContent = this.nodes[index] ? describeNode(this.nodes[index]) : '';
  }

  _select(index) {
    this._mark(this.selected, false);
    this.selected = index;
    this._show(index);
    const group = this._mark(index, true);
    if (group) this.frame.setAttribute('aria-activedescendant', group.id);
    else this.frame.removeAttribute('aria-activedescendant');
    group?.scrollIntoView({ block: 'nearest', inline: 'nearest' });
  }

  _mark(index, selected) {
    const group = this.svg?.querySelector(`[data-index="${index}"]`);
    group?.classList.toggle('selected', selected);
    group?.setAttribute('aria-selected', String(selected));
    return group;
  }

  _key(event) {
    if (!event.key.startsWith('Arrow') || !this.nodes.length) return;
    event.preventDefault();
    const node = this.nodes[this.selected];
    if (!node) {
      this._select(0);
      return;
    }
    const column = this.nodes.filter((one) => one.depth === node.depth).sort((a, b) => a.y - b.y);
    const next = {
      ArrowRight: node.children[0],
      ArrowLeft: this.nodes[node.parent],
      ArrowDown: column[column.indexOf(node) + 1],
      ArrowUp: column[column.indexOf(node) - 1],
    }[event.key];
    if (next) this._select(next.index);
  }
}
