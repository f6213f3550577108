// Shows the numbers of a record: speed, accept length, times, the histogram by depth, and the chosen shapes.

import { chosen, whyDecided, whyNoDraft } from './reasons.js';
import { depthClass } from './tokens.js';

// Reasons that concern all rounds without a draft.
const CHOICES = ['controller', 'length', 'user'];

function set(id, text) {
  const element = document.getElementById(id);
  if (element.textContent !== text) element.textContent = text;
}

const fixed = (value, digits) => (value ? value.toFixed(digits) : '–');

// Shows the numbers of `record`. In a race, a note explains why the controller's estimate differs from the result.
export function showNumbers(record, raced = false) {
  const { totals } = record;
  set('n-speed', fixed(record.speed, record.speed < 100 ? 1 : 0));
  set('n-accept', fixed(record.acceptLength, 2));
  set('brief', record.numTokens ? `${fixed(record.speed, record.speed < 100 ? 1 : 0)} tokens/s · accept length ${fixed(record.acceptLength, 2)}` : '');
  set('n-tokens', record.numTokens ? String(record.numTokens) : '–');
  set('n-rounds', record.numRounds ? `${totals.draftingRounds} of ${record.numRounds}` : '–');
  const draftMs = totals.draftingRounds ? totals.draftMs / totals.draftingRounds : 0;
  const verifyMs = record.numRounds ? totals.verifyMs / record.numRounds : 0;
  set('n-draft', draftMs ? `${draftMs.toFixed(1)} ms` : '–');
  set('n-verify', verifyMs ? `${verifyMs.toFixed(1)} ms` : '–');
  const share = totals.draftMs + totals.verifyMs ? totals.draftMs / (totals.draftMs + totals.verifyMs) : 0;
  document.getElementById('split-draft').style.width = `${(share * 100).toFixed(1)}%`;
  showHistogram(record);
  showChoices(record, raced);
}

function showHistogram({ histogram }) {
  const chart = document.getElementById('histogram');
  const deepest = Math.max(5, histogram.length - 1);
  while (chart.children.length <= deepest) {
    const bar = document.createElement('div');
    bar.className = 'bar';
    bar.append(document.createElement('b'), document.createElement('i'), document.createElement('span'));
    bar.lastChild.textContent = String(chart.children.length);
    bar.children[1].className = chart.children.length ? depthClass(chart.children.length) : 'd0';
    chart.append(bar);
  }
  while (chart.children.length > deepest + 1) chart.lastChild.remove();
  const most = Math.max(1, ...histogram.filter(Boolean));
  const said = [];
  [...chart.children].forEach((bar, depth) => {
    const count = histogram[depth] ?? 0;
    bar.children[1].style.height = `${((count / most) * 100).toFixed(1)}%`;
    const label = count ? String(count) : '';
    if (bar.children[0].textContent !== label) bar.children[0].textContent = label;
    if (count) said.push(`${depth} accepted: ${count}`);
  });
  chart.setAttribute('aria-label', said.length ? `Rounds by accepted tokens. ${said.join(', ')}` : 'No rounds yet');
}

function showChoices(record, raced) {
  const { shapes, settings, mode, speculation } = record;
  const list = [...shapes].sort((a, b) => b[1] - a[1]).slice(0, 4)
    .map(([shape, rounds]) => `${shape}: ${rounds} ${rounds === 1 ? 'round' : 'rounds'}`);
  const why = [];
  const named = settings.speculation?.mode ? `Mode “${mode}”` : `Mode “${mode}”, the default of the server,`;
  if (mode === 'on') why.push(`${named} requests the same tree in every round.`);
  if (mode === 'off') why.push(`${named} decodes plainly.`);
  if (mode === 'auto') why.push(`${named} lets the controller choose the shape of each round.`, ...decisionsOf(record));
  if (speculation?.speedup_estimate) {
    why.push(`On this server, recent drafted rounds gave ${speculation.speedup_estimate.toFixed(2)} times the tokens per `
      + 'second of plain decoding.');
    if (raced) {
      why.push('The race compares two answers only, with their prompts and with all other work of the computer. '
        + 'Its result can therefore be higher or lower.');
    }
  }
  if (mode !== 'off') why.push(...missingDrafts(record));
  set('choices', list.length ? list.join('\n') : 'No rounds yet.');
  set('choices-why', list.length ? why.join(' ') : '');
}

const counted = (counts, words) => [...counts].sort((a, b) => b[1] - a[1])
  .map(([reason, rounds]) => `${words(reason)} (${rounds} ${rounds === 1 ? 'round' : 'rounds'})`).join('; ');

// Why the rounds of an answer drafted, and the controller's last decision on this server.
function decisionsOf({ auto, reasons }) {
  const why = [];
  if (reasons.drafted.size) why.push(`Why rounds drafted: ${counted(reasons.drafted, (reason) => whyDecided({ reason }))}.`);
  if (auto) why.push(`Last decision: ${chosen(auto)}, because ${whyDecided(auto)}.`);
  return why;
}

// How many rounds had no draft, and why. In traces of older servers, only the report of the answer names a reason.
function missingDrafts({ numRounds, totals, speculation, mode, reasons }) {
  const missing = numRounds - totals.draftingRounds;
  if (!missing) return [];
  const count = `${missing} of ${numRounds} rounds had no draft`;
  if (reasons.missing.size) {
    const known = [...reasons.missing.values()].reduce((sum, rounds) => sum + rounds, 0);
    const rest = missing - known;
    return [`${count}: ${counted(reasons.missing, whyNoDraft)}${rest ? `; without a reason (${rest} ${rest === 1 ? 'round' : 'rounds'})` : ''}.`];
  }
  if (!speculation) return [];
  const reason = speculation.fallback_reason ?? (mode === 'auto' ? 'controller' : null);
  const where = CHOICES.includes(reason) ? 'In these rounds' : 'In at least one of them';
  return [`${count}.`, ...(reason ? [`${where}, ${whyNoDraft(reason)}.`] : [])];
}
