// Asks for the decision of the server's controller at the end of an answer in mode “auto”.

import { getJson } from './api.js';

const LONGEST_MS = 1000;

// Notes the controller's last decision in `record`. Without this information, the answer is complete all the same.
export async function noteDecision(record) {
  if (record.mode !== 'auto') return;
  const late = new Promise((resolve) => { setTimeout(resolve, LONGEST_MS, null); });
  const info = await Promise.race([getJson('/server_info').catch(() => null), late]);
  record.auto = info?.internal_states?.[0]?.auto ?? null;
}
