// Makes a chat fit into the model's context: a smaller limit for the answer first, then fewer old turns.

import { postJson } from './api.js';

const FULL = 'context_length_exceeded';
// Turns are dropped if an answer has less room than this part (1/8) of the context.
const LEAST_SHARE = 8;
// More tokens than any chat template adds to a message. A token of text has at least one byte.
const MESSAGE_TOKENS = 64;

const bytes = new TextEncoder();

function mostTokens(messages) {
  return messages.reduce((sum, one) => sum + bytes.encode(one.content).length + MESSAGE_TOKENS, 0);
}

// A chat that is about to be sent. `turns` are its earlier turns, oldest first, and `messagesOf(turns)` returns the
// messages of a request with these turns. `served` has the model's name and the length of its context.
export class FittedChat {
  constructor(turns, messagesOf, options, served) {
    this.turns = turns;
    this.messagesOf = messagesOf;
    this.options = options;
    this.served = served;
    this.dropped = [];
    this.limit = null;
  }

  get messages() {
    return this.messagesOf(this.turns);
  }

  // Drops the oldest turns and lowers the limit of new tokens, as far as needed. Enough room is `max_tokens` or an
  // eighth of the context, whichever is smaller. Throws an Error if the newest message alone is too long.
  async fit(signal) {
    const { context, model } = this.served;
    const wanted = this.options.max_tokens ?? Infinity;
    const least = Math.min(wanted, Math.max(1, Math.floor(context / LEAST_SHARE)));
    // Most chats are so short that nothing has to be counted.
    if (!context || mostTokens(this.messages) + (wanted === Infinity ? least : wanted) <= context) return;
    for (;;) {
      let count;
      try {
        ({ count } = await postJson('/tokenize', { model, messages: this.messages }, signal));
      } catch (error) {
        if (error.code === FULL && this._drop()) continue;
        // A gateway that cannot count tokens refuses the request itself if it does not fit.
        if (error.status === 404 || error.code === FULL) return;
        throw error;
      }
      const room = context - count;
      if (room < least && this._drop()) continue;
      if (room < 1) {
        throw new Error(`The prompt is too long: it has ${count} tokens. This model's context has ${context} tokens, `
          + 'and at least one of them must be new.');
      }
      if (room < wanted && wanted !== Infinity) this._limit(room);
      return;
    }
  }

  // Changes a refused request so that it may fit: without its limit, or with fewer turns. Returns whether there is
  // anything left to change. The request is then sent again.
  retry(error) {
    if (error.code !== FULL) return false;
    if (error.param === 'max_tokens' && this.options.max_tokens) {
      this._limit(undefined);
      return true;
    }
    return this._drop();
  }

  // What the user should know about a chat that did not fit, or an empty text.
  get note() {
    const { length } = this.dropped;
    const turns = length === 1 ? 'the oldest turn' : `the ${length} oldest turns`;
    return [
      length ? `The context is full: the model no longer sees ${turns}.` : '',
      this.limit ? `The context had room for ${this.limit} new tokens.` : '',
    ].filter(Boolean).join(' ');
  }

  _limit(tokens) {
    this.limit = tokens ?? null;
    this.options = { ...this.options, max_tokens: tokens };
  }

  _drop() {
    if (!this.turns.length) return false;
    this.dropped.push(this.turns[0]);
    this.turns = this.turns.slice(1);
    return true;
  }
}
