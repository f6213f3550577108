// Wires the playground: connection and key, chat, race, settings, and files of records.

import { CallError, getJson, setKey } from './api.js';
import { showNumbers } from './numbers.js';
import { animatedSvg } from './picture.js';
import { Race } from './race.js';
import { Record } from './record.js';
import { RoundsCard } from './rounds.js';
import { runChat } from './run.js';
import { fitSettings, readSettings } from './settings.js';
import { installTheme } from './theme.js';
import { appendPieces, explainTokens } from './tokens.js';

const $ = (id) => document.getElementById(id);
const empty = new Record([], {}, '');

let model = '';
let history = [];
let current = { record: empty, element: null };
let running = null;

const race = new Race();
const card = new RoundsCard((parts) => {
  if (!current.element) return;
  if (parts) appendPieces(current.element, parts.flatMap((part) => part.pieces));
  else current.element.replaceChildren();
});

// Connection

async function connect() {
  try {
    const info = await getJson('/server_info');
    const models = await getJson('/v1/models');
    const openapi = await getJson('/openapi.json').catch(() => null);
    model = models.data[0].id;
    fitSettings($('settings'), info, openapi);
    const draft = info.speculative_algorithm ? `draft ${info.speculative_algorithm}` : 'no draft';
    $('server').textContent = `${model} · ${draft}`;
    $('key-form').hidden = true;
    say('');
  } catch (error) {
    $('server').textContent = 'not connected';
    report(error);
  }
}

function report(error) {
  if (error instanceof CallError && error.status === 401) {
    $('key-form').hidden = false;
    $('key').focus();
    say('This server needs an API key.');
  } else {
    say(error.message, true);
  }
}

function say(text, isError = false) {
  $('message').textContent = text;
  $('message').classList.toggle('error', isError);
}

$('key-form').addEventListener('submit', (event) => {
  event.preventDefault();
  setKey($('key').value);
  connect();
});

// Chat

function addMessage(role, text) {
  $('log-empty')?.remove();
  const article = document.createElement('article');
  article.className = `message ${role}`;
  const name = document.createElement('p');
  name.className = 'who';
  name.textContent = role === 'user' ? 'You' : 'Model';
  const body = document.createElement('div');
  body.className = 'text';
  body.textContent = text;
  article.append(name, body);
  $('log').append(article);
  $('log').scrollTop = $('log').scrollHeight;
  return body;
}

function atBottom(element) {
  return element.scrollHeight - element.scrollTop - element.clientHeight < 60;
}

function select(record, element) {
  current = { record, element };
  card.follow(record);
  showNumbers(record);
  $('save').disabled = $('save-svg').disabled = !record.numRounds;
}

function summary(record) {
  const rate = record.speed ? ` at ${record.speed.toFixed(0)} tokens/s` : '';
  const accept = record.acceptLength ? `, accept length ${record.acceptLength.toFixed(2)}` : '';
  const cut = record.finishReason === 'length' ? ' (cut at the token limit)' : record.finishReason ? '' : ' (stopped)';
  return `${record.numTokens} tokens${rate}${accept}${cut}`;
}

function addSummary(record, element) {
  const footer = document.createElement('p');
  footer.className = 'summary';
  const button = document.createElement('button');
  button.type = 'button';
  button.className = 'link';
  button.textContent = 'Show its rounds';
  button.addEventListener('click', () => select(record, element));
  footer.append(`${summary(record)} · `, button);
  element.after(footer);
}

async function chat(prompt, { options, system }, signal) {
  history.push({ role: 'user', content: prompt });
  const messages = [...(system ? [{ role: 'system', content: system }] : []), ...history];
  addMessage('user', prompt);
  const element = addMessage('assistant', '');
  const record = new Record(messages, options, model);
  select(record, element);
  const log = $('log');
  log.setAttribute('aria-busy', 'true');
  try {
    await runChat(record, { model, messages, ...options }, signal, (parts) => {
      const follow = atBottom(log);
      appendPieces(element, parts.flatMap((part) => part.pieces));
      if (follow) log.scrollTop = log.scrollHeight;
      card.add(parts);
      showNumbers(record);
    });
  } finally {
    log.setAttribute('aria-busy', 'false');
    if (record.parts.length) {
      history.push({ role: 'assistant', content: record.answer });
      addSummary(record, element);
      select(record, element);
      say(`Answer: ${summary(record)}.`);
      log.scrollTop = log.scrollHeight;
    } else {
      history.pop();
      element.parentElement.remove();
    }
  }
}

async function raceOnce(prompt, { options, system }, signal) {
  const messages = [...(system ? [{ role: 'system', content: system }] : []), { role: 'user', content: prompt }];
  let first = empty;
  await race.run({ model, messages, ...options }, model, signal, (record) => {
    first = record;
    select(record, null);
  }, (parts) => {
    card.add(parts);
    showNumbers(first);
  });
  select(first, $('fast-text'));
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
  running = new AbortController();
  setBusy(true);
  say('');
  $('prompt').value = '';
  try {
    await (racing() ? raceOnce : chat)(prompt, settings, running.signal);
  } catch (error) {
    $('prompt').value ||= prompt;
    if (error.name === 'AbortError') say('Stopped.');
    else report(error);
  } finally {
    running = null;
    setBusy(false);
  }
});

function setBusy(busy) {
  $('send').hidden = busy;
  $('stop').hidden = !busy;
  if (busy) $('stop').focus();
  else $('prompt').focus();
}

$('stop').addEventListener('click', () => running?.abort());
$('prompt').addEventListener('keydown', (event) => {
  if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $('composer').requestSubmit();
  } else if (event.key === 'Escape') running?.abort();
});
$('clear').addEventListener('click', () => {
  running?.abort();
  history = [];
  $('log').replaceChildren();
  select(empty, null);
  card.view.clear('Send a prompt to see how each round drafts a tree.');
  say('The chat is empty.');
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

$('save').addEventListener('click', () => download('outrider-trace.json', 'application/json', current.record.toJson()));
$('save-svg').addEventListener('click', () => download('outrider-trace.svg', 'image/svg+xml', animatedSvg(current.record)));
$('open').addEventListener('click', () => $('file').click());
$('file').addEventListener('change', async () => {
  const [file] = $('file').files;
  if (!file) return;
  try {
    const record = Record.fromJson(await file.text());
    choose($('tab-chat'));
    const asked = record.messages.findLast((message) => message.role === 'user');
    if (asked) addMessage('user', String(asked.content));
    const element = addMessage('assistant', '');
    appendPieces(element, record.parts.flatMap((part) => part.pieces));
    addSummary(record, element);
    select(record, element);
    say(`Opened ${file.name}: ${summary(record)}.`);
  } catch (error) {
    say(error.message, true);
  }
  $('file').value = '';
});

explainTokens($('log'), $('origin'), (span, round) => {
  if (current.element?.contains(span)) card.show(round);
});
installTheme($('theme'));
connect();
