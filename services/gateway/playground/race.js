// The race: the same prompt and seed with speculation and plain, and whether both texts are equal.

import { EndFollower } from './follow.js';
import { Record, speedOf } from './record.js';
import { playParts, runChat } from './run.js';
import { appendPieces } from './tokens.js';

const INSTEAD_OF_OFF = 'Mode “off” has nothing to race against, so the first lane runs in mode “auto”.';
const $ = (id) => document.getElementById(id);

// A race in mode “off” would compare plain decoding with itself. Its first lane therefore runs in mode “auto”.
function drafting(speculation, replaced) {
  return replaced ? { ...speculation, mode: 'auto' } : speculation;
}

class Lane {
  constructor(name) {
    this.name = name;
    this.text = $(`${name}-text`);
    this.end = new EndFollower(this.text);
    this.record = null;
    this.tokens = 0;
  }

  start(record, note) {
    this.record = record;
    this.reset();
    $(`${this.name}-note`).textContent = note;
  }

  reset() {
    this.tokens = 0;
    this.text.replaceChildren();
    this.end.start(null);
    $(`${this.name}-speed`).textContent = '–';
    $(`${this.name}-bar`).value = 0;
  }

  add(parts, most) {
    appendPieces(this.text, parts.flatMap((part) => part.pieces));
    for (const part of parts) this.tokens += part.tokens;
    const [first] = this.record.parts;
    const speed = speedOf(this.tokens - first.tokens, (parts.at(-1).ms - first.ms) / 1000);
    if (speed) $(`${this.name}-speed`).textContent = speed.toFixed(0);
    $(`${this.name}-bar`).value = Math.min(1, this.tokens / most);
    this.end.watch(this.text.lastElementChild);
  }

  finish() {
    $(`${this.name}-bar`).value = 1;
    const { numTokens, seconds, firstSeconds } = this.record;
    $(`${this.name}-note`).textContent = `${numTokens} tokens in ${seconds.toFixed(2)} s, the first after ${firstSeconds.toFixed(2)} s`;
  }

  // The race ended early.
  stop() {
    if (this.record) $(`${this.name}-note`).textContent = 'stopped';
  }

  clear() {
    this.record = null;
    this.reset();
    $(`${this.name}-note`).textContent = 'ready';
  }
}

export class Race {
  constructor() {
    this.lanes = [new Lane('fast'), new Lane('slow')];
    this.stopReplay = null;
    // Whether both lanes have a finished record.
    this.complete = false;
    // Whether the first lane ran in mode “auto” instead of “off”.
    this.replaced = false;
    $('race-replay').addEventListener('click', () => this.replay());
  }

  // Runs both requests, one after the other or together. `onParts(record, parts)` sees the parts of the first.
  async run(body, served, signal, onStart, onParts) {
    this.stopReplay?.();
    this.replaced = (body.speculation?.mode ?? served.mode) === 'off';
    $('race-result').textContent = this.replaced ? INSTEAD_OF_OFF : '';
    $('race-replay').disabled = true;
    this.complete = false;
    const together = $('together').checked;
    const runs = this.lanes.map((lane, index) => {
      const speculation = index ? { mode: 'off', trace: true } : drafting(body.speculation, this.replaced);
      const own = { model: served.model, ...body, speculation };
      const { messages, ...settings } = own;
      const record = new Record(messages, settings, served);
      lane.start(record, index && !together ? 'waits for its turn' : 'running');
      if (!index) onStart(record);
      return async () => {
        $(`${lane.name}-note`).textContent = 'running';
        await runChat(record, own, signal, (parts) => {
          // The user can clear the race while it runs.
          if (lane.record !== record) return;
          lane.add(parts, body.max_tokens ?? 512);
          if (!index) onParts(parts);
        });
        lane.finish();
      };
    });
    try {
      if (together) await Promise.all(runs.map((run) => run()));
      else for (const run of runs) await run();
    } catch (error) {
      for (const lane of this.lanes) lane.stop();
      throw error;
    }
    this._done();
  }

  _done() {
    this.complete = true;
    this.judge();
    $('race-replay').disabled = false;
  }

  judge() {
    const [fast, slow] = this.lanes.map((lane) => lane.record);
    if (!fast.parts.length || !slow.parts.length) {
      $('race-result').textContent = 'There is nothing to compare, because an answer is empty.';
      return;
    }
    const ratio = slow.seconds / fast.seconds;
    const speed = fast.totals.draftingRounds
      ? `With speculation, the whole answer came ${ratio.toFixed(2)} times as fast.`
      : 'No round of the first lane had a draft, so both lanes decoded plainly and their times say nothing about speculation.';
    const result = [...(this.replaced ? [INSTEAD_OF_OFF] : []), speed, compareTexts(fast.text, slow.text)];
    $('race-result').textContent = result.join(' ');
  }

  // Shows the two records of an earlier race.
  restore(records) {
    this.replaced = false;
    const most = Math.max(...records.map((record) => record.numTokens));
    this.lanes.forEach((lane, index) => {
      lane.start(records[index], '');
      if (records[index].parts.length) lane.add(records[index].parts, most);
      lane.finish();
    });
    this._done();
  }

  clear() {
    this.stopReplay?.();
    this.complete = false;
    for (const lane of this.lanes) lane.clear();
    $('race-result').textContent = '';
    $('race-replay').disabled = true;
  }

  // Both records of a finished race as plain objects, or an empty list.
  toObject() {
    return this.complete ? this.lanes.map((lane) => ({ record: lane.record.toObject() })) : [];
  }

  replay() {
    this.stopReplay?.();
    const records = this.lanes.map((lane) => lane.record);
    this.lanes.forEach((lane) => lane.start(lane.record, 'replay'));
    const most = Math.max(...records.map((record) => record.numTokens));
    this.stopReplay = playParts(records, 1, (index, parts, next) => {
      this.lanes[index].add(parts, most);
      if (next >= records[index].parts.length) this.lanes[index].finish();
    }, () => { this.stopReplay = null; });
  }
}

export function compareTexts(one, other) {
  if (one === other) return `Both texts are equal (${one.length} characters).`;
  let at = 0;
  while (at < one.length && one[at] === other[at]) at += 1;
  return `The texts differ from character ${at + 1} on: “${one.slice(at, at + 12)}” and “${other.slice(at, at + 12)}”.`;
}
