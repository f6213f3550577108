// The chat: its questions and answers, their summaries, and the messages that the model receives.

import { FittedChat } from './context.js';
import { EndFollower } from './follow.js';
import { Record } from './record.js';
import { runChat } from './run.js';
import { appendPieces } from './tokens.js';

const $ = (id) => document.getElementById(id);

export class Chat {
  // `onSelect(record, element)` shows the numbers and the trees of an answer.
  constructor(onSelect) {
    this.onSelect = onSelect;
    this.turns = [];
    this.welcome = $('welcome');
    this.end = new EndFollower($('log'));
    this.line = document.createElement('p');
    this.line.className = 'dropped quiet';
    this.line.textContent = 'The context is full: the model no longer sees the messages above this line.';
  }

  // Asks the model. If the context is full, the oldest turns are dropped from what the model receives, once it
  // answers. `onParts(record, parts)` sees the parts of the answer. Returns its record, which is null if there was no
  // answer, and a note about the context. Without an answer, and after an error without any text, the question is
  // not part of the chat.
  async ask(question, { options, system }, served, signal, onParts) {
    // Opened traces are not part of the conversation.
    const earlier = this.turns.filter((turn) => !turn.opened && !turn.dropped);
    const chat = new FittedChat(earlier, (turns) => [
      ...(system ? [{ role: 'system', content: system }] : []),
      ...turns.flatMap((one) => [
        { role: 'user', content: one.question }, { role: 'assistant', content: one.record.answer }]),
      { role: 'user', content: question },
    ], options, served);
    await chat.fit(signal);
    const record = new Record(chat.messages, chat.options, served);
    const turn = this._add({ question, record, opened: false, dropped: false });
    this.onSelect(record, turn.element);
    const log = $('log');
    log.setAttribute('aria-busy', 'true');
    try {
      await this._run(chat, record, signal, (parts) => {
        this._forget(chat.dropped);
        appendPieces(turn.element, parts.flatMap((part) => part.pieces));
        onParts(record, parts);
      });
    } finally {
      log.setAttribute('aria-busy', 'false');
      if (this.turns.includes(turn)) this._finish(turn);
    }
    return { record: record.parts.length ? record : null, note: chat.note };
  }

  async _run(chat, record, signal, onParts) {
    for (;;) {
      [record.messages, record.settings] = [chat.messages, chat.options];
      try {
        await runChat(record, { model: record.model, messages: record.messages, ...chat.options }, signal, onParts);
        return;
      } catch (error) {
        if (record.parts.length || !chat.retry(error)) throw error;
      }
    }
  }

  // Marks turns that the model no longer sees, and draws a line below them.
  _forget(turns) {
    for (const turn of turns) turn.dropped = true;
    const last = this.turns.findLast((turn) => turn.dropped);
    if (!last) return;
    const after = last.articles.at(-1);
    if (after.nextElementSibling !== this.line) after.after(this.line);
  }

  // Adds a recorded answer.
  add({ question, record, opened, dropped = false }) {
    const turn = this._add({ question, record, opened, dropped });
    appendPieces(turn.element, record.parts.flatMap((part) => part.pieces));
    this._finish(turn);
    this._forget([]);
  }

  clear() {
    this.turns = [];
    $('log').replaceChildren(this.welcome);
  }

  // All turns with some text, as plain objects.
  toObject() {
    return this.turns.filter(({ record }) => record.parts.length)
      .map(({ question, record, opened, dropped }) => ({ question, opened, dropped, record: record.toObject() }));
  }

  _add(turn) {
    this.welcome.remove();
    const asked = message('You', 'user', turn.question);
    const answer = message('Model', 'assistant', '');
    const added = { ...turn, articles: [asked, answer], element: answer.lastElementChild };
    $('log').append(asked, answer);
    this.end.start(answer);
    this.turns.push(added);
    return added;
  }

  _finish(turn) {
    const { record, element } = turn;
    if (!record.parts.length) {
      this.turns.splice(this.turns.indexOf(turn), 1);
      for (const article of turn.articles) article.remove();
      if (!this.turns.length) this.clear();
      return;
    }
    const footer = document.createElement('p');
    footer.className = 'summary';
    const button = document.createElement('button');
    button.type = 'button';
    button.className = 'link';
    button.textContent = 'Show its rounds';
    button.addEventListener('click', () => this.onSelect(record, element));
    footer.append(`${summary(record)} · `, button);
    element.after(footer);
    this.onSelect(record, element);
  }
}

function message(name, role, text) {
  const article = document.createElement('article');
  article.className = `message ${role}`;
  const who = document.createElement('p');
  who.className = 'who';
  who.textContent = name;
  const body = document.createElement('div');
  body.className = 'text';
  body.textContent = text;
  article.append(who, body);
  return article;
}

export function summary(record) {
  const { numTokens, numRounds, seconds, speed, acceptLength, finishReason, totals } = record;
  const parts = [`${numTokens} ${numTokens === 1 ? 'token' : 'tokens'} in ${seconds.toFixed(2)} s`];
  if (speed) parts.push(`${speed.toFixed(0)} tokens/s after the first token`);
  if (acceptLength) {
    parts.push(`accept length ${acceptLength.toFixed(2)} over ${totals.draftingRounds} of ${numRounds} rounds`);
  }
  const end = finishReason === 'length' ? ' (cut at the token limit)' : finishReason ? '' : ' (stopped)';
  return parts.join(', ') + end;
}
