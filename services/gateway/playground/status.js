// The operator's page: asks for /status.json every second and shows values, charts and the last errors.

import { CallError, getJson, keyProblem, setKey } from './api.js';
import { Chart } from './chart.js';
import { chosen, draftState, whyDecided, whyNoDraft } from './reasons.js';
import { installTheme } from './theme.js';

const $ = (id) => document.getElementById(id);
const INTERVAL_MS = 1000;
const number = new Intl.NumberFormat('en', { maximumFractionDigits: 1 });
const TRANSPORTS = { inproc: 'in process', ipc: 'IPC', grpc: 'gRPC' };
const ms = (seconds) => `${(seconds * 1000).toFixed(1)} ms`;
const percent = (share) => `${(share * 100).toFixed(0)} %`;

let before = null;

const charts = {
  speed: new Chart($('charts'), 'Tokens/s', (value) => number.format(value)),
  running: new Chart($('charts'), 'Running requests', (value) => number.format(value)),
  accept: new Chart($('charts'), 'Accept length', (value) => value.toFixed(2)),
  kv: new Chart($('charts'), 'KV cache in use', percent),
  draft: new Chart($('charts'), 'Draft time per round', ms),
  verify: new Chart($('charts'), 'Verify time per pass', ms),
};

function show(id, rows) {
  $(id).replaceChildren(...rows.map(([name, value, state]) => {
    const row = document.createElement('div');
    const term = document.createElement('dt');
    const detail = document.createElement('dd');
    term.textContent = name;
    detail.textContent = value ?? '–';
    if (state !== undefined) detail.className = state ? 'good' : 'bad';
    row.append(term, detail);
    return row;
  }));
}

function showDepths(shares) {
  $('depths').replaceChildren(...shares.map(([share, rounds], index) => {
    const row = document.createElement('div');
    const [name, bar, value] = ['span', 'progress', 'span'].map((tag) => document.createElement(tag));
    name.textContent = `Depth ${index + 1}`;
    bar.value = share;
    bar.setAttribute('aria-label', `Share of the rounds drafted to depth ${index + 1} that accepted it`);
    row.title = `of ${number.format(rounds)} rounds drafted to this depth`;
    value.textContent = `${(share * 100).toFixed(1)} %`;
    row.append(name, bar, value);
    return row;
  }));
  if (!shares.length) $('depths').textContent = 'No drafted round yet.';
}

// A number of bytes, in the form of `outrider top`.
function size(bytes) {
  if (!bytes) return null;
  return bytes >= 2 ** 30 ? `${(bytes / 2 ** 30).toFixed(1)} GiB` : `${(bytes / 2 ** 20).toFixed(1)} MiB`;
}

// How the draft's trees reach the target, such as “IPC, on the device”. Without a GPU, “IPC”.
function transport(resources) {
  const name = TRANSPORTS[resources.draft_transport];
  const way = { true: ', on the device', false: ', through the host' }[resources.draft_on_device] ?? '';
  return name ? name + (resources.gpu_total_bytes ? way : '') : 'no draft';
}

function showResources(resources) {
  show('resources', resources ? [
    ['Weights', size(resources.weight_bytes)], ['KV cache', size(resources.kv_bytes)],
    ['Process', size(resources.process_bytes)],
    ['GPU', resources.gpu_total_bytes ? `${size(resources.gpu_used_bytes)} of ${size(resources.gpu_total_bytes)}` : 'none'],
    ['CUDA graphs', `${resources.graphs_recorded} recorded, ${resources.graphs_left} left`],
    ['Memory of graphs', size(resources.graph_bytes)],
    ['Transport of drafts', transport(resources)],
    ['Draft features', resources.draft_features.join(', ').replaceAll('_', ' ') || null],
  ] : []);
}

function showDecision(auto) {
  show('auto', auto ? [
    ['Last choice', chosen(auto)], ['Reason', whyDecided(auto)],
    ['Estimated speed of this choice', auto.estimated_speedup ? `${auto.estimated_speedup.toFixed(2)} × plain decoding` : null],
    ['Estimated time of a round', auto.round_ms ? `${auto.round_ms.toFixed(1)} ms` : null],
  ] : [['Last choice', null]]);
}

