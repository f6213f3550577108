// The record of one answer: its pieces with their times, origins and rounds. It can be saved and opened again.

const FORMAT = 'outrider-trace/1';
// Events that arrive almost together are one delivery, whose time says nothing about the speed.
const SHORTEST_SECONDS = 0.02;
const PLAIN = { origin: 'plain', depth: 0, round: -1 };

// How a token came: 'plain' (one token per pass), 'draft' (at a depth of the tree) or 'bonus' (after the tree).
function originOf(round, position) {
  if (round.nodes.length < 2) return { origin: 'plain', depth: 0 };
  if (position < round.accepted.length) return { origin: 'draft', depth: position + 1 };
  return { origin: 'bonus', depth: position + 1 };
}

// Tokens per second, or 0 if the time is too short to tell.
export function speedOf(tokens, seconds) {
  return seconds >= SHORTEST_SECONDS ? tokens / seconds : 0;
}

export class Record {
  // `served` has the model's name, and the mode of speculation if the settings name none.
  constructor(messages, settings, served) {
    this.messages = messages;
    this.settings = settings;
    this.model = served.model;
    this.mode = settings.speculation?.mode ?? served.mode;
    this.parts = [];
    this.speculation = null;
    this.usage = null;
    this.seed = null;
    this.finishReason = null;
    this.numTokens = 0;
    this.numRounds = 0;
    this.totals = { drafted: 0, accepted: 0, draftMs: 0, verifyMs: 0, draftingRounds: 0 };
    this.histogram = [];
    this.shapes = new Map();
    // The last decision of the controller on this server, at the end of the answer.
    this.auto = null;
    // Number of rounds by reason: of the rounds with a draft, and of those without one.
    this.reasons = { drafted: new Map(), missing: new Map() };
    this._queue = [];
  }

  // Takes one event of the stream. Returns the new part, or null if the event has no text and no round.
  take(event, ms) {
    const choice = event.choices?.[0];
    if (event.usage) this.usage = event.usage;
    if (event.metadata) this.seed = event.metadata.seed;
    if (choice?.finish_reason) {
      this.finishReason = choice.finish_reason;
      this.speculation = event.speculation ?? null;
    }
    const round = event.speculation?.trace?.[0] ?? null;
    const reasoning = Boolean(choice?.delta?.reasoning_content);
    const text = (reasoning ? choice.delta.reasoning_content : choice?.delta?.content) ?? '';
    if (!text && !round) return null;
    const { pieces, tokens } = this._pieces(text, round);
    const part = { ms, pieces: pieces.map((piece) => ({ ...piece, reasoning })), tokens, round };
    this._add(part);
    return part;
  }

  // Colours the text by the texts of the emitted tokens. Text can arrive later than its tokens, so a queue
  // remembers whose text comes next. Text without a round counts as one token, unless the queue contains it.
  _pieces(text, round) {
    let tokens = 0;
    if (round) {
      tokens = round.emitted_text.length;
      round.emitted_text.forEach((own, position) => {
        if (own) this._queue.push({ ...originOf(round, position), round: this.numRounds, text: own });
      });
    }
    const pieces = [];
    if (!text) return { pieces, tokens };
    const at = this._queue.map((one) => one.text).join('').indexOf(text);
    if (at > 0) this._take(at);
    if (at < 0 && !round) {
      tokens = 1;
      this._queue.push({ ...PLAIN, text });
    }
    while (text) {
      const { text: own, ...origin } = this._queue[0] ?? { ...PLAIN, text };
      const size = Math.min(own.length, text.length);
      pieces.push({ text: text.slice(0, size), ...origin });
      text = text.slice(size);
      this._take(size);
    }
    return { pieces, tokens };
  }

  // Removes characters from the queue: shown ones, and marks such as <think>, which answers do not contain.
  _take(size) {
    while (size > 0 && this._queue.length) {
      const [head] = this._queue;
      const taken = Math.min(size, head.text.length);
      head.text = head.text.slice(taken);
      size -= taken;
      if (!head.text) this._queue.shift();
    }
  }

  _add(part) {
    this.parts.push(part);
    this.numTokens += part.tokens;
    const { round } = part;
    if (!round) return;
    this.numRounds += 1;
    const { totals } = this;
    totals.verifyMs += round.verify_ms ?? 0;
    const drafted = round.nodes.length - 1;
    if (drafted > 0) {
      totals.draftMs += round.draft_ms ?? 0;
      totals.draftingRounds += 1;
      totals.drafted += drafted;
      totals.accepted += round.accepted.length;
      this.histogram[round.accepted.length] = (this.histogram[round.accepted.length] ?? 0) + 1;
    }
    if (round.reason) {
      const counts = drafted > 0 ? this.reasons.drafted : this.reasons.missing;
      counts.set(round.reason, (counts.get(round.reason) ?? 0) + 1);
    }
    const shape = shapeOf(round);
    this.shapes.set(shape, (this.shapes.get(shape) ?? 0) + 1);
  }

