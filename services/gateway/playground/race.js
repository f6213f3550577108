// The race: the same prompt and seed with speculation and plain, and whether both texts are equal.

import { Record } from './record.js';
import { playParts, runChat } from './run.js';
import { appendPieces } from './tokens.js';

const $ = (id) => document.getElementById(id);

class Lane {
  constructor(name) {
    this.name = name;
    this.text = $(`${name}-text`);
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
    $(`${this.name}-speed`).textContent = '–';
    $(`${this.name}-bar`).value = 0;
  }

  add(parts, most) {
    appendPieces(this.text, parts.flatMap((part) => part.pieces));
    for (const part of parts) this.tokens += part.tokens;
    const seconds = (parts.at(-1).ms - this.record.parts[0].ms) / 1000;
    const counted = this.tokens - this.record.parts[0].tokens;
    if (seconds > 0) $(`${this.name}-speed`).textContent = (counted / seconds).toFixed(0);
    $(`${this.name}-bar`).value = Math.min(1, this.tokens / most);
    this.text.scrollTop = this.text.scrollHeight;
  }

  finish() {
    $(`${this.name}-bar`).value = 1;
    const { numTokens, seconds } = this.record;
    $(`${this.name}-note`).textContent = `${numTokens} tokens in ${seconds.toFixed(2)} s`;
  }
}

export class Race {
  constructor() {
    this.lanes = [new Lane('fast'), new Lane('slow')];
    this.stopReplay = null;
    $('race-replay').addEventListener('click', () => this.replay());
  }

  // Runs both requests, one after the other or together. `onParts(record, parts)` sees the parts of the first.
  async run(body, model, signal, onStart, onParts) {
    this.stopReplay?.();
    $('race-result').textContent = '';
    $('race-replay').disabled = true;
    const together = $('together').checked;
    const runs = this.lanes.map((lane, index) => {
      const speculation = index ? { mode: 'off', trace: true } : body.speculation;
      const own = { ...body, speculation };
      const { messages, ...settings } = own;
      const record = new Record(messages, settings, model);
      lane.start(record, index && !together ? 'waits for its turn' : 'running');
      if (!index) onStart(record);
      return async () => {
        $(`${lane.name}-note`).textContent = 'running';
        await runChat(record, own, signal, (parts) => {
          lane.add(parts, body.max_tokens ?? 512);
          if (!index) onParts(parts);
        });
        lane.finish();
      };
    });
    if (together) await Promise.all(runs.map((run) => run()));
    else for (const run of runs) await run();
    this.judge();
    $('race-replay').disabled = false;
  }

  judge() {
    const [fast, slow] = this.lanes.map((lane) => lane.record);
    const ratio = slow.seconds / fast.seconds;
    const speed = `With speculation, the answer came ${ratio.toFixed(2)} times as fast.`;
    $('race-result').textContent = `${speed} ${compareTexts(fast.text, slow.text)}`;
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
