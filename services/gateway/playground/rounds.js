// The card of the draft tree: follows the live rounds, steps through recorded ones, and replays a record.

import { playParts } from './run.js';
import { TreeView, describeRound } from './tree.js';

const MS_BETWEEN_TREES = 180;
// The frame gets the height of the tallest of at most so many rounds. It grows if another round is taller.
const MOST_MEASURED = 300;
const $ = (id) => document.getElementById(id);

export class RoundsCard {
  // `onReplay(parts)` draws replayed parts in the answer; null clears the answer first.
  constructor(onReplay) {
    this.view = new TreeView($('tree'), $('node-detail'));
    this.onReplay = onReplay;
    this.record = null;
    this.drawnAt = 0;
    this.stopPlaying = null;
    $('round').addEventListener('input', () => { this.stop(); this.show(Number($('round').value)); });
    $('play').addEventListener('click', () => (this.stopPlaying ? this.finishReplay() : this.play()));
    this.view.clear('Send a prompt to see how each round drafts a tree.');
  }

  // Follows a record from now on.
  follow(record) {
    this.stop();
    this.record = record;
    this.rounds = record.rounds;
    $('round').disabled = $('play').disabled = true;
    this.view.clear('Waiting for the first round.');
    if (this.rounds.length) this.settle();
    else $('round-caption').textContent = 'No round yet';
  }

  // Takes live parts. Draws at most some 5 trees per second, because more cannot be read.
  add(parts) {
    for (const part of parts) if (part.round) this.rounds.push(part.round);
    const now = performance.now();
    if (this.rounds.length && now - this.drawnAt > MS_BETWEEN_TREES) {
      this.drawnAt = now;
      this.show(this.rounds.length - 1);
    }
  }

  // The record is complete: its rounds can be stepped through.
  settle() {
    if (!this.rounds.length) {
      this.view.clear('This answer has no rounds: it has at most one token.');
      return;
    }
    $('round').disabled = $('play').disabled = false;
    const step = Math.ceil(this.rounds.length / MOST_MEASURED);
    this.view.reserve(this.rounds.filter((_, index) => index % step === 0));
    this.show(this.rounds.length - 1);
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