// A duration in words, in the form of `outrider top`.
function duration(seconds) {
  const minutes = Math.floor(seconds / 60);
  if (minutes < 1) return `${Math.floor(seconds)} s`;
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

const uptime = (service) => (typeof service?.uptime_s === 'number' ? duration(service.uptime_s) : null);

// How often the gateway lost a target, and how often the target lost its draft, such as “target 1 ×, draft 2 ×”.
function lostConnections(targets, draft) {
  const counts = { target: targets.reduce((sum, one) => sum + one.connections_lost, 0), draft: draft?.connections_lost };
  return Object.entries(counts).filter(([, count]) => count).map(([name, count]) => `${name} ${count} ×`).join(', ')
    || 'none';
}

function render(status) {
  const { gateway, model, target, targets, metrics } = status;
  const ready = targets.filter((one) => one.ready).length;
  const metric = (name) => metrics[`outrider_${name}`];
  const counted = (name) => (metric(name) === undefined ? null : number.format(metric(name)));
  $('server').textContent = model ? `model ${model.names.join(', ')}` : 'no target';
  const draft = target?.draft;
  show('services', [
    ['Gateway', status.draining ? 'draining' : `version ${status.version}`, !status.draining],
    targets.length > 1
      ? ['Targets', `${ready} of ${targets.length} ready`, ready === targets.length]
      : ['Target', target ? 'ready' : 'not ready', Boolean(target)],
    ['Draft', draft ? draftState(draft.state) : 'unknown', draft ? draft.state === 'on' || draft.state === 'none' : false],
    ['Gateway up for', duration(status.uptime_s)],
    ['Target up for', uptime(target)], ['Draft up for', uptime(draft)],
    ['Lost connections', lostConnections(targets, draft)],
  ]);
  show('model', model ? [
    ['Architecture', model.architecture], ['Device', `${model.device}, ${model.dtype}`],
    ['Context', `${number.format(model.max_model_len)} tokens`], ['Vocabulary', number.format(model.vocab_size)],
    ['Weights', model.weight_version],
  ] : [['Target', 'does not answer']]);
  show('batch', [
    ['Running', target ? `${target.running} of ${target.max_running_requests}` : null],
    ['Waiting in the target', target?.waiting], ['Waiting in the gateway', `${gateway.waiting} of ${gateway.max_queued_requests}`],
    ['Prompt tokens waiting', number.format(gateway.waiting_prompt_tokens)],
    ['Generated tokens', counted('generation_tokens_total')],
  ]);
  const pages = target?.kv_pages;
  $('kv').value = pages?.total ? 1 - pages.free / pages.total : 0;
  const queried = metric('prefix_cache_queries_total');
  const found = queried ? metric('prefix_cache_hits_total') / queried : null;
  show('memory', [
    ['Pages in use', pages ? `${number.format(pages.total - pages.free)} of ${number.format(pages.total)}` : null],
    ['Committed tokens', counted('kv_cache_tokens{kind="committed"}')],
    ['Reserved tokens', counted('kv_cache_tokens{kind="reserved"}')],
    ['Retractions', counted('num_preemptions_total')],
    ['Prompt tokens found', found === null ? null : percent(found)],
  ]);
  showResources(target?.resources);
  showDecision(target?.auto);
  const fallbacks = Object.entries(metrics)
    .filter(([name, value]) => name.startsWith('outrider_draft_fallback_total{') && value)
    .map(([name, value]) => `${whyNoDraft(/reason="([^"]*)"/.exec(name)[1])} (${number.format(value)})`).join('; ');
  const drafts = metric('spec_decode_num_drafts_total') ?? 0;
  show('speculation', [
    ['Mode of requests that name none', gateway.speculation_mode],
    ['Algorithm', draft ? draft.algorithm ?? 'none' : null],
    ['Tree in mode “on”', draft?.algorithm ? `depth ${draft.num_steps}, topk ${draft.topk}, ${draft.num_draft_tokens} nodes` : null],
    ['Accept length', target?.accept_length ? target.accept_length.toFixed(2) : null],
    ['Speed-up of recent drafted rounds', metric('estimated_speedup') ? `${metric('estimated_speedup').toFixed(2)} ×` : null],
    ['Accepted draft tokens', `${counted('spec_decode_num_accepted_tokens_total') ?? 0} of ${counted('spec_decode_num_draft_tokens_total') ?? 0}`],
    ['Drafted rounds', number.format(drafts)],
    ['Rounds that got no draft', fallbacks || 'none'],
  ]);
  const depths = [];
  for (let depth = 1; metric(`accepted_tokens_total{depth="${depth}"}`); depth += 1) {
    const drafted = metric(`drafted_rounds_total{depth="${depth}"}`) ?? drafts;
    depths.push([metric(`accepted_tokens_total{depth="${depth}"}`) / drafted, drafted]);
  }
  showDepths(depths);
  renderTargets(targets);
  renderErrors(status.errors);
  chart(status, pages);
  before = status;
}

// The roles keep the meaning of a table where a narrow screen shows its rows as lines.
function tableRow(texts) {
  const row = document.createElement('tr');
  row.setAttribute('role', 'row');
  for (const text of texts) {
    const cell = row.insertCell();
    cell.setAttribute('role', 'cell');
    cell.textContent = text;
  }
  return row;
}

// Shows a line for each target, if there are several.
function renderTargets(targets) {
  $('targets-card').hidden = targets.length < 2;
  $('targets').replaceChildren(...targets.map(({ address, model, ready, stats }) => {
    const pages = stats?.kv_pages;
    return tableRow([address, model ?? '–', ready ? 'ready' : 'not ready', ...(stats ? [
      `${stats.running} of ${stats.max_running_requests}`, stats.waiting,
      pages.total ? percent(1 - pages.free / pages.total) : '–',
      stats.accept_length ? stats.accept_length.toFixed(2) : '–', draftState(stats.draft.state),
    ] : Array(5).fill('–'))]);
  }));
}

function renderErrors(errors) {
  $('errors').replaceChildren(...errors.map((error) => {
    const row = tableRow([new Date(error.at * 1000).toLocaleTimeString(), error.status, error.reason, error.message,
      error.route, error.count, error.request_id]);
    row.lastChild.className = 'mono';
    return row;
  }));
  if (errors.length) return;
  const row = tableRow(['No error since the gateway started.']);
  row.firstChild.colSpan = 7;
  $('errors').append(row);
}

// Adds one point to each chart. Rates are differences of counters since the previous answer. At the first answer,
// the charts begin with what the gateway remembers.
function chart(status, pages) {
  const { metrics, target, recent } = status;
  if (!before) {
    charts.speed.begin(recent.tokens);
    charts.running.begin(recent.running);
    charts.accept.begin(recent.accept_length);
    return;
  }
  const seconds = status.at - before.at;
  const delta = (name) => (metrics[`outrider_${name}`] ?? 0) - (before.metrics[`outrider_${name}`] ?? 0);
  const mean = (name) => (delta(`${name}_count`) > 0 ? delta(`${name}_sum`) / delta(`${name}_count`) : null);
  const tokens = before.target && target ? target.generated_tokens - before.target.generated_tokens : null;
  charts.speed.add(tokens === null || tokens < 0 || !seconds ? null : tokens / seconds);
  charts.running.add(target ? target.running : null);
  const rounds = delta('spec_decode_num_drafts_total');
  charts.accept.add(rounds > 0 ? 1 + delta('spec_decode_num_accepted_tokens_total') / rounds : null);
  charts.kv.add(pages?.total ? 1 - pages.free / pages.total : null);
  charts.draft.add(mean('draft_seconds'));
  charts.verify.add(mean('verify_seconds'));
}

async function poll() {
  try {
    render(await getJson('/status.json'));
    $('key-form').hidden = true;
    $('message').textContent = '';
  } catch (error) {
    if (error instanceof CallError && error.status === 401) {
      $('key-form').hidden = false;
      $('message').textContent = keyProblem();
      return;
    }
    $('message').textContent = error.message;
  }
  setTimeout(poll, INTERVAL_MS);
}

$('key-form').addEventListener('submit', (event) => {
  event.preventDefault();
  setKey($('key').value);
  poll();
});
installTheme($('theme'));
poll();
