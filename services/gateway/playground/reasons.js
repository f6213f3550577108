// The words for states of the draft, for the controller's decisions and for rounds without a draft. `outrider top`
// uses the same words (services/terminal/reasons.py), and a test compares the lists.

export const DRAFT_STATES = {
  none: 'none',
  connecting: 'connecting',
  on: 'ready',
  late: 'slow',
  draft_down: 'does not answer',
};

export const DECISIONS = {
  pays: 'drafting is estimated to be faster than plain decoding',
  does_not_pay: 'plain decoding is estimated to be faster than drafting',
  probing: 'it is trying another choice in order to measure its speed',
  unmeasured: 'it has not measured enough rounds to compare the speeds',
  draft_away: 'the draft is unavailable at the moment',
  idle: 'there has been no request in mode “auto” yet',
};

export const FALLBACKS = {
  awaited: 'the tree had not arrived yet',
  backing_off: 'the draft had not answered, and the target waited before it asked again',
  bad_tree: 'the draft sent an invalid tree',
  budget: 'the round had no room for more draft tokens',
  connecting: 'the target was still connecting to the draft',
  controller: 'the controller chose plain decoding',
  draft_down: 'the draft was down',
  empty_tree: 'the draft proposed no token',
  forbidden: 'the form of the answer allowed none of the drafted tokens',
  half_open: 'the draft had failed before and was being tested with one request',
  joined: 'the request joined a round whose trees were already requested',
  kv_full: 'the KV cache of the draft was full',
  late: 'the draft answered too late',
  length: 'the answer was too short',
  misfit: 'the draft does not fit this target',
  no_draft: 'there is no draft',
  no_features: 'the hidden states that the draft needs were missing',
  no_proposal: 'the draft proposed no tree',
  not_followed: 'the draft did not follow this request',
  rejected: 'the draft refused this request',
  resync: 'the draft had to receive this request again',
  shape_above_draft: 'the tree was larger than the draft can propose',
  user: 'the request turned drafting off',
  warming: 'the draft was still preparing',
};

const wordsFor = (words, code) => words[code] ?? code.replaceAll('_', ' ');

export const draftState = (state) => wordsFor(DRAFT_STATES, state);

export const whyDecided = (auto) => wordsFor(DECISIONS, auto.reason);

// Also takes the reason of a decision. If drafting pays, the controller can still choose no draft for one request.
export function whyNoDraft(reason) {
  return reason === 'pays' ? FALLBACKS.controller : wordsFor({ ...DECISIONS, ...FALLBACKS }, reason);
}

// What the controller chose for the requests in mode “auto” of a round, such as “1 × chain of 3, 2 × plain decoding”.
export function chosen({ shapes, plain_rows: plain }) {
  const parts = shapes.map(({ depth, topk, max_nodes: nodes, rows }) => (
    `${rows} × ${topk === 1 ? `chain of ${depth}` : `tree of depth ${depth}, topk ${topk}, ${nodes} nodes`}`));
  if (plain || !parts.length) parts.push(plain ? `${plain} × plain decoding` : 'nothing yet');
  return parts.join(', ');
}
