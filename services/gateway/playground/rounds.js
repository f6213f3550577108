// The card of the draft tree: follows the live rounds, steps through recorded ones, and replays a record.

import { playParts } from './run.js';
import { TreeView, describeRound } from './tree.js';

// A tree stays for so many milliseconds. The longer the queue of waiting rounds, the shorter their trees stay.
const LONGEST_MS = 180;
const SHORTEST_MS = 100;
// All waiting rounds together should take about so many milliseconds.
const QUEUE_MS = 500;
// If more rounds than this wait, then every second one is left out.
const MOST_WAITING = 32;
// The frame gets the height of the tallest of at most so many rounds. It grows if another round is taller.
const MOST_MEASURED = 300;
const $ = (id) => document.getElementById(id);

export class RoundsCard {
  // `onReplay(parts)` draws replayed parts in the answer; null clears the answer first.
  constructor(onReplay) {
    this.view = new TreeView($('tree'), $('node-detail'));
    this.onReplay = onReplay;
    this.record = null;
    this.rounds = [];
    // Numbers of the live rounds that were not drawn yet, and the number of rounds left out.
    this.waiting = [];
    this.leftOut = 0;
    this.drawnAt = 0;
    this.timer = 0;
    this.stopPlaying = null;
    $('round').addEventListener('input', () => this.jump(Number($('round').value)));
    $('play').addEventListener('click', () => (this.stopPlaying ? this.finishReplay() : this.play()));
    this.view.clear('Send a prompt to see how each round drafts a tree.');
  }

  // Follows a record from now on. If its live rounds still wait, they are drawn first.
  follow(record) {
    this.stop();
    if (record === this.record && (this.waiting.length || this.leftOut)) {
      this.complete();
      return;
    }
    this.skipWaiting();
    this.leftOut = 0;
    $('left-out').hidden = true;
    this.record = record;
    this.rounds = record.rounds;
    $('round').disabled = $('play').disabled = true;
    this.view.clear('Waiting for the first round.');
    if (this.rounds.length) this.complete();
    else $('round-caption').textContent = 'No round yet';
  }

  // Takes live parts. Each of their rounds is drawn in its turn, unless they come too fast.
  add(parts) {
    for (const part of parts) {
      if (part.round) this.waiting.push(this.rounds.push(part.round) - 1);
    }
    while (this.waiting.length > MOST_WAITING) {
      const newest = this.waiting.length - 1;
      this.waiting = this.waiting.filter((_, at) => (newest - at) % 2 === 0);
      this.leftOut += newest + 1 - this.waiting.length;
    }
    this._drawNext();
  }

  // Draws the next waiting round once the shown tree has had its time.
  _drawNext() {
    if (this.timer || !this.waiting.length) return;
    const stay = Math.max(SHORTEST_MS, Math.min(LONGEST_MS, QUEUE_MS / this.waiting.length));
    const left = this.drawnAt + stay - performance.now();
    if (left > 0) {
      this.timer = setTimeout(() => {
        this.frame = requestAnimationFrame(() => {
          this.timer = 0;
          this._drawOne();
        });
      }, left);
    } else this._drawOne();
  }

  _drawOne() {
    this.drawnAt = performance.now();
    this.show(this.waiting.shift());
    if (this.waiting.length) this._drawNext();
    else if (!$('round').disabled) this._measure();
  }

  // Draws no more live rounds.
  skipWaiting() {
    clearTimeout(this.timer);
    cancelAnimationFrame(this.frame);
    this.timer = 0;
    this.waiting = [];
  }

  // The record is complete: its rounds can be stepped through. Rounds that still wait are drawn first.
  complete() {
    if (!this.rounds.length) {
      this.view.clear('This answer has no rounds: it has at most one token.');
      return;
    }
    $('round').disabled = $('play').disabled = false;
    const count = this.rounds.length;
    $('left-out').hidden = !this.leftOut;
    $('left-out').textContent = `The rounds came too fast to draw each one: ${count - this.leftOut} of ${count} were drawn. `
      + 'The slider shows every one of them.';
    if (this.waiting.length) return;
    this._measure();
    this.show(count - 1);
  }

  // Gives the frame the height of the tallest tree.
  _measure() {
    const step = Math.ceil(this.rounds.length / MOST_MEASURED);
    this.view.reserve(this.rounds.filter((_, index) => index % step === 0));
  }

  // Shows a round that the user has chosen.
  jump(index) {
    this.stop();
    this.skipWaiting();
    this.show(index);
  }

  show(index) {
    const round = this.rounds[index];
    if (!round) return;
    this.view.draw(round);
    const slider = $('round');
    slider.max = String(this.rounds.length - 1);
    slider.value = String(index);
    const caption = `Round ${index + 1} of ${this.rounds.length}: ${describeRound(round)}`;
    slider.setAttribute('aria-valuetext', caption);
    $('round-caption').textContent = caption;
  }

  play() {
    this.skipWaiting();
    this.onReplay(null);
    let shown = -1;
    this.stopPlaying = playParts([this.record], Number($('pace').value), (_, parts) => {
      this.onReplay(parts);
      shown += parts.filter((part) => part.round).length;
      this.show(Math.max(0, shown));
    }, () => this.stop());
    this._nameButton();
  }

  // Ends a replay and shows the whole answer.
  finishReplay() {
    if (!this.stopPlaying) return;
    this.stop();
    this.onReplay(null);
    this.onReplay(this.record.parts);
  }

  stop() {
    this.stopPlaying?.();
    this.stopPlaying = null;
    this._nameButton();
  }

  _nameButton() {
    $('play').textContent = this.stopPlaying ? 'Stop' : 'Replay';
  }
}
