// The chat: its questions and answers, their summaries, and the messages that the model receives.

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
  }

  // Asks the model. `onParts(record, parts)` sees the parts of the answer. Returns its record, which is null if
  // there was no answer. In this case and after an error without any text, the question is not part of the chat.
  async ask(question, { options, system }, served, signal, onParts) {
    const messages = [...(system ? [{ role: 'system', content: system }] : []), ...this.messages(),
      { role: 'user', content: question }];
    const record = new Record(messages, options, served);
    const turn = this._add({ question, record, opened: false });
    this.onSelect(record, turn.element);
    const log = $('log');
    log.setAttribute('aria-busy', 'true');
    try {
      await runChat(record, { model: served.model, messages, ...options }, signal, (parts) => {
        appendPieces(turn.element, parts.flatMap((part) => part.pieces));
        onParts(record, parts);
      });
    } finally {
      log.setAttribute('aria-busy', 'false');
      if (this.turns.includes(turn)) this._finish(turn);
    }
    return record.parts.length ? record : null;
  }

  // The messages of all earlier turns. Opened traces are not part of the conversation.
  messages() {
    return this.turns.filter((turn) => !turn.opened).flatMap(({ question, record }) => [
      { role: 'user', content: question }, { role: 'assistant', content: record.answer }]);
  }

  // Adds a recorded answer.
  add({ question, record, opened }) {
    const turn = this._add({ question, record, opened });
    appendPieces(turn.element, record.parts.flatMap((part) => part.pieces));
    this._finish(turn);
  }

  clear() {
    this.turns = [];
    $('log').replaceChildren(this.welcome);
  }

  // All turns with some text, as plain objects.
  toObject() {
    return this.turns.filter(({ record }) => record.parts.length)
      .map(({ question, record, opened }) => ({ question, opened, record: record.toObject() }));
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