  // The text with the reasoning.
  get text() {
    return this._join(() => true);
  }

  get answer() {
    return this._join((piece) => !piece.reasoning);
  }

  _join(chosen) {
    return this.parts.flatMap((part) => part.pieces).filter(chosen).map((piece) => piece.text).join('');
  }

  get rounds() {
    return this.parts.filter((part) => part.round).map((part) => part.round);
  }

  get seconds() {
    return this.parts.length ? this.parts.at(-1).ms / 1000 : 0;
  }

  // Seconds until the first text, which include the wait in the queue and the prompt.
  get firstSeconds() {
    return this.parts.length ? this.parts[0].ms / 1000 : 0;
  }

  // Tokens per second after the first token. 0 if there is nothing to measure.
  get speed() {
    return this.parts.length ? speedOf(this.numTokens - this.parts[0].tokens, this.seconds - this.firstSeconds) : 0;
  }

  get acceptLength() {
    const { draftingRounds, accepted } = this.totals;
    return draftingRounds ? 1 + accepted / draftingRounds : 0;
  }

  // The record as the plain object that a saved trace contains.
  toObject() {
    const { messages, settings, model, mode, parts, speculation, usage, seed, finishReason, auto } = this;
    return { format: FORMAT, model, mode, messages, settings, seed, parts, speculation, usage, finishReason, auto };
  }

  // Reads a saved trace. Throws an Error that says what is wrong with the file.
  static fromJson(text) {
    let saved;
    try {
      saved = JSON.parse(text);
    } catch {
      throw new Error('This file is not JSON.');
    }
    return Record.fromObject(saved);
  }

  static fromObject(saved) {
    if (saved?.format !== FORMAT || !Array.isArray(saved.parts) || !Array.isArray(saved.messages)) {
      throw new Error(`This file is not a trace that the playground saved (format ${FORMAT}).`);
    }
    const served = { model: String(saved.model ?? ''), mode: String(saved.mode ?? '') };
    const record = new Record(saved.messages, saved.settings ?? {}, served);
    for (const part of saved.parts) record._add(checked(part));
    const { speculation, usage, seed, finishReason } = saved;
    if (Array.isArray(saved.auto?.shapes)) record.auto = { ...saved.auto, reason: String(saved.auto.reason) };
    if (speculation) record.speculation = { ...speculation, speedup_estimate: numberOrNull(speculation.speedup_estimate) };
    return Object.assign(record, { usage, seed, finishReason });
  }
}

const numberOrNull = (value) => (Number.isFinite(value) ? value : null);

// Other programs can write traces too. A time or a probability that is missing is unknown, which is no damage.
function checked(part) {
  const { ms, tokens, pieces, round } = part;
  const valid = Number.isFinite(ms) && Number.isFinite(tokens) && Array.isArray(pieces)
    && (round === null || (Array.isArray(round.nodes) && round.nodes.length > 0 && Array.isArray(round.accepted)
      && Array.isArray(round.emitted_text) && Array.isArray(round.emitted)
      && round.accepted.every((index) => round.nodes[index])
      && round.nodes.every((node, at) => Number.isInteger(node.parent) && Number.isInteger(node.depth)
        && node.depth >= 0 && (at ? node.parent >= 0 : true) && node.parent < at)));
  if (!valid) throw new Error('A round of this trace is damaged.');
  return {
    ms,
    tokens,
    round: round && {
      ...round,
      draft_ms: numberOrNull(round.draft_ms),
      verify_ms: numberOrNull(round.verify_ms),
      reason: round.reason ? String(round.reason) : '',
      nodes: round.nodes.map((node) => ({ ...node, logprob: numberOrNull(node.logprob) })),
    },
    pieces: pieces.map(({ text, origin, depth, round: number, reasoning }) => ({
      text: String(text), origin: String(origin), depth: Number(depth), round: Number(number),
      reasoning: Boolean(reasoning),
    })),
  };
}

// The shape of a round's tree, as the controller chose it.
export function shapeOf(round) {
  if (round.nodes.length < 2) return 'no draft';
  const depth = Math.max(...round.nodes.map((node) => node.depth));
  const widths = new Map();
  for (const node of round.nodes) widths.set(node.depth, (widths.get(node.depth) ?? 0) + 1);
  const widest = Math.max(...widths.values());
  return `${widest === 1 ? 'chain' : 'tree'} of depth ${depth}, ${round.nodes.length - 1} drafted`;
}
