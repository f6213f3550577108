// Wires the playground: connection and key, chat, race, settings, files of records, and what the tab remembers.

import { CallError, getJson, keyProblem, setKey } from './api.js';
import { Chat, summary } from './chat.js';
import { FittedChat } from './context.js';
import { showExamples } from './examples.js';
import { installHints } from './hints.js';
import { showNumbers } from './numbers.js';
import { animatedSvg, leftOut } from './picture.js';
import { followWidth, goToAnswer, showBelowAnswer } from './placement.js';
import { Race } from './race.js';
import { Record } from './record.js';
import { RoundsCard } from './rounds.js';
import { fillSettings, fitSettings, readSettings, settingsOf } from './settings.js';
import { loadState, saveState } from './store.js';
import { installTheme } from './theme.js';
import { appendPieces, copyExactly, explainTokens, forgetOrigin } from './tokens.js';

const $ = (id) => document.getElementById(id);
const unknown = { model: '', mode: '', context: 0 };
const empty = new Record([], {}, unknown);

// The model's name, the mode of requests that name none, and the length of the context in tokens.
let served = unknown;
let connecting = null;
let current = { record: empty, element: null };
let running = null;

const chat = new Chat(select);
const race = new Race();
const card = new RoundsCard((parts) => {
  if (!current.element) return;
  if (parts) appendPieces(current.element, parts.flatMap((part) => part.pieces));
  else current.element.replaceChildren();
  forgetOrigin($('origin'));
});

// Connection

async function load() {
  // A wrong key fails in one call, so the others wait.
  const [{ id, max_model_len: context = 0 }] = (await getJson('/v1/models')).data;
  const [info, openapi] = await Promise.all([getJson('/server_info'), getJson('/openapi.json').catch(() => null)]);
  served = { model: id, mode: info.speculation_mode ?? '', context };
  fitSettings($('settings'), info, openapi);
  showExamples(info.weight_version, (question) => {
    if (running) return;
    $('prompt').value = question;
    $('composer').requestSubmit();
  });
  const draft = info.speculative_algorithm ? `draft ${info.speculative_algorithm}` : 'no draft';
  $('server').textContent = `model ${served.model} · ${draft}`;
  $('key-form').hidden = true;
}

// Loads the model's name and the server's limits, and reports a failure. A later call replaces an earlier one.
async function connect() {
  const own = load();
  connecting = own;
  try {
    await own;
  } catch (error) {
    if (connecting !== own) return;
    $('server').textContent = 'not connected';
    connecting = null;
    report(error);
  }
}

// Returns when the name of the model is known.
async function connected(signal) {
  if (served.model) return;
  say('Waiting for the name of the model.');
  if (!connecting) connect();
  await Promise.race([connecting, new Promise((_, reject) => {
    signal.addEventListener('abort', () => reject(signal.reason));
  })]);
  say('');
}

function report(error) {
  if (error instanceof CallError && error.status === 401) {
    $('key-form').hidden = false;
    $('key').focus();
    say(keyProblem());
  } else {
    say(error.message || String(error), true);
  }
}

function say(text, isError = false) {
  $('message').textContent = text;
  $('message').classList.toggle('error', isError);
}

$('key-form').addEventListener('submit', (event) => {
  event.preventDefault();
  setKey($('key').value);
  say('');
  connect();
});

// Chat and race

function select(record, element, raced = false) {
  current = { record, element };
  forgetOrigin($('origin'));
  showBelowAnswer(record !== empty);
  card.follow(record);
  showNumbers(record, raced);
  $('save').disabled = $('save-svg').disabled = !record.numRounds;
  // A race has two records, and a file contains one of them.
  const lane = !raced ? '' : record === race.lanes[1].record ? ' of plain decoding' : ' of the lane with speculation';
  $('save').textContent = `Save trace${lane}`;
  $('save-svg').textContent = lane ? `Save SVG${lane}` : 'Save as SVG';
}

async function chatOnce(prompt, settings, signal) {
  const { record, note } = await chat.ask(prompt, settings, served, signal, (shown, parts) => {
    if (current.record !== shown) return;
    card.add(parts);
    showNumbers(shown);
  });
  say(`${record ? `The answer has ${record.numTokens} tokens.` : 'The answer is empty.'} ${note}`.trim());
}

async function raceOnce(prompt, { options, system }, signal) {
  const messages = [...(system ? [{ role: 'system', content: system }] : []), { role: 'user', content: prompt }];
  const fitted = new FittedChat([], () => messages, options, served);
  await fitted.fit(signal);
  let first = empty;
  const run = race.run({ messages, ...fitted.options }, served, signal, (record) => {
    first = record;
    select(record, null, true);
  }, (parts) => {
    if (current.record !== first) return;
    card.add(parts);
    showNumbers(first, true);
  });
  // The lanes are empty now.
  forgetOrigin($('origin'));
  await run;
  select(first, $('fast-text'), true);
  say(fitted.note);
}

