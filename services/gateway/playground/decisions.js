// Follows the decisions of the server's controller while an answer in mode “auto” arrives.

import { getJson } from './api.js';

const MS_BETWEEN_LOOKS = 500;
const LONGEST_MS = 1000;

// Notes the controller's decisions in `record`. Returns {end, stop}. `end` looks a last time and can be awaited.
export function followDecisions(record, options) {
  const mode = options.speculation?.mode ?? 'auto';
  if (mode !== 'auto') return { end: async () => {}, stop: () => {} };
  const look = async () => {
    // Without this information, the answer is complete all the same.
    const info = await getJson('/server_info').catch(() => null);
    const auto = info?.internal_states?.[0]?.auto;
    if (auto) record.noteDecision(auto);
  };
  const timer = setInterval(look, MS_BETWEEN_LOOKS);
  const stop = () => clearInterval(timer);
  const end = async () => {
    stop();
    await Promise.race([look(), new Promise((resolve) => { setTimeout(resolve, LONGEST_MS); })]);
  };
  return { end, stop };
}
