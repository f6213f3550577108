// Runs one streamed request and hands its parts over in batches, so that fast streams stay smooth.

import { streamChat } from './api.js';
import { noteDecision } from './decisions.js';

// Text and numbers that change some 8 times a second look continuous. Every batch costs a layout and a paint.
const MS_BETWEEN_BATCHES = 115;

export async function runChat(record, body, signal, onParts) {
  const started = performance.now();
  let batch = [];
  let timer = 0;
  let flushedAt = 0;
  const flush = () => {
    timer = 0;
    flushedAt = performance.now();
    const parts = batch;
    batch = [];
    if (parts.length) onParts(parts);
  };
  let ended = false;
  const flushOnce = () => { if (!ended) flush(); };
  try {
    for await (const event of streamChat(body, signal)) {
      const part = record.take(event, performance.now() - started);
      if (!part) continue;
      batch.push(part);
      const wait = MS_BETWEEN_BATCHES - (performance.now() - flushedAt);
      timer ||= setTimeout(() => requestAnimationFrame(flushOnce), Math.max(0, wait));
    }
    await noteDecision(record);
  } finally {
    clearTimeout(timer);
    ended = true;
    flush();
  }
}

// Plays the parts of records again with their recorded times. Returns a function that stops the replay.
export function playParts(records, speed, onParts, onEnd) {
  const next = records.map(() => 0);
  const started = performance.now();
  let frame = requestAnimationFrame(function step(now) {
    const ms = (now - started) * speed;
    records.forEach((record, index) => {
      const from = next[index];
      while (next[index] < record.parts.length && record.parts[next[index]].ms <= ms) next[index] += 1;
      if (next[index] > from) onParts(index, record.parts.slice(from, next[index]), next[index]);
    });
    if (records.every((record, index) => next[index] >= record.parts.length)) onEnd();
    else frame = requestAnimationFrame(step);
  });
  return () => cancelAnimationFrame(frame);
}