$('composer').addEventListener('submit', async (event) => {
  event.preventDefault();
  const prompt = $('prompt').value.trim();
  if (running || !prompt) return;
  let settings;
  try {
    settings = readSettings($('settings'));
  } catch (error) {
    say(error.message, true);
    return;
  }
  const own = new AbortController();
  running = own;
  setBusy(true);
  goToAnswer();
  say('');
  $('prompt').value = '';
  let failure = null;
  try {
    await connected(own.signal);
    await (racing() ? raceOnce : chatOnce)(prompt, settings, own.signal);
  } catch (error) {
    failure = error;
    // In a race, the other request may still run.
    own.abort();
  }
  running = null;
  setBusy(false);
  if (failure) {
    $('prompt').value ||= prompt;
    // The server may have been started again with another model.
    if (failure.status === 404) [served, connecting] = [unknown, null];
    if (failure.name === 'AbortError') say('Stopped.');
    else report(failure);
  }
  remember();
});

// Moves the focus only if the user has not moved it meanwhile.
function setBusy(busy) {
  const waits = [$('stop'), document.body].includes(document.activeElement);
  $('send').hidden = busy;
  $('stop').hidden = !busy;
  if (busy) $('stop').focus();
  else if (waits) $('prompt').focus();
}

$('stop').addEventListener('click', () => running?.abort());
$('prompt').addEventListener('keydown', (event) => {
  if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $('composer').requestSubmit();
  }
});
// Escape stops an answer from everywhere, unless it closes a dialog or a hint, or ends a composition.
document.addEventListener('keydown', (event) => {
  if (event.key !== 'Escape' || event.isComposing || event.defaultPrevented) return;
  if (document.querySelector('dialog[open]') || document.activeElement?.matches('.hint > button')) return;
  running?.abort();
});
$('clear').addEventListener('click', () => {
  running?.abort();
  chat.clear();
  race.clear();
  select(empty, null);
  card.view.clear('Send a prompt to see how each round drafts a tree.');
  say('The chat and the race are empty.');
  remember();
  $('prompt').focus();
});

// Chat or race

const racing = () => $('tab-race').getAttribute('aria-selected') === 'true';

function choose(tab) {
  for (const one of document.querySelectorAll('[role="tab"]')) {
    const chosen = one === tab;
    one.setAttribute('aria-selected', String(chosen));
    one.tabIndex = chosen ? 0 : -1;
    $(one.getAttribute('aria-controls')).hidden = !chosen;
  }
  $('send').textContent = racing() ? 'Race' : 'Send';
}

for (const tab of document.querySelectorAll('[role="tab"]')) {
  tab.addEventListener('click', () => choose(tab));
  tab.addEventListener('keydown', (event) => {
    if (event.key !== 'ArrowRight' && event.key !== 'ArrowLeft') return;
    const other = tab === $('tab-chat') ? $('tab-race') : $('tab-chat');
    choose(other);
    other.focus();
  });
}

// Files

function download(name, type, content) {
  const link = document.createElement('a');
  link.href = URL.createObjectURL(new Blob([content], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

$('save').addEventListener('click', () => {
  download('outrider-trace.json', 'application/json', JSON.stringify(current.record.toObject()));
});
$('save-svg').addEventListener('click', () => {
  download('outrider-trace.svg', 'image/svg+xml', animatedSvg(current.record));
  const cut = leftOut(current.record);
  say(cut ? `The picture shows the ${cut}. Save the trace to keep all of them.` : 'The picture shows all rounds.');
});
$('open').addEventListener('click', () => $('file').click());
$('file').addEventListener('change', async () => {
  const [file] = $('file').files;
  if (!file) return;
  try {
    const record = Record.fromJson(await file.text());
    choose($('tab-chat'));
    const asked = record.messages.findLast((message) => message.role === 'user');
    chat.add({ question: String(asked?.content ?? ''), record, opened: true });
    say(`Opened ${file.name}: ${summary(record)}.`);
    remember();
  } catch (error) {
    say(error.message, true);
  }
  $('file').value = '';
});

// What the tab remembers: the API key is not part of it.

function remember() {
  saveState({
    turns: chat.toObject(), race: race.toObject(), racing: racing(), together: $('together').checked,
    settings: settingsOf($('settings')), prompt: $('prompt').value,
  });
}

function recall() {
  const state = loadState();
  try {
    for (const { question, record, opened, dropped } of state.turns ?? []) {
      chat.add({
        question: String(question), record: Record.fromObject(record), opened: Boolean(opened), dropped: Boolean(dropped),
      });
    }
    const raced = (state.race ?? []).map(({ record }) => Record.fromObject(record));
    if (raced.length) race.restore(raced);
    if (state.racing && raced.length) select(raced[0], $('fast-text'), true);
  } catch {
    // The stored answers are of another version of this page.
    chat.clear();
    race.clear();
  }
  fillSettings($('settings'), state.settings ?? {});
  $('together').checked = Boolean(state.together);
  $('prompt').value ||= String(state.prompt ?? '');
  if (state.racing) choose($('tab-race'));
}

explainTokens($('log'), $('origin'), (span, round) => {
  if (current.element?.contains(span)) card.jump(round);
});
// A token of a finished race shows the rounds of its own lane.
for (const [lane, element] of [$('fast-text'), $('slow-text')].entries()) {
  explainTokens(element, $('origin'), (span, round) => {
    if (!race.complete) return;
    if (current.element !== element) select(race.lanes[lane].record, element, true);
    card.jump(round);
  });
}
$('race-replay').addEventListener('click', () => forgetOrigin($('origin')));
copyExactly();
installHints();
followWidth();
installTheme($('theme'));
recall();
addEventListener('pagehide', remember);
connect();
